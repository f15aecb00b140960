"""Expand a study into a plan: all cells of all experiments, validated.

    plan = expand(study, models, inputs, count_prompts, layout_choice)

Cells that two experiments share appear once. Raises StudyError with every problem found.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from configs.common.execution import Layout
from configs.plans.plan import Candidate, Plan, PlannedExperiment, PlannedModel, Point, RefusedPoint
from configs.plans.prediction import Prediction
from configs.plans.refusals import CHOICES, refusal, unmeasurable_reason, why_none
from configs.spec.cell import Cell
from configs.spec.drafts import Draft, copied, override, reference_of
from configs.spec.experiments import (
    Communication,
    CompressionPasses,
    Correctness,
    Experiment,
    Layouts,
    Optimization,
    Overrides,
    StrongScaling,
    Sweep,
    WeakScaling,
)
from configs.spec.placement import grown_over_nodes, placed, unplaced
from configs.spec.study import StudyError, StudySpec
from configs.spec.target import Target
from configs.workloads import STUDIED, kinds_with
from configs.workloads.prompted import PromptedWorkload

_INPUT_FIELDS = tuple(dict.fromkeys(field for known in STUDIED.values() for field in known.input_fields))

CountPrompts = Callable[[PromptedWorkload], int]

_ANSWERED = 20
"""Default number of random prompts with answers."""


@dataclass(frozen=True)
class LayoutChoice:
    """How an experiment of layouts gets its candidates; this folder knows no planner.

    ranks: how many a target holds. ranked: every layout of a one-rank cell on up to so many ranks, with its
    prediction, the best first.
    """

    ranks: Callable[[Target], int]
    ranked: Callable[[Cell, int], Sequence[tuple[Layout, Prediction]]]


def expand(
    study: StudySpec,
    models: list[PlannedModel],
    inputs: dict[str, str],
    count_prompts: CountPrompts,
    layout_choice: LayoutChoice | None = None,
) -> Plan:
    """Make the plan.

    models: resolved, in the study's order. inputs: path as written in the study -> name in the inputs
    folder. count_prompts: how many prompts a workload (its inputs already replaced) selects.
    layout_choice: needed where an experiment is of kind layouts.
    """
    builder = _Builder(study, inputs, count_prompts, layout_choice)
    planned = []
    for name, experiment in study.experiments.items():
        chosen = [model for model in models if experiment.models is None or model.name in experiment.models]
        for target in study.targets:
            for model in builder.subjects(name, experiment, chosen):
                points, candidates = builder.points(name, experiment, model, target)
                refused = builder.refused_points(f"experiments.{name}", points)
                suffix = f" on {target.name}" if len(study.targets) > 1 else ""
                planned.append(
                    PlannedExperiment(
                        name=name + suffix,
                        kind=experiment.kind,
                        model=model.name if model else None,
                        grow=getattr(experiment, "grow", None),
                        points=tuple(points),
                        candidates=tuple(candidates),
                        refused=refused,
                    )
                )
    if builder.problems:
        raise StudyError(builder.problems)
    return empty_plan(study, models).model_copy(
        update={
            "experiments": tuple(planned),
            "cells": builder.cells,
            "repeats": {
                key: 1 if cell.workload.keeps_answers else study.measuring.repeats
                for key, cell in builder.cells.items()
            },
        }
    )


def empty_plan(study: StudySpec, models: Sequence[PlannedModel]) -> Plan:
    """Return the plan without experiments and cells: what a predictor must know before there are any."""
    return Plan(
        study=study.study,
        models=tuple(models),
        targets=tuple(study.targets),
        measuring=study.measuring,
        pack=study.pack,
        experiments=(),
        cells={},
        repeats={},
        objectives=study.objectives,
        purpose=study.purpose,
    )


class _Builder:
    """Collects cells and problems while the experiments are walked."""

    def __init__(
        self,
        study: StudySpec,
        inputs: dict[str, str],
        count_prompts: CountPrompts,
        layout_choice: LayoutChoice | None,
    ) -> None:
        self.study = study
        self.inputs = inputs
        self.count_prompts = count_prompts
        self.layout_choice = layout_choice
        self.targets = {target.name: target for target in study.targets}
        self.cells: dict[str, Cell] = {}
        self.problems: list[str] = []
        self.refused: list[RefusedPoint] = []

    def refused_points(self, where: str, points: list[Point]) -> tuple[RefusedPoint, ...]:
        """What the last experiment's grid could not have; a grid of nothing else is a problem of the study."""
        refused, self.refused = tuple(self.refused), []
        if refused and not points:
            for reason in dict.fromkeys(item.reason for item in refused):
                self._problem(f"{where}: no point can be measured: {reason}")
        return refused

    def subjects(self, name: str, experiment: Experiment, models: list[PlannedModel]) -> list[PlannedModel | None]:
        workload = experiment.base.get("workload")
        kind = workload.get("kind") if isinstance(workload, dict) else self.study.workload.kind
        known = STUDIED.get(str(kind))
        if (known is not None and not known.needs_model) or isinstance(experiment, Communication):
            return [None]
        if not models:
            self._problem(f"models: experiments.{name} of kind {kind} requires a model. Add at least one")
        return list(models)

    def points(
        self, name: str, experiment: Experiment, model: PlannedModel | None, target: Target
    ) -> tuple[list[Point], list[Candidate]]:
        """The points of an experiment, and where it chooses among layouts the candidates."""
        where = f"experiments.{name}"
        draft = self._draft(model, target)
        if not self._override(draft, experiment.base, f"{where}.base"):
            return [], []
        if isinstance(experiment, Layouts):
            return self._layouts(where, experiment, draft, target)
        if isinstance(experiment, StrongScaling | WeakScaling):
            return self._scaling(where, experiment, draft), []
        if isinstance(experiment, Sweep):
            return self._sweep(where, experiment, draft), []
        if isinstance(experiment, Optimization):
            return self._optimization(where, experiment, draft), []
        if isinstance(experiment, Communication):
            return self._communication(where, experiment, draft), []
        if isinstance(experiment, CompressionPasses):
            return self._compression(where, experiment, draft), []
        return self._correctness(where, experiment, draft), []

    def _draft(self, model: PlannedModel | None, target: Target) -> Draft:
        return {
            "model": model.identity if model else None,
            "workload": self.study.workload.model_dump(),
            "layout": self.study.layout.model_dump(),
            "dtype": self.study.dtype,
            "engine": self.study.engine,
            "target": target.name,
            "cores_per_rank": target.cores_per_rank,
            "env": dict(target.env),
        }

    def _scaling(self, where: str, experiment: StrongScaling | WeakScaling, draft: Draft) -> list[Point]:
        points = []
        degrees = experiment.degrees
        for position, degree in enumerate(degrees):
            cell_draft = copied(draft)
            label = self._grown(where, experiment.grow, degree, cell_draft)
            if label is None:
                return []
            work = cell_draft["workload"]
            known = STUDIED[work["kind"]]
            if known.takes_prompts and work.get("num_prompts") is None:
                available = self._prompts_in_file(cell_draft)
                replicas = Layout.model_validate(draft["layout"]).dp if experiment.grow == "nodes" else 1
                replicas *= 1 if experiment.kind == "weak" else max(degrees)
                work["num_prompts"] = available or (work.get("batch_size") or 1) * replicas
            if experiment.kind == "weak" and known.grows is not None:
                default = known.model.model_fields[known.grows].default
                work[known.grows] = (work.get(known.grows) or default) * degree
            ranks = Layout.model_validate(cell_draft["layout"]).ranks
            point = self._point(f"{where} at {label}", cell_draft, {"ranks": ranks}, label, baseline=position == 0)
            points.extend(point)
        return points

    def _grown(self, where: str, grow: str, degree: int, draft: Draft) -> str | None:
        """Grow a draft along an axis; returns what it is called then, None and a problem noted where it cannot."""
        if grow == "nodes":
            try:
                count = grown_over_nodes(draft, degree, self.targets[draft["target"]])
            except ValueError as error:
                self._problem(f"{where}.{error}")
                return None
        else:
            draft["layout"][grow] = degree
            count = Layout.model_validate(draft["layout"]).ranks
        return f"{count} {'node' if grow == 'nodes' else 'rank'}{'s' if count > 1 else ''}"

    def _sweep(self, where: str, experiment: Sweep, draft: Draft) -> list[Point]:
        points: list[Point] = []
        for values in itertools.product(*experiment.over.values()):
            chosen = dict(zip(experiment.over, values, strict=True))
            cell_draft = copied(draft)
            if not self._override(cell_draft, chosen, f"{where}.over"):
                return []
            label = ", ".join(f"{name.removeprefix('workload.')} {value}" for name, value in chosen.items())
            spot, refusable = f"{where} at {label}", not CHOICES.isdisjoint(chosen)
            points.extend(self._point(spot, cell_draft, chosen, label, not points, refusable))
        return points

    def _optimization(self, where: str, experiment: Optimization, draft: Draft) -> list[Point]:
        if not self._override(draft, experiment.baseline, f"{where}.baseline"):
            return []
        points = self._point(f"{where}.baseline", draft, {"variant": "baseline"}, "baseline", baseline=True)
        for variant, overrides in experiment.variants.items():
            if variant == "baseline":
                self._problem(f"{where}.variants.baseline: reserved name. Use another")
                continue
            cell_draft = copied(draft)
            if self._override(cell_draft, overrides, f"{where}.variants.{variant}"):
                spot, refusable = f"{where}.variants.{variant}", not CHOICES.isdisjoint(overrides)
                points.extend(self._point(spot, cell_draft, {"variant": variant}, variant, False, refusable))
        return points

    def _correctness(self, where: str, experiment: Correctness, draft: Draft) -> list[Point]:
        work = draft["workload"]
        known = STUDIED[work["kind"]]
        if known.answers is None:
            answering = " or ".join(kinds_with("answers"))
            self._problem(f"{where}: correctness requires a workload of kind {answering}")
            return []
        self._keep_answers(draft, experiment.prompts)
        if known.decodes:
            work["new_tokens"] = experiment.new_tokens
        dtypes = list(dict.fromkeys([*experiment.dtypes, "float32"]))
        reference = reference_of(draft)
        reference["workload"].update(noise_dtypes=tuple(dtypes), noise_orders=experiment.noise_orders)
        values = {"engine": "transformers", "dtype": "float32", "layout": "1 rank"}
        points = self._point(f"{where} reference", reference, values, "transformers, 1 rank, float32", baseline=True)
        for engine, layout, dtype in itertools.product(experiment.engines, experiment.layouts, dtypes):
            candidate = copied(draft) | {"engine": engine, "dtype": dtype, "layout": layout.model_dump()}
            values = {"engine": engine, "dtype": dtype, "layout": str(layout)}
            label = f"{engine}, {layout}, {dtype}"
            several = len(experiment.engines) > 1 or bool(draft.get("compression"))
            points.extend(self._point(f"{where} {label}", candidate, values, label, False, several))
        return points

    def _keep_answers(self, draft: Draft, most: int | None) -> None:
        """So many of the prompts are answered, and what is answered is kept."""
        work = draft["workload"]
        available = self._prompts_in_file(draft) or work.get("num_prompts")
        count = min(most or available or _ANSWERED, available or most or _ANSWERED)
        work.update(answers=True, num_prompts=count, batch_size=min(work.get("batch_size") or 1, count))

    def _compression(self, where: str, experiment: CompressionPasses, draft: Draft) -> list[Point]:
        """For the uncompressed model and each pass, in each precision: a cell for its speed, one for its answers."""
        if not self._override(draft, experiment.baseline, f"{where}.baseline"):
            return []
        if not STUDIED[draft["workload"]["kind"]].compressible:
            compressible = " or ".join(kinds_with("compressible"))
            self._problem(f"{where}: compression requires a workload of kind {compressible}")
            return []
        points: list[Point] = []
        dtypes = experiment.dtypes or [draft["dtype"]]
        for dtype, one in itertools.product(dict.fromkeys(dtypes), ["none", *experiment.passes]):
            label = f"{'uncompressed' if one == 'none' else one}, {dtype}"
            found: list[Point] = []
            for answers in (False, True):
                cell_draft = copied(draft) | {"dtype": dtype, "compression": one}
                if answers:
                    self._keep_answers(cell_draft, experiment.prompts)
                values = {"compression": one, "dtype": dtype, "answers": answers}
                base = dtype == dtypes[0] and one == "none"
                named = f"{label}, answers" if answers else label
                found += self._point(f"{where} {named}", cell_draft, values, named, base, one != "none")
                if not found:
                    break  # what is refused once needs no second word
            points += found
        return points

    def _communication(self, where: str, experiment: Communication, draft: Draft) -> list[Point]:
        points: list[Point] = []
        for ranks, transport in itertools.product(experiment.ranks, experiment.transports):
            cell_draft = copied(draft) | {"model": None, "layout": Layout(tp=ranks).model_dump(), "engine": "rankwise"}
            cell_draft["workload"] = {
                "kind": "communication",
                "operations": experiment.operations,
                "sizes_bytes": experiment.sizes_bytes,
                "transport": transport,
            }
            label = f"{ranks} rank{'s' if ranks > 1 else ''}, {transport}"
            values = {"ranks": ranks, "transport": transport}
            points.extend(self._point(f"{where} at {label}", cell_draft, values, label, baseline=not points))
        return points

    def _layouts(
        self, where: str, experiment: Layouts, draft: Draft, target: Target
    ) -> tuple[list[Point], list[Candidate]]:
        """The candidates in the order of the prediction; a point for each of the first that can be measured."""
        work = draft["workload"]
        known = STUDIED[work["kind"]]
        if not known.needs_model:
            self._problem(
                f"{where}: layouts requires predictions, which a {work['kind']} workload does not have. Use strong"
            )
            return [], []
        assert self.layout_choice is not None, "a study of layouts needs the planner"
        ranks = experiment.ranks or self.layout_choice.ranks(target)
        if known.takes_prompts and work.get("num_prompts") is None:
            work["num_prompts"] = self._prompts_in_file(draft) or (work.get("batch_size") or 1) * ranks
        if draft.pop("nodes", None) is not None:
            self._problem(f"{where}.base.nodes: determined by the ranks of a layout. Leave nodes out")
            return [], []
        draft["layout"] = Layout().model_dump()
        base = self._cell(where, draft)
        if base is None:
            return [], []
        points: list[Point] = []
        candidates = []
        for layout, prediction in self.layout_choice.ranked(base, ranks):
            label = str(layout) if layout.strategy == "none" else f"{layout} ({layout.strategy})"
            key, reason = None, unmeasurable_reason(draft, layout, prediction) or unplaced(layout.ranks, target)
            if reason is None and len(points) == experiment.best:
                reason = f"not among the {experiment.best} best predicted"
            if reason is None:
                drawn = copied(draft) | {"layout": layout.model_dump()}
                found = self._point(f"{where} at {label}", drawn, {"layout": label}, label, baseline=not points)
                key = found[0].cell if found else None
                points += found
            candidates.append(Candidate(label=label, layout=layout, prediction=prediction, cell=key, reason=reason))
        if not points:
            self._problem(f"{where}: {why_none(candidates, ranks)}")
        return points, candidates

    def _point(
        self,
        where: str,
        draft: Draft,
        values: dict[str, Any],
        label: str,
        baseline: bool = False,
        refusable: bool = False,
    ) -> list[Point]:
        """One point, or none and a problem noted; of a grid that may be refused points, none and the reason kept."""
        reason = refusal(draft) if refusable else None
        if reason is not None:
            self.refused.append(RefusedPoint(label=label, values=values, reason=reason))
            return []
        cell = self._cell(where, draft)
        if cell is None:
            return []
        self.cells.setdefault(cell.key, cell)
        return [Point(cell=cell.key, values=values, label=label, baseline=baseline)]

    def _cell(self, where: str, draft: Draft) -> Cell | None:
        """The cell of a draft, its inputs by their names in the folder; None, and a problem noted, if it is wrong."""
        work = draft["workload"] = {**draft["workload"]}
        for field in _INPUT_FIELDS:
            if work.get(field) is not None:
                work[field] = self.inputs.get(work[field], work[field])
        try:
            cell = Cell.model_validate(draft)
            if isinstance(cell.workload, PromptedWorkload) and cell.workload.num_prompts is None:
                count = self.count_prompts(cell.workload) if cell.workload.prompts else None
                work["num_prompts"] = count or cell.workload.batch_size * cell.layout.dp
                cell = Cell.model_validate(draft)
            return placed(cell, self.targets[cell.target], draft.get("nodes"))
        except ValidationError as error:
            for detail in error.errors():
                # The union's tag stands second in the location of a workload's field.
                location = [str(item) for item in detail["loc"] if item not in STUDIED]
                text = str(detail.get("ctx", {}).get("error", detail["msg"]))
                self._problem(f"{where}: {'.'.join(location)}{': ' if location else ''}{text}")
        except ValueError as error:
            self._problem(f"{where}: {error}")
        return None

    def _prompts_in_file(self, draft: Draft) -> int | None:
        work = draft["workload"]
        if work.get("prompts") is None:
            return None
        fields = {name: work.get(name) for name in ("variant", "limit")}
        return self.count_prompts(PromptedWorkload(prompts=self.inputs.get(work["prompts"], work["prompts"]), **fields))

    def _override(self, draft: Draft, overrides: Overrides, where: str) -> bool:
        """Set dotted fields of a draft; False, with the problems noted, where one does not exist."""
        problems = override(draft, overrides)
        for problem in problems:
            self._problem(f"{where}.{problem}")
        return not problems

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
