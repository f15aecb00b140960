"""A plan: the cells of a study by key, and the points of each experiment.

Written to `plan.json` before anything runs; the report is rendered from the plan and the records alone.
"""

from typing import Any, Literal

from pydantic import Field

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.common.execution import Layout
from configs.hardware.hardware import Machine
from configs.hardware.prices import TargetPrices
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.spec.objectives import Objectives, Purpose
from configs.spec.target import Target

Stop = Literal["target reached", "most repeats", "budget of time", "budget of money"]
ExperimentKind = Literal[
    "strong", "weak", "sweep", "optimization", "correctness", "compression", "communication", "layouts"
]


class PlannedModel(Frozen):
    """A model after its identity was resolved."""

    name: str
    identity: str
    manifest: str = Field(description="path of the manifest.json; empty: on a hub, not fetched yet")

    @property
    def synthetic(self) -> bool:
        """Whether the weights are random: such a model's answers mean nothing."""
        return self.identity.startswith("synthetic:")


class Point(Frozen):
    """One cell's place in an experiment."""

    cell: str
    values: dict[str, Any]
    label: str
    baseline: bool = False


class RefusedPoint(Frozen):
    """A point of a grid that this version cannot measure, such as an engine in a layout that it does not have."""

    label: str
    values: dict[str, Any]
    reason: str


class Candidate(Frozen):
    """A layout that was considered, with what the planner said of it."""

    label: str
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

    name: str
    kind: ExperimentKind
    model: str | None
    grow: str | None = None
    points: tuple[Point, ...]
    candidates: tuple[Candidate, ...] = ()
    refused: tuple[RefusedPoint, ...] = ()


class Plan(Frozen):
    """What is to be measured: every cell, how often, and for which experiments."""

    schema_version: int = SCHEMA_VERSION
    study: str
    models: tuple[PlannedModel, ...]
    targets: tuple[Target, ...]
    measuring: Measuring
    pack: bool
    experiments: tuple[PlannedExperiment, ...]
    cells: dict[str, Cell]
    repeats: dict[str, int]
    objectives: Objectives = Objectives()
    purpose: Purpose | None = None
    prices: dict[str, TargetPrices] = {}
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
