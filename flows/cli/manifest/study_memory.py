"""The memory that the Job of a study needs, as the planner predicts its cells.

need = study_memory(study, Path("."), cache)
need.bytes, need.unknown          # of all ranks of the largest cell; why that of others is not known
"""

from dataclasses import dataclass
from pathlib import Path

from configs.common.printable import printable
from configs.spec.cell import Cell
from configs.spec.study import StudySpec
from configs.workloads import descriptor_of
from engine.planner.catalog import find_model
from engine.planner.memory.stored import BYTES
from flows.cli.plan.planned_study import planned
from tasks.models.hub import TransientFetchError

_TRAINED = 4
"""Copies of the weights in training at least: weights, gradients and Adam's two moments."""


@dataclass(frozen=True)
class StudyMemory:
    """Bytes of all ranks of the largest cell (0: no cell has a model), and why those of some cells are not known."""

    bytes: int
    unknown: str | None = None


def study_memory(study: StudySpec, base: Path, cache: Path) -> StudyMemory:
    """Return what the cells of a study take on one node, whose ranks share its memory. Raises nothing of its own.

    Cells that are not predicted, such as those of another engine, are counted with the weights of their replicas.
    """
    try:
        plan = planned(study, base, cache).plan
    except (OSError, ValueError, TransientFetchError) as error:
        return StudyMemory(0, printable(str(error).partition("\n")[0], 300))
    most, unknown = 0, None
    for key, cell in plan.cells.items():
        peak = plan.predictions[key].peak_memory_bytes
        if peak is not None:
            most = max(most, peak * cell.layout.ranks)
        elif cell.model is not None:
            try:
                most = max(most, _weights_bytes(cell, cell.model, cache))
            except ValueError:
                unknown = unknown or f"{cell.model}: its size is not known to the planner"
    return StudyMemory(most, unknown)


def _weights_bytes(cell: Cell, model: str, cache: Path) -> int:
    """Raises ValueError for a model that the planner does not know."""
    copies = _TRAINED if descriptor_of(cell.workload).trains else 1
    parameters = find_model(model.rpartition("@")[0] or model, cache).parameters
    return round(parameters * BYTES[cell.dtype]) * copies * cell.layout.dp
