"""Enumerate the layouts of a study's cell on the available ranks, ranked by predicted speed.

    ranked = ranked_layouts(cell, architecture, machine, ranks=8, predict=predict)   # [(Layout, Prediction), ...]

Unlike `choice.search`, nothing but the layout changes: the cell's batch, precision and lengths stay, so that every
prediction can be measured. Layouts on fewer ranks (divisors) are included, because more ranks are not always faster.
`configs.plans.points.layouts` checks which layouts the engine supports.
"""

from collections.abc import Callable, Iterator, Sequence

from configs.common.execution import Layout
from configs.hardware.hardware import Machine
from configs.plans.prediction import Prediction
from configs.spec.cell import Cell
from configs.workloads import descriptor_of
from engine.planner.architecture import Architecture
from engine.planner.choice.search import SearchLimits, divisors, layouts
from engine.planner.setup import InferenceSetup, TrainingSetup

Predict = Callable[[Cell], Prediction]
Ranked = list[tuple[Layout, Prediction]]

NO_OFFLOAD = SearchLimits(offloads=("none",))
"""A cell cannot express offload, so no sharding strategy is useful on a single rank."""


def ranked_layouts(cell: Cell, architecture: Architecture, machine: Machine, ranks: int, predict: Predict) -> Ranked:
    """Return the layouts of a cell with their predictions: those that fit first, then by speed.

    machine: determines which tensor-parallel groups stay within a node.
    """
    found = valid_layouts(cell, architecture, machine, ranks)
    return by_speed([(layout, predict(with_layout(cell, layout))) for layout in found])


def valid_layouts(cell: Cell, architecture: Architecture, machine: Machine, ranks: int) -> Iterator[Layout]:
    """Every dp x tp x pp and strategy on so many ranks, then on fewer."""
    work, sequences = cell.workload, cell.workload.sequences
    assert sequences is not None, f"a {work.kind} has no model to lay out"
    trains = descriptor_of(work).trains
    base = TrainingSetup(architecture, machine) if trains else InferenceSetup(architecture, machine)
    for used in reversed(divisors(ranks)):
        yield from layouts(base, used, sequences, NO_OFFLOAD)


def by_speed(found: Sequence[tuple[Layout, Prediction]]) -> Ranked:
    """Sort by prediction; layouts without one come last among those that may fit. The sort is stable."""

    def place(item: tuple[Layout, Prediction]) -> tuple[bool, bool, float]:
        prediction = item[1]
        rate = prediction.throughput
        return prediction.fits is False, rate is None, -(rate or 0.0)

    return sorted(found, key=place)


def with_layout(cell: Cell, layout: Layout) -> Cell:
    """Return the cell with a layout that the engine may not support: the cell's validation is skipped."""
    return cell.model_copy(update={"layout": layout})
