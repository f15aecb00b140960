"""Equality of training strategies: loss and gradient norm relative to the simplest one.

    for found in same_learning(study):              # cells that differ in layout, strategy, precision ... only
        equality_table(found), equality_sentence(found)

Cells that see the same global batches of the same data at the same rate compute the same sums in another order, so
their curves may differ by rounding and by nothing else. Rounding grows from step to step, as weights move apart;
the verdict is of the first JUDGED_STEPS, the table shows the whole curve too. Batch norms compute other sums for other
micro-batches: cells of models with any are compared where these are equal.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats
from configs.common.base import content_hash
from configs.records.rates import by_rank
from configs.spec.cell import Cell
from configs.workloads.train import TrainWorkload
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import Table, escaped, first_of, number, plural
from reports.training.cells import trained_cells

HOW = {
    "micro_batch_size",
    "activation_checkpointing",
    "sharding",
    "offload",
    "compiled",
    "checkpoint_every",
    "checkpoints_kept",
    "checkpoint_mode",
    "export",
    "evaluate_every",
}
"""Fields of a workload that say how it is computed; all others say what is learnt."""

JUDGED_STEPS = 10
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (1e-2, 1e-1), "float16": (1e-2, 1e-1)}
"""dtype -> largest relative difference of loss and of gradient norm over JUDGED_STEPS that rounding explains.

float32: sums in another order differ by 2e-7 in a loss, and the squares of a million gradients, added up in shards
instead of tensors, by 5e-5 (both as seen on a small model); AdamW's first steps, whose size hardly depends on the
gradient's, make some ten times as much of it. 16 bits: what is rounded to 8 (bfloat16) or 11 bits is hidden in a mean
over a batch of tokens, less so in a norm. A wrong weight of a rank or micro-batch is far beyond: a share of 1 / ranks.
"""


@dataclass(frozen=True)
class LossCurve:
    """Loss and gradient norm of a cell by step, of its first completed repeat."""

    result: CellResult
    losses: Floats
    norms: Floats

    @property
    def skipped(self) -> NDArray[np.bool_]:
        """Whether each step left the weights unchanged, as float16's do whose gradients overflow."""
        overflowed: NDArray[np.bool_] = np.isfinite(self.losses) & ~np.isfinite(self.norms)
        return overflowed if self.result.cell.dtype == "float16" else np.zeros_like(overflowed)


@dataclass(frozen=True)
class Follows:
    """One curve held against the reference: largest relative differences, in the first steps and in all.

    lags: one of the two skipped a step that the other made; later steps are of other weights, and not compared.
    """

    curve: LossCurve
    steps: int
    loss: float
    norm: float
    loss_first: float
    norm_first: float
    lags: bool = False

    @property
    def within(self) -> bool:
        """Whether rounding explains the first steps."""
        loss, norm = TOLERANCES[self.curve.result.cell.dtype]
        return self.loss_first <= loss and self.norm_first <= norm


@dataclass(frozen=True)
class SameLearning:
    """Cells that learn the same; the reference is the plainest: float32, fewest ranks, nothing sharded."""

    reference: LossCurve
    others: tuple[Follows, ...]


def what_is_learnt(cell: Cell) -> str:
    """Equal for cells that learn the same from the same batches, however they compute it."""
    assert isinstance(cell.workload, TrainWorkload)
    return content_hash({"model": cell.model, "work": cell.workload.model_dump(mode="json", exclude=HOW)})


def same_learning(study: StudyResult) -> list[SameLearning]:
    """Every set of two or more cells that learn the same, in the order of the plan."""
    groups: dict[tuple[str, int | None], list[LossCurve]] = {}
    for result in trained_cells(study):
        curve = _curve(study, result)
        if curve is not None:
            groups.setdefault((what_is_learnt(result.cell), _normalised_rows(result)), []).append(curve)
    found = []
    for curves in groups.values():
        reference = min(curves, key=lambda curve: _plainness(curve.result.cell))
        others = tuple(followed(curve, reference) for curve in curves if curve is not reference)
        if others:
            found.append(SameLearning(reference, others))
    return found


def _normalised_rows(result: CellResult) -> int | None:
    """Rows of a micro-batch, by which batch norms normalise; None for a model without any."""
    work, dp = result.cell.workload, result.cell.layout.dp
    assert isinstance(work, TrainWorkload)
    if result.completed[min(result.completed)].figure("batch_norms") is None:
        return None
    return work.global_batch_size // dp // work.accumulation(dp)


