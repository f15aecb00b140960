"""Rank the layouts of a study by prediction and choose the interconnect of its scaling forecast.

    choice = layout_choice(study, models, inputs, cache, before)      # for configs.plans.expand
    plan = with_forecast(plan, study, inputs, cache)                  # Plan.forecast, Plan.machines

No Prefect here.
"""

import logging
from pathlib import Path

from configs.common.execution import Layout
from configs.hardware.catalog import instance
from configs.hardware.hardware import Machine
from configs.plans.plan import Plan, PlannedForecast, PlannedModel, empty_plan
from configs.plans.points.layouts import LayoutChoice
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.spec.placement import placed
from configs.spec.study import StudyError, StudySpec
from configs.targets.target import LocalTarget, Target
from configs.workloads.noop import NoopWorkload
from engine.planner.choice.layouts import ranked_layouts, with_layout
from engine.planner.local import local_ranks
from tasks.planning.predictions import MachineOf, Predictor
from tasks.planning.target_machine import same_nodes

SCALING = ("strong", "weak")

_log = logging.getLogger(__name__)


def layout_choice(
    study: StudySpec,
    models: list[PlannedModel],
    inputs: Path,
    cache: Path,
    before: Plan | None = None,
    machine_of: MachineOf | None = None,
) -> LayoutChoice:
    """Layouts ranked by prediction on the machine of their target.

    machine_of: where the cells would run; this machine if not given.
    before: the plan of an earlier run in the same folder. Its ranking stays, because its records have taught the
    planner since, and must not change what they are held against.
    """
    predictor = Predictor(empty_plan(study, models), inputs, cache, machine_of)
    targets = {target.name: target for target in study.targets}

    def ranked(cell: Cell, ranks: int) -> list[tuple[Layout, Prediction]]:
        if cell.engine != "rankwise":
            raise StudyError([f"layouts: auto: engine {cell.engine} is not predicted. List the layouts in a sweep"])
        architecture = predictor.architectures.get(cell.model or "")
        if architecture is None or isinstance(architecture, str):
            raise StudyError([f"layouts: auto: {architecture or 'unknown model'}; list the layouts in a sweep"])
        try:
            machine = predictor.machine(with_layout(cell, Layout(dp=ranks)))
        except ValueError as error:
            raise StudyError([f"layouts: auto: {error}, or list the layouts in a sweep"]) from error
        found = ranked_layouts(cell, architecture, machine, ranks, predictor.predict)
        return _as_before(cell, found, before, targets[cell.target]) or found

    def ranks(target: Target) -> int:
        if not isinstance(target, LocalTarget):
            return ranks_at_hand(target)
        there = machine_of(Cell(workload=NoopWorkload(), target=target.name)) if machine_of is not None else None
        if there is None or there.accelerator.kind == "cpu":
            return ranks_at_hand(target)
        return min(there.accelerators, target.max_ranks or there.accelerators)

    return LayoutChoice(ranks=ranks, ranked=ranked)


def ranks_at_hand(target: Target) -> int:
    """How many ranks a target holds by its devices or cores, as `tasks.checks.machine` counts them; 1 or more."""
    if not isinstance(target, LocalTarget):
        return target.rank_limit
    return max(1, local_ranks(target, target.cores_per_rank))


def with_forecast(plan: Plan, study: StudySpec, inputs: Path, cache: Path) -> Plan:
    """The plan with the interconnect of its forecasts. Raises StudyError naming an instance that is not known."""
    machine = None
    if study.forecast.machine is not None:
        try:
            machine = _bare(instance(study.forecast.machine))
        except (ValueError, KeyError) as error:
            raise StudyError([f"forecast.machine: {error}"]) from error
    forecast = PlannedForecast(to=study.forecast.to, machine=machine)
    return plan.model_copy(update={"forecast": forecast, "machines": _machines(plan, inputs, cache)})


def _machines(plan: Plan, inputs: Path, cache: Path) -> dict[str, Machine]:
    """Target -> the machine as it is with the most ranks of its scaling experiments at work."""
    unknown = {target.name for target in plan.targets if not isinstance(target, LocalTarget) and target.machine is None}
    widest: dict[str, Cell] = {}
    for experiment in plan.experiments:
        for point in experiment.points if experiment.kind in SCALING and experiment.model is not None else ():
            cell = plan.cells[point.cell]
            if cell.target in unknown:
                continue
            if cell.target not in widest or cell.layout.ranks > widest[cell.target].layout.ranks:
                widest[cell.target] = cell
    if not widest:
        return {}
    predictor = Predictor(plan, inputs, cache)
    found: dict[str, Machine] = {}
    for target, cell in widest.items():
        try:
            found[target] = _bare(predictor.machine(cell))
        except Exception as error:  # a fault of the planner's own must not stop a run
            _log.warning("no forecast of scaling with communication: %s", error)
    return found


def _bare(machine: Machine) -> Machine:
    """Without the rates of single operators, which a forecast does not need."""
    return machine.model_copy(update={"accelerator": machine.accelerator.model_copy(update={"operators": None})})


def _as_before(
    cell: Cell, found: list[tuple[Layout, Prediction]], before: Plan | None, target: Target
) -> list[tuple[Layout, Prediction]] | None:
    """The ranking of the earlier plan, where it ranked the same layouts of the same cell on the same nodes."""
    if before is None or not same_nodes(target, next((one for one in before.targets if one.name == target.name), None)):
        return None
    layouts = {layout for layout, _ in found}
    for experiment in before.experiments:
        measured = {candidate.layout: candidate.cell for candidate in experiment.candidates if candidate.cell}
        alike = {candidate.layout for candidate in experiment.candidates} == layouts
        same = (placed(with_layout(cell, layout), target, None).key == key for layout, key in measured.items())
        if alike and measured and all(same):
            return [(candidate.layout, candidate.prediction) for candidate in experiment.candidates]
    return None
