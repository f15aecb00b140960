"""Every layout that a study's cell could have on the ranks at hand, and their order by predicted speed.

    ranked = ranked_layouts(cell, architecture, machine, ranks=8, predict=predict)   # [(Layout, Prediction), ...]

Unlike `choice.search`, nothing but the layout changes: the cell's batch, precision and lengths stay, so that what is
predicted can be measured. Layouts that leave ranks idle are among them, where the ranks can be shared out over them
(divisors): more ranks are not always faster. What the engine can measure is not asked here; `configs.expand` does.
"""

from collections.abc import Callable, Iterator, Sequence

from configs.cell import Cell, Layout, PromptedWorkload
from configs.hardware import Machine
from configs.prediction import Prediction
from configs.training import TrainWorkload
from engine.planner.architecture import Architecture
from engine.planner.choice.search import Limits, divisors, layouts
from engine.planner.setup import InferenceSetup, TrainingSetup

Predict = Callable[[Cell], Prediction]
Ranked = list[tuple[Layout, Prediction]]

NO_OFFLOAD = Limits(offloads=("none",))
"""A cell cannot say that it offloads, so no strategy serves a single rank."""


def ranked_layouts(cell: Cell, architecture: Architecture, machine: Machine, ranks: int, predict: Predict) -> Ranked:
    """Layouts of a cell with what is predicted of each: what fits before what does not, then the fastest first.

    machine: decides which tensor-parallel groups stay within a node.
    """
    found = valid_layouts(cell, architecture, machine, ranks)
    return by_speed([(layout, predict(with_layout(cell, layout))) for layout in found])


def valid_layouts(cell: Cell, architecture: Architecture, machine: Machine, ranks: int) -> Iterator[Layout]:
    """Every dp x tp x pp and strategy on so many ranks, then on fewer."""
    work = cell.workload
    assert isinstance(work, PromptedWorkload | TrainWorkload), f"a {work.kind} has no model to lay out"
    base: TrainingSetup | InferenceSetup
    if isinstance(work, TrainWorkload):
        base, sequences = TrainingSetup(architecture, machine), work.global_batch_size
    else:
        base, sequences = InferenceSetup(architecture, machine), work.num_prompts or 1
    for used in reversed(divisors(ranks)):
        yield from layouts(base, used, sequences, NO_OFFLOAD)


def by_speed(found: Sequence[tuple[Layout, Prediction]]) -> Ranked:
    """In the order of the prediction; those without one come last of what may fit, and equals stay as they were."""

    def place(item: tuple[Layout, Prediction]) -> tuple[bool, bool, float]:
        prediction = item[1]
        rate = prediction.throughput
        return prediction.fits is False, rate is None, -(rate or 0.0)

    return sorted(found, key=place)


def with_layout(cell: Cell, layout: Layout) -> Cell:
    """The cell in a layout that the engine may not be able to measure: a cell's own check is left out."""
    return cell.model_copy(update={"layout": layout})
