"""Expand a study into a plan: all cells of all experiments, validated.

    plan = expand(study, models, inputs, count_prompts, layout_choice)

Cells that two experiments share appear once. `configs.plans.points` makes the points of each kind of experiment.
Raises StudyError with every problem found.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from configs.plans.plan import CellPoint, ConsideredLayout, Plan, PlannedExperiment, PlannedModel, empty_plan
from configs.plans.points.answers import compression_points, correctness_points
from configs.plans.points.builder import CountPrompts, PointBuilder
from configs.plans.points.grids import communication_points, load_points, optimization_points, sweep_points
from configs.plans.points.layouts import LayoutChoice, layout_points
from configs.plans.points.scaling import scaling_points
from configs.spec.experiments import (
    Communication,
    CompressionPasses,
    Experiment,
    Layouts,
    Optimization,
    ServerLoad,
    StrongScaling,
    Sweep,
    WeakScaling,
)
from configs.spec.study import StudyError, StudySpec
from configs.targets.target import EndpointTarget, Target
from configs.workloads import STUDIED
from configs.workloads.prompted import PromptedWorkload


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
    builder = PointBuilder(study, inputs, count_prompts)
    expansion = _Expansion(builder, layout_choice, references or {})
    planned: dict[str, list[PlannedExperiment]] = {name: [] for name in study.experiments}
    # Answers are compared at the sizes that the other experiments measure.
    for name, experiment in sorted(study.experiments.items(), key=lambda item: item[1].kind == "correctness"):
        wanted = {model.name for model in study.models if experiment.models is None or model.name in experiment.models}
        chosen = [model for model in models if model.name in wanted]
        if wanted and not chosen:
            continue
        for target in study.targets:
            for model in expansion.subjects(name, experiment, chosen, target):
                points, candidates = expansion.checked_points(name, experiment, model, target)
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


@dataclass(frozen=True)
class _Expansion:
    """What an experiment's points are made with."""

    builder: PointBuilder
    layout_choice: LayoutChoice | None
    references: Mapping[str, PromptedWorkload]

    def subjects(
        self, name: str, experiment: Experiment, models: list[PlannedModel], target: Target
    ) -> list[PlannedModel | None]:
        """The models that an experiment asks about on a target; [None] where the work or an endpoint needs none."""
        if isinstance(target, EndpointTarget):
            return [None]
        workload = experiment.base.get("workload")
        kind = workload.get("kind") if isinstance(workload, dict) else self.builder.study.workload.kind
        known = STUDIED.get(str(kind))
        if (known is not None and not known.needs_model) or isinstance(experiment, Communication):
            return [None]
        if not models and experiment.models is not None:
            self.builder.note_problem(
                f"experiments.{name}.models: got none, but kind {kind} requires a model. Leave models out"
            )
        elif not models:
            self.builder.note_problem(f"models: experiments.{name} of kind {kind} requires a model. Add at least one")
        return list(models)

    def checked_points(
        self, name: str, experiment: Experiment, model: PlannedModel | None, target: Target
    ) -> tuple[list[CellPoint], list[ConsideredLayout]]:
        """The points of an experiment; none, and the problems noted, where its fields are wrong."""
        try:
            points, candidates = self.points(name, experiment, model, target)
            self.builder.note_same_cells(f"experiments.{name}", points)
            self.builder.note_without_figures(f"experiments.{name}", experiment.kind, points)
            return points, candidates
        except StudyError as error:
            self.builder.problems |= dict.fromkeys(error.problems)
        except ValidationError as error:
            self.builder.note_invalid(f"experiments.{name}", error, {})
        except ValueError as error:
            self.builder.note_problem(f"experiments.{name}: {error}")
        return [], []

    def points(
        self, name: str, experiment: Experiment, model: PlannedModel | None, target: Target
    ) -> tuple[list[CellPoint], list[ConsideredLayout]]:
        """The points of an experiment, and where it chooses among layouts the candidates."""
        where, builder = f"experiments.{name}", self.builder
        draft = builder.draft(model, target)
        if not builder.override(draft, experiment.base, f"{where}.base"):
            return [], []
        if isinstance(experiment, Layouts):
            return layout_points(builder, self.layout_choice, where, experiment, draft, target)
        if isinstance(experiment, StrongScaling | WeakScaling):
            return scaling_points(builder, where, experiment, draft), []
        if isinstance(experiment, Sweep):
            return sweep_points(builder, where, experiment, draft), []
        if isinstance(experiment, ServerLoad):
            return load_points(builder, where, experiment, draft), []
        if isinstance(experiment, Optimization):
            return optimization_points(builder, where, experiment, draft), []
        if isinstance(experiment, Communication):
            return communication_points(builder, where, experiment, draft), []
        if isinstance(experiment, CompressionPasses):
            return compression_points(builder, where, experiment, draft), []
        return correctness_points(builder, where, experiment, draft, self.references), []
