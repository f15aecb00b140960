"""Expand a study into a plan: all cells of all experiments, validated.

    plan = expand(study, models, inputs, count_prompts, layout_choice)

Cells that two experiments share appear once. Raises StudyError with every problem found.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from configs.common.execution import Layout
from configs.common.printable import value_text
from configs.plans.answered import answering_drafts, kept_answers, used_workloads
from configs.plans.plan import CellPoint, ConsideredLayout, Plan, PlannedExperiment, PlannedModel, empty_plan
from configs.plans.points import CountPrompts, PointBuilder
from configs.plans.prediction import Prediction
from configs.plans.refusals import CHOICES, unmeasurable_reason, why_none
from configs.spec.cell import Cell
from configs.spec.drafts import Draft, copied, field_path
from configs.spec.experiments import (
    Communication,
    CompressionPasses,
    Correctness,
    Experiment,
    Layouts,
    Optimization,
    ServerLoad,
    StrongScaling,
    Sweep,
    WeakScaling,
)
from configs.spec.placement import grown_over_nodes, unplaced
from configs.spec.study import StudyError, StudySpec
from configs.targets.target import EndpointTarget, Target
from configs.workloads import STUDIED, kinds_with
from configs.workloads.prompted import PromptedWorkload

TRAFFIC = ("rate", "users", "trace")
"""Fields of which an experiment of load has one: those of the study's workload give way to its own."""


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
    references: Mapping[str, PromptedWorkload] | None = None,
) -> Plan:
    """Make the plan.

    models: resolved, in the study's order; an experiment of other models alone is left out. inputs: path as written in
    the study -> name in the inputs folder. count_prompts: how many prompts a workload (its inputs already replaced)
    selects. layout_choice: needed where an experiment is of kind layouts. references: path of a saved reference as
    written -> what it answered.
    """
    builder = _Builder(study, inputs, count_prompts, layout_choice=layout_choice, references=references or {})
    planned: dict[str, list[PlannedExperiment]] = {name: [] for name in study.experiments}
    # Answers are compared at the sizes that the other experiments measure.
    for name, experiment in sorted(study.experiments.items(), key=lambda item: item[1].kind == "correctness"):
        wanted = {model.name for model in study.models if experiment.models is None or model.name in experiment.models}
        chosen = [model for model in models if model.name in wanted]
        if wanted and not chosen:
            continue
        for target in study.targets:
            for model in builder.subjects(name, experiment, chosen, target):
                points, candidates = builder.checked_points(name, experiment, model, target)
                refused = builder.refused_points(f"experiments.{name}", points)
                suffix = f" on {target.name}" if len(study.targets) > 1 else ""
                planned[name].append(
                    PlannedExperiment(
                        name=name + suffix,
                        kind=experiment.kind,
                        model=model.name if model else None,
                        grow=getattr(experiment, "grow", None),
                        points=tuple(points),
                        candidates=tuple(candidates),
                        refused=refused,
                        reference=inputs.get(getattr(experiment, "reference", None) or ""),
                    )
                )
    if not builder.problems and all(planned.values()):
        builder.note_without_effect()
    if builder.problems:
        raise StudyError(list(builder.problems))
    return empty_plan(study, models).model_copy(
        update={
            "experiments": tuple(itertools.chain.from_iterable(planned.values())),
            "cells": builder.cells,
            "repeats": {
                key: 1 if cell.workload.keeps_answers else study.measuring.repeats
                for key, cell in builder.cells.items()
            },
        }
    )


