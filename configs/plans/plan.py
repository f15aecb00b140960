"""A plan: the cells of a study by key, and the points of each experiment.

Written to `plan.json` before anything runs; the report is rendered from the plan and the records alone.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.common.execution import Layout
from configs.common.files.reading import MAX_JSON_VALUES, MIB, PLAN_BYTES, as_model, brief, read_json_object
from configs.common.printable import plural, printable
from configs.hardware.hardware import Machine
from configs.hardware.prices import TargetPrices
from configs.plans.prediction import Prediction
from configs.records.record import check_schema
from configs.spec.cell import Cell
from configs.spec.engines import EngineEnvironment, OtherServer
from configs.spec.measuring import Measuring
from configs.spec.objectives import Objectives, Purpose
from configs.spec.study import StudyError, StudySpec
from configs.targets.target import Target
from configs.workloads import descriptor_of

MAX_REPEATS = 100_000
_PREDICTION_BYTES, _PREDICTION_VALUES = 1000, 40
"""Of a cell, which a plan gets later; more than there are."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
Stop = Literal["target reached", "most repeats", "budget of time", "budget of money"]
ExperimentKind = Literal[
    "strong", "weak", "sweep", "optimization", "correctness", "compression", "communication", "layouts", "load"
]


PrintableName = Annotated[str, AfterValidator(printable)]
"""Shown in tables, plots and on terminals; whoever wrote it, no control character of it gets there."""


def _printable_values(values: dict[str, Any]) -> dict[str, Any]:
    return {printable(key): printable(value) if isinstance(value, str) else value for key, value in values.items()}


PointValues = Annotated[dict[str, Any], AfterValidator(_printable_values)]
"""What tells the points of an experiment apart."""


class PlannedModel(Frozen):
    """A model after its identity was resolved."""

    name: PrintableName
    identity: str
    manifest: str = Field(description="path of the manifest.json; empty: on a hub, not fetched yet")

    @property
    def synthetic(self) -> bool:
        """Whether the weights are random: such a model's answers mean nothing."""
        return self.identity.startswith("synthetic:")


class UnusableModel(Frozen):
    """A model whose files cannot be measured; the other models of the study are."""

    name: str
    reason: str


class CellPoint(Frozen):
    """One cell's place in an experiment."""

    cell: str
    values: PointValues
    label: PrintableName
    baseline: bool = False


class RefusedPoint(Frozen):
    """A point of a grid that this version cannot measure, such as an engine in a layout that it does not have."""

    label: PrintableName
    values: PointValues
    reason: PrintableName


class ConsideredLayout(Frozen):
    """A layout that was considered, with what the planner said of it."""

    label: PrintableName
    layout: Layout
    prediction: Prediction
    cell: str | None = Field(None, description="key of the cell that measures it; none: it is not measured")
    reason: str | None = Field(None, description="why it is not measured")


class PlannedForecast(Frozen):
    """How far scaling is forecast; `machine`: over whose interconnect, none: machines like the measured one."""

    to: int = 4096
    machine: Machine | None = None


class PlannedExperiment(Frozen):
    """One question put to one model; `model` is None for noop and communication.

    `values` of the points: `{"ranks": n}` for strong and weak scaling, `{dotted field: value}` for a
    sweep, `{"variant": name}` for an optimization (its baseline is named `baseline`), for correctness
    `{"engine": ..., "dtype": ..., "layout": ...}` with the reference as baseline, for compression
    `{"compression": passes, "dtype": ..., "answers": bool}` with the uncompressed cells as baselines, for communication
    `{"ranks": n, "transport": name}`, and `{"layout": label}`
    for layouts. `candidates` of layouts: all that there are, the one predicted best first. `refused`: what would have
    been points, had the engine or the pass been able to.
    """

    name: PrintableName
    kind: ExperimentKind
    model: PrintableName | None
    grow: str | None = None
    points: tuple[CellPoint, ...]
    candidates: tuple[ConsideredLayout, ...] = ()
    refused: tuple[RefusedPoint, ...] = ()
    reference: str | None = Field(None, description="name in the inputs of a saved reference, for correctness")


class Plan(Frozen):
    """What is to be measured: every cell, how often, and for which experiments."""

    schema_version: int = SCHEMA_VERSION
    study: PrintableName
    models: tuple[PlannedModel, ...]
    unusable: tuple[UnusableModel, ...] = Field((), description="models of the study without cells, and why")
    targets: tuple[Target, ...]
    measuring: Measuring
    pack: bool
    experiments: tuple[PlannedExperiment, ...]
    cells: dict[str, Cell]
    repeats: dict[str, Annotated[int, Field(ge=0, le=MAX_REPEATS)]]
    objectives: Objectives = Objectives()
    purpose: Purpose | None = None
    engines: dict[OtherServer, EngineEnvironment] = {}
    prices: dict[str, TargetPrices] = Field(
        {}, description="by target; also of those that the study had before, whose launches have cost money"
    )
    stopped: dict[str, Stop] = Field({}, description="cell -> what ended its repeats, where a target_interval is asked")
    forecast: PlannedForecast = PlannedForecast()
    machines: dict[str, Machine] = Field({}, description="target -> what the planner takes it for")
    predictions: dict[str, Prediction] = Field({}, description="cell -> what the planner said of it beforehand")

    @property
    def usd_per_hour(self) -> float | None:
        """What an hour of the dearest launch costs, all its nodes; None where the price of a target is unknown."""
        most = {target.name: 1 for target in self.targets}
        for cell in self.cells.values():
            most[cell.target] = max(most.get(cell.target, 1), cell.nodes)
        priced = [
            price.usd_per_hour * most[target.name]
            for target in self.targets
            if (price := self.prices.get(target.name, TargetPrices()).price) is not None
        ]
        return max(priced) if len(priced) == len(self.targets) else None

    def usd_per_hour_of(self, cell: Cell) -> float | None:
        """What an hour of a cell costs, all its nodes; None where the price of its target is unknown."""
        price = self.prices.get(cell.target, TargetPrices()).price
        return None if price is None else price.usd_per_hour * cell.nodes