def followed(curve: LossCurve, reference: LossCurve) -> Follows:
    """Largest relative differences over the steps that both have, up to the first that only one of them skipped."""
    steps = min(len(curve.losses), len(reference.losses))
    skipped = curve.skipped[:steps]
    apart = np.flatnonzero(skipped != reference.skipped[:steps])
    end = int(apart[0]) if len(apart) else steps
    loss, norm = relative(curve.losses[: end + 1], reference.losses), relative(curve.norms[:end], reference.norms)
    norm[skipped[:end]] = 0.0  # infinite in both
    return Follows(
        curve, len(loss), _largest(loss), _largest(norm), _largest(loss[:JUDGED_STEPS]), _largest(norm[:JUDGED_STEPS]),
        lags=end < steps,
    )  # fmt: skip


def equality_table(found: SameLearning) -> Table:
    """One row for each cell but the reference."""
    columns = (
        "cell",
        "steps compared",
        f"loss, first {JUDGED_STEPS} steps",
        f"gradient norm, first {JUDGED_STEPS} steps",
        "loss, all steps",
        "gradient norm, all steps",
        "allowed (loss, norm)",
        "follows",
    )
    return first_rows(Table(columns, tuple(_row(item) for item in found.others)))


def _row(item: Follows) -> tuple[str, ...]:
    loss, norm = TOLERANCES[item.curve.result.cell.dtype]
    values = (item.loss_first, item.norm_first, item.loss, item.norm)
    return (
        escaped(item.curve.result.name),
        f"{item.steps:,}",
        *(number(value, 2) for value in values),
        f"{loss:g}, {norm:g}",
        "yes" if item.within else "no",
    )


def equality_sentence(found: SameLearning) -> str:
    """How many follow, and which do not."""
    stray = [item.curve.result.name for item in found.others if not item.within]
    same = len(found.others) - len(stray)
    verb = "matches" if same == 1 else "match"
    text = (
        f"The reference is {found.reference.result.name}. {same} of {plural(len(found.others), 'other cell')} "
        f"{verb} it within rounding over the first {JUDGED_STEPS} steps"
    )
    known = [item for item in found.others if np.isfinite(item.loss)]  # no maximum has a place for NaN
    if known:
        worst = max(known, key=lambda item: item.loss)
        text += f"; the largest relative difference of a loss, over all steps, is {number(worst.loss, 2)}"
        text += f" ({worst.curve.result.name})"
    curves = (found.reference, *(item.curve for item in found.others))
    broken = [curve.result.name for curve in curves if not np.isfinite(curve.losses).all()]
    if broken:
        text += f"; {first_of(broken, 4)} {'has' if len(broken) == 1 else 'have'} a loss that is not finite"
    text += "."
    late = [item.curve.result.name for item in found.others if item.lags]
    if late:
        text += f" Compared up to the first step that only one of the two skipped in float16: {first_of(late, 4)}."
    return text + (f" Not explained by rounding: {first_of(stray, 4)}." if stray else "")


def _curve(study: StudyResult, result: CellResult) -> LossCurve | None:
    """None where the record kept no losses, or no norms."""
    samples = study.samples(result.completed[min(result.completed)], ("loss", "gradient_norm"))
    if len({name.partition("/")[2] for name in samples}) < 2:
        return None
    losses, norms = (
        np.mean([np.asarray(array, dtype=np.float64) for array in by_rank(samples, name)], axis=0)
        for name in ("loss", "gradient_norm")
    )
    return LossCurve(result, losses, norms) if len(losses) and len(losses) == len(norms) else None


def _plainness(cell: Cell) -> tuple[bool, int, bool, int, bool]:
    work, strategy = cell.workload, cell.layout.strategy
    assert isinstance(work, TrainWorkload)
    special = work.compiled or work.activation_checkpointing != "none" or work.offload != "none"
    sharded = strategy not in ("none", "ddp")
    return cell.dtype != "float32", cell.layout.ranks, sharded, work.accumulation(cell.layout.dp), special


def relative(values: Floats, reference: Floats) -> Floats:
    """Relative difference at each step that both have; of a reference of 0 the difference itself."""
    steps = min(len(values), len(reference))
    scale = np.where(reference[:steps] == 0, 1.0, np.abs(reference[:steps]))
    with np.errstate(invalid="ignore"):  # infinite losses have no difference
        found: Floats = np.abs(values[:steps] - reference[:steps]) / scale
    return found


def _largest(apart: Floats) -> float:
    return float(apart.max()) if len(apart) else 0.0
