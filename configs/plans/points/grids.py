"""The points of experiments that list values: sweeps, loads, optimizations and operations of communication."""

import itertools
from typing import Any

from configs.common.execution import Layout
from configs.common.printable import value_text
from configs.plans.plan import CellPoint
from configs.plans.points.builder import PointBuilder
from configs.plans.points.refusals import CHOICES
from configs.spec.drafts import Draft, copied
from configs.spec.experiments import Communication, Optimization, ServerLoad, Sweep
from configs.workloads import STUDIED, kinds_with

TRAFFIC = ("rate", "users", "trace")
"""Fields of which an experiment of load has one: those of the study's workload give way to its own."""


def sweep_points(builder: PointBuilder, where: str, experiment: Sweep | ServerLoad, draft: Draft) -> list[CellPoint]:
    """One point for each combination of the values under `over`."""
    points: list[CellPoint] = []
    # One stage has no balance: a grid of degrees and balances measures it once.
    balances = len(experiment.over) > 1 and not {"stage_balance", "layout.stage_balance"}.isdisjoint(experiment.over)
    first: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*experiment.over.values()):
        chosen = dict(zip(experiment.over, values, strict=True))
        cell_draft = copied(draft)
        if not builder.override(cell_draft, chosen, f"{where}.over"):
            return []
        label = ", ".join(f"{name.removeprefix('workload.')} {value_text(value)}" for name, value in chosen.items())
        spot, refusable = f"{where} at {label}", not CHOICES.isdisjoint(chosen)
        made = builder.point(spot, cell_draft, chosen, label, not points, refusable)
        builder.note_unfilled_batch(spot, chosen, made)
        points += [point for point in made if not balances or first.setdefault(point.cell, chosen) == chosen]
    return points


def load_points(builder: PointBuilder, where: str, experiment: ServerLoad, draft: Draft) -> list[CellPoint]:
    """The points of a grid, or the only one; what a point sets replaces the same kind of traffic of the study."""
    if not STUDIED[draft["workload"]["kind"]].starts_server:
        serving = " or ".join(kinds_with("starts_server"))
        builder.note_problem(f"{where}: load requires a workload of kind {serving}")
        return []
    given = {name.removeprefix("workload.") for name in (*experiment.asked, *experiment.over)}
    if not given.isdisjoint(TRAFFIC):
        draft["workload"] |= dict.fromkeys(TRAFFIC)
    if not builder.override(draft, experiment.asked, where):
        return []
    if experiment.over:
        return sweep_points(builder, where, experiment, draft)
    return builder.point(where, draft, {}, draft["workload"].get("find") or "load", baseline=True)


def optimization_points(builder: PointBuilder, where: str, experiment: Optimization, draft: Draft) -> list[CellPoint]:
    """The baseline and one point for each variant."""
    if not builder.override(draft, experiment.baseline, f"{where}.baseline"):
        return []
    # A copy: the number of prompts that follows from the baseline's batch and replicas is not that of a variant.
    points = builder.point(f"{where}.baseline", copied(draft), {"variant": "baseline"}, "baseline", baseline=True)
    for variant, overrides in experiment.variants.items():
        if variant == "baseline":
            builder.note_problem(f"{where}.variants.baseline: reserved name. Use another")
            continue
        cell_draft = copied(draft)
        if builder.override(cell_draft, overrides, f"{where}.variants.{variant}"):
            spot, refusable = f"{where}.variants.{variant}", not CHOICES.isdisjoint(overrides)
            made = builder.point(spot, cell_draft, {"variant": variant}, variant, False, refusable)
            builder.note_unfilled_batch(spot, overrides, made)
            points.extend(made)
    return points


def communication_points(builder: PointBuilder, where: str, experiment: Communication, draft: Draft) -> list[CellPoint]:
    """One point for each number of ranks and transport; all operations and sizes are measured in it."""
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
        points.extend(builder.point(f"{where} at {label}", cell_draft, values, label, baseline=not points))
    return points