def check_plan_size(plan: Plan) -> None:
    """Raises StudyError for a plan larger than is read again: nothing that was measured could be reported."""
    text = plan.model_dump_json(indent=1).encode()
    size = len(text) + _PREDICTION_BYTES * len(plan.cells)
    values = sum(text.count(sign) for sign in (b",", b"[", b"{")) + _PREDICTION_VALUES * len(plan.cells)
    if size > PLAN_BYTES or values > MAX_JSON_VALUES:
        ranked = sum(len(experiment.candidates) for experiment in plan.experiments)
        holds = plural(len(plan.cells), "cell") + (f" and {plural(ranked, 'ranked layout')}" if ranked else "")
        raise StudyError(
            [f"experiments: the plan of {holds} takes {size / MIB:,.0f} MiB and {values:,} values, expected at most "
             f"{PLAN_BYTES / MIB:,.0f} MiB and {MAX_JSON_VALUES:,} values. Split the study into several"]
        )  # fmt: skip


def read_plan(path: Path) -> Plan:
    """Load `plan.json`. Raises OSError, SchemaError, or ValueError for a file that is no plan."""
    plan = as_model(check_schema(read_json_object(path, PLAN_BYTES), path), Plan, str(path))
    try:
        _check_consistent(plan)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return plan


def _check_consistent(plan: Plan) -> None:
    """What refers to a cell refers to one that is there, and each cell has its number of repeats. Raises ValueError."""
    if plan.repeats.keys() != plan.cells.keys():
        key = min(plan.repeats.keys() ^ plan.cells.keys())
        raise ValueError(f"repeats: cell {brief(key)} is in only one of cells and repeats")
    for key, planned in plan.cells.items():
        work = planned.workload.model_dump()
        for name in descriptor_of(planned.workload).input_fields:
            for given in work[name] if isinstance(work[name], list | tuple) else (work[name],):
                _check_input(given, f"cells: {brief(key)}: workload.{name}")
    for key in plan.stopped.keys() - plan.cells.keys():
        raise ValueError(f"stopped: no cell {brief(key)}")
    for experiment in plan.experiments:
        _check_input(experiment.reference, f"experiments: {brief(experiment.name)}: reference")
        if not experiment.points and not experiment.refused:
            raise ValueError(f"experiments: {brief(experiment.name)} has no points")
        ranked = (each.cell for each in experiment.candidates if each.cell is not None)
        for cell in (*(point.cell for point in experiment.points), *ranked):
            if cell not in plan.cells:
                raise ValueError(f"experiments: {brief(experiment.name)}: no cell {brief(cell)}")
            kind = plan.cells[cell].workload.kind
            if experiment.kind == "communication" and kind != "communication":
                raise ValueError(f"experiments: {brief(experiment.name)}: cell {brief(cell)} is of kind {kind}")
        _check_points(experiment)


def _check_input(name: str | None, where: str) -> None:
    """An input is named by its content: anything else would be opened as a path. Raises ValueError."""
    if name is not None and not _DIGEST.fullmatch(name):
        raise ValueError(f"{where}: {brief(name)} is no SHA-256 in hexadecimal")


def _check_points(experiment: PlannedExperiment) -> None:
    """The values that a report looks up by name are in every point. Raises ValueError."""
    values = [point.values for point in experiment.points]
    where = f"experiments: {brief(experiment.name)}"
    if experiment.kind == "sweep" and any(each.keys() != values[0].keys() for each in values):
        raise ValueError(f"{where}: the points do not have the same fields")
    if experiment.kind != "compression":
        return
    for point in experiment.points:
        named = [point.values.get(name) for name in ("compression", "dtype", "answers")]
        if not all(isinstance(value, kind) for value, kind in zip(named, (str, str, bool), strict=True)):
            raise ValueError(f"{where}: a point does not name its compression")
    timed = {(each["compression"], each["dtype"]) for each in values if not each["answers"]}
    if any((each["compression"], each["dtype"]) not in timed for each in values):
        raise ValueError(f"{where}: a point of answers has none that is timed")
    if experiment.points and not any(point.baseline for point in experiment.points):
        raise ValueError(f"{where}: no point is the baseline")


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
        engines=study.engines,
    )