@dataclass
class _Builder(PointBuilder):
    """The points of each kind of experiment."""

    layout_choice: LayoutChoice | None = None
    references: Mapping[str, PromptedWorkload] = field(default_factory=dict)

    def subjects(
        self, name: str, experiment: Experiment, models: list[PlannedModel], target: Target
    ) -> list[PlannedModel | None]:
        """The models that an experiment asks about on a target; [None] where the work or an endpoint needs none."""
        if isinstance(target, EndpointTarget):
            return [None]
        workload = experiment.base.get("workload")
        kind = workload.get("kind") if isinstance(workload, dict) else self.study.workload.kind
        known = STUDIED.get(str(kind))
        if (known is not None and not known.needs_model) or isinstance(experiment, Communication):
            return [None]
        if not models and experiment.models is not None:
            self._problem(f"experiments.{name}.models: got none, but kind {kind} requires a model. Leave models out")
        elif not models:
            self._problem(f"models: experiments.{name} of kind {kind} requires a model. Add at least one")
        return list(models)

    def checked_points(
        self, name: str, experiment: Experiment, model: PlannedModel | None, target: Target
    ) -> tuple[list[CellPoint], list[ConsideredLayout]]:
        """The points of an experiment; none, and the problems noted, where its fields are wrong."""
        try:
            points, candidates = self.points(name, experiment, model, target)
            self.note_same_cells(f"experiments.{name}", points)
            self.note_without_figures(f"experiments.{name}", experiment.kind, points)
            return points, candidates
        except StudyError as error:
            self.problems |= dict.fromkeys(error.problems)
        except ValidationError as error:
            self._invalid(f"experiments.{name}", error, {})
        except ValueError as error:
            self._problem(f"experiments.{name}: {error}")
        return [], []

    def points(
        self, name: str, experiment: Experiment, model: PlannedModel | None, target: Target
    ) -> tuple[list[CellPoint], list[ConsideredLayout]]:
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
        if isinstance(experiment, ServerLoad):
            return self._load(where, experiment, draft), []
        if isinstance(experiment, Optimization):
            return self._optimization(where, experiment, draft), []
        if isinstance(experiment, Communication):
            return self._communication(where, experiment, draft), []
        if isinstance(experiment, CompressionPasses):
            return self._compression(where, experiment, draft), []
        return self._correctness(where, experiment, draft), []

    def _scaling(self, where: str, experiment: StrongScaling | WeakScaling, draft: Draft) -> list[CellPoint]:
        if not self._settled(where, draft):
            return []
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
                full = _whole(work.get("batch_size"))
                full *= 1 if experiment.grow == "dp" else Layout.model_validate(draft["layout"]).dp
                most = full if experiment.kind == "weak" else full * max(degrees)
                work["num_prompts"] = max(available, full) if available else most
            if experiment.kind == "weak" and known.grows is not None:
                default = known.model.model_fields[known.grows].default
                value = work.get(known.grows) or default
                work[known.grows] = value * degree if isinstance(value, int) else value
            ranks = Layout.model_validate(cell_draft["layout"]).ranks
            point = self._point(f"{where} at {label}", cell_draft, {"ranks": ranks}, label, baseline=position == 0)
            points.extend(point)
        if experiment.kind == "strong":
            self._equal_work(where, points)
        return points

    def _equal_work(self, where: str, points: list[CellPoint]) -> None:
        """Note a problem where the points of strong scaling do not do the same work, as far as their fields say."""
        works = {point.label: self.cells[point.cell].workload for point in points}
        stated = {
            label: work.work_of_step(self.cells[point.cell].layout)
            for point, (label, work) in zip(points, works.items(), strict=True)
        }
        known = {label: item for label, item in stated.items() if item is not None}
        if not known:
            return
        field = next(iter(known.values()))[0]
        units = {label: item[1] for label, item in known.items()}
        if None in units.values():
            self._problem(
                f"{where}: {field}: required by strong scaling, whose points do equal work. Set it, or use weak"
            )
        elif len(set(units.values())) > 1:
            found = ", ".join(f"{count:,} at {label}" for label, count in units.items())
            self._problem(
                f"{where}: {field}: got {found}, expected the same at every point of strong scaling. "
                "Divide the micro-batch by {dp}, or use weak"
            )

    def _grown(self, where: str, grow: str, degree: int, draft: Draft) -> str | None:
        """Grow a draft along an axis; returns what it is called then, None and a problem noted where it cannot."""
        if grow == "nodes":
            try:
                count = grown_over_nodes(draft, degree, self._target(draft["target"]))
            except ValidationError as error:
                self._invalid(where, error, draft)
                return None
            except ValueError as error:
                self._problem(f"{where}.{error}")
                return None
        else:
            draft["layout"][grow] = degree
            count = Layout.model_validate(draft["layout"]).ranks
        return f"{count} {'node' if grow == 'nodes' else 'rank'}{'s' if count > 1 else ''}"

    def _load(self, where: str, experiment: ServerLoad, draft: Draft) -> list[CellPoint]:
        """The points of a grid, or the only one; what a point sets replaces the same kind of traffic of the study."""
        if not STUDIED[draft["workload"]["kind"]].starts_server:
            serving = " or ".join(kinds_with("starts_server"))
            self._problem(f"{where}: load requires a workload of kind {serving}")
            return []
        given = {name.removeprefix("workload.") for name in (*experiment.asked, *experiment.over)}
        if not given.isdisjoint(TRAFFIC):
            draft["workload"] |= dict.fromkeys(TRAFFIC)
        if not self._override(draft, experiment.asked, where):
            return []
        if experiment.over:
            return self._sweep(where, experiment, draft)
        return self._point(where, draft, {}, draft["workload"].get("find") or "load", baseline=True)

    def _sweep(self, where: str, experiment: Sweep | ServerLoad, draft: Draft) -> list[CellPoint]:
        points: list[CellPoint] = []
        # One stage has no balance: a grid of degrees and balances measures it once.
        balances = len(experiment.over) > 1 and not {"stage_balance", "layout.stage_balance"}.isdisjoint(
            experiment.over
        )
        first: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*experiment.over.values()):
            chosen = dict(zip(experiment.over, values, strict=True))
            cell_draft = copied(draft)
            if not self._override(cell_draft, chosen, f"{where}.over"):
                return []
            label = ", ".join(f"{name.removeprefix('workload.')} {value_text(value)}" for name, value in chosen.items())
            spot, refusable = f"{where} at {label}", not CHOICES.isdisjoint(chosen)
            made = self._point(spot, cell_draft, chosen, label, not points, refusable)
            self.note_unfilled_batch(spot, chosen, made)
            points += [point for point in made if not balances or first.setdefault(point.cell, chosen) == chosen]
        return points

    def _optimization(self, where: str, experiment: Optimization, draft: Draft) -> list[CellPoint]:
        if not self._override(draft, experiment.baseline, f"{where}.baseline"):
            return []
        # A copy: the number of prompts that follows from the baseline's batch and replicas is not that of a variant.
        points = self._point(f"{where}.baseline", copied(draft), {"variant": "baseline"}, "baseline", baseline=True)
        for variant, overrides in experiment.variants.items():
            if variant == "baseline":
                self._problem(f"{where}.variants.baseline: reserved name. Use another")
                continue
            cell_draft = copied(draft)
            if self._override(cell_draft, overrides, f"{where}.variants.{variant}"):
                spot, refusable = f"{where}.variants.{variant}", not CHOICES.isdisjoint(overrides)
                made = self._point(spot, cell_draft, {"variant": variant}, variant, False, refusable)
                self.note_unfilled_batch(spot, overrides, made)
                points.extend(made)
        return points

    def _correctness(self, where: str, experiment: Correctness, draft: Draft) -> list[CellPoint]:
        known = STUDIED[draft["workload"]["kind"]]
        if known.answers is None:
            answering = " or ".join(kinds_with("answers"))
            self._problem(f"{where}: correctness requires a workload of kind {answering}")
            return []
        if not self._settled(where, draft):
            return []
        used = used_workloads(self.cells.values(), draft)
        saved = self.references.get(experiment.reference or "")
        try:
            drafts = answering_drafts(experiment, draft, self._prompts_in_file(draft), used, saved)
        except ValueError as error:
            self._problem(f"{where}.reference: {experiment.reference}: {error}")
            return []
        several = len(experiment.engines) > 1 or bool(draft.get("compression"))
        points: list[CellPoint] = []
        for each in drafts:
            refusable = several and not each.baseline
            points += self._point(
                f"{where} {each.label}", each.draft, each.values, each.label, each.baseline, refusable
            )
        return points

    def _compression(self, where: str, experiment: CompressionPasses, draft: Draft) -> list[CellPoint]:
        """For the uncompressed model and each pass, in each precision: a cell for its speed, one for its answers."""
        if not self._override(draft, experiment.baseline, f"{where}.baseline"):
            return []
        known = STUDIED[draft["workload"]["kind"]]
        if not known.compressible or known.answers is None:
            compressible = " or ".join(kind for kind in kinds_with("compressible") if STUDIED[kind].answers)
            self._problem(f"{where}: compression requires a workload of kind {compressible}")
            return []
        if not self._settled(where, draft):
            return []
        points: list[CellPoint] = []
        dtypes = experiment.dtypes or [draft["dtype"]]
        for dtype, one in itertools.product(dict.fromkeys(dtypes), ["none", *experiment.passes]):
            label = f"{'uncompressed' if one == 'none' else one}, {dtype}"
            found: list[CellPoint] = []
            for answers in (False, True):
                cell_draft = copied(draft) | {"dtype": dtype, "compression": one}
                if answers:
                    work = cell_draft["workload"]
                    work |= kept_answers(work, experiment.prompts, self._prompts_in_file(cell_draft))
                values = {"compression": one, "dtype": dtype, "answers": answers}
                base = dtype == dtypes[0] and one == "none"
                named = f"{label}, answers" if answers else label
                found += self._point(f"{where} {named}", cell_draft, values, named, base, one != "none")
                if not found:
                    break  # what is refused once needs no second word
            points += found
        return points

    def _communication(self, where: str, experiment: Communication, draft: Draft) -> list[CellPoint]:
        points: list[CellPoint] = []
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
    ) -> tuple[list[CellPoint], list[ConsideredLayout]]:
        """The candidates in the order of the prediction; a point for each of the first that can be measured."""
        work = draft["workload"]
        known = STUDIED[work["kind"]]
        if not known.needs_model or known.unpredicted:
            self._problem(
                f"{where}: layouts requires predictions, which a {work['kind']} workload does not have. "
                f"Use {known.shown_by or 'strong'}"
            )
            return [], []
        if not self._settled(where, draft):
            return [], []
        work = draft["workload"]
        assert self.layout_choice is not None, "a study of layouts needs the planner"
        ranks = experiment.ranks or self.layout_choice.ranks(target)
        if known.takes_prompts and work.get("num_prompts") is None:
            available, full = self._prompts_in_file(draft), _whole(work.get("batch_size"))
            work["num_prompts"] = max(available, full) if available else full * ranks
        chosen = [name for name in experiment.base if (field_path(draft, name) or ("",))[0] in ("layout", "nodes")]
        for name in chosen:
            self._problem(f"{where}.base.{name}: determined by the ranked layouts. Leave {name} out")
        if chosen:
            return [], []
        draft["layout"] = Layout().model_dump()
        base = self._cell(where, draft)
        if base is None:
            return [], []
        points: list[CellPoint] = []
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
            candidates.append(
                ConsideredLayout(label=label, layout=layout, prediction=prediction, cell=key, reason=reason)
            )
        if not points:
            self._problem(f"{where}: {why_none(candidates, ranks)}")
        return points, candidates


def _whole(value: object, default: int = 1) -> int:
    """A number of an override that is not validated yet; the default for what the cell's validation will refuse."""
    return value if isinstance(value, int) and value > 0 else default
