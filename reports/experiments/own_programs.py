"""Programs of the user's: what each was measured by, and whether loss curves agree within the noise of repeats.

    steps_table(study), same_losses(study)

Cells are compared that differ only in how they compute (layout, precision, launcher, micro-batches) and do equal work
in a step. The noise of a cell is the spread of its repeats, which differ by whatever the script draws from {repeat}.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs.common.arrays import Floats
from configs.common.base import content_hash
from configs.records.rates import by_rank
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import UNKNOWN, Table, count, escaped, first_of, number, plural

HOW = {"micro_batch_size", "accumulation_steps", "activation_checkpointing", "launcher", "python", "arguments"}
"""Fields of a workload that say how it is computed; all others say what is learnt."""
FLOOR = 1e-3
"""Relative difference of losses that is never held against a cell: reductions in another order, over some steps."""


@dataclass(frozen=True)
class LossCurves:
    """Losses of a cell: one row for each completed repeat, cut to the shortest."""

    result: CellResult
    losses: Floats

    @property
    def middle(self) -> Floats:
        """Median over repeats, by step."""
        found: Floats = np.median(self.losses, axis=0)
        return found

    def noise(self, steps: int) -> float | None:
        """Largest relative distance of a repeat from the median; None of one repeat."""
        if len(self.losses) < 2:
            return None
        middle = self.middle[:steps]
        return float(np.max(np.abs(self.losses[:, :steps] - middle) / _scale(middle)))


@dataclass(frozen=True)
class Agreement:
    """One cell held against the reference. noise: of both, None where neither has two repeats."""

    curves: LossCurves
    steps: int
    difference: float
    noise: float | None

    @property
    def within(self) -> bool | None:
        """Whether the noise of repeats explains the difference; None where there is no noise to compare with."""
        return None if self.noise is None else self.difference <= max(FLOOR, self.noise)


@dataclass(frozen=True)
class SameLosses:
    """Cells that should have the same losses; the reference has the fewest ranks."""

    reference: LossCurves
    others: tuple[Agreement, ...]


def program_cells(study: StudyResult) -> list[CellResult]:
    """Cells of programs of the user's that have a completed repeat."""
    return [result for result in study.cells.values() if result.kind.own_program and result.completed]


def steps_table(study: StudyResult) -> Table | None:
    """What each cell was measured by: launcher, source of figures, steps kept, units of a step, and oddities."""
    rows = []
    for result in program_cells(study):
        work = result.cell.workload.model_dump()
        first = result.completed[min(result.completed)]
        rows.append(
            (
                escaped(result.name),
                str(work["launcher"]),
                str(work["measure"]),
                count(first.figure("steps")),
                count(first.figure("units_per_step")),
                "yes" if any(first.by_rank("stopped_early")) else "no",  # the node that saw the last step ended it
                count(first.figure("broken_lines")),
                "yes" if first.record.figures.get("device_clock") else "no",
            )
        )
    columns = (
        "cell",
        "launcher",
        "measured by",
        "steps kept",
        "units a step",
        "ended by stop_after",
        "broken lines",
        "device's clock",
    )
    return first_rows(Table(columns, tuple(rows), text_columns=3).without_empty_columns()) if rows else None


def same_losses(study: StudyResult) -> list[SameLosses]:
    """Every set of two or more cells whose losses should agree, in the order of the plan."""
    groups: dict[str, list[LossCurves]] = {}
    for result in program_cells(study):
        stated = result.cell.workload.work_of_step(result.cell.layout)
        curves = _curves(study, result)
        if curves is not None and stated is not None and stated[1] is not None:
            groups.setdefault(_what_is_learnt(result, stated[1]), []).append(curves)
    found = []
    for group in groups.values():
        reference = min(group, key=lambda curves: curves.result.cell.layout.ranks)
        others = tuple(_agreement(curves, reference) for curves in group if curves is not reference)
        if others:
            found.append(SameLosses(reference, others))
    return found


def agreement_table(found: SameLosses) -> Table:
    """One row for each cell but the reference."""
    columns = ("cell", "repeats", "steps compared", "largest difference", "noise of repeats", "agrees")
    rows = [
        (
            escaped(item.curves.result.name),
            f"{len(item.curves.losses):,}",
            f"{item.steps:,}",
            number(item.difference, 2),
            UNKNOWN if item.noise is None else number(item.noise, 2),
            UNKNOWN if item.within is None else "yes" if item.within else "no",
        )
        for item in found.others
    ]
    return first_rows(Table(columns, tuple(rows)))


def agreement_sentence(found: SameLosses) -> str:
    """How many agree, and what the others are judged by."""
    judged = [item for item in found.others if item.within is not None]
    if not judged:
        return f"The reference is {found.reference.result.name}. No verdict: noise shows from two repeats on."
    stray = [item.curves.result.name for item in judged if not item.within]
    agree = len(judged) - len(stray)
    verb = "agrees" if agree == 1 else "agree"
    text = (
        f"The reference is {found.reference.result.name}. {agree} of {plural(len(judged), 'other cell')} {verb} with "
        f"it (relative difference of losses within the spread of repeats, or {FLOOR:g})."
    )
    return text + (f" Beyond that: {first_of(stray, 4)}." if stray else "")


def _what_is_learnt(result: CellResult, units: int) -> str:
    fields = result.cell.workload.model_dump(mode="json", exclude=HOW)
    return content_hash({"work": fields, "units": units, "target": result.cell.target})


def _curves(study: StudyResult, result: CellResult) -> LossCurves | None:
    rows = []
    for repeat in sorted(result.completed):
        samples = study.samples(result.completed[repeat], ("loss",))
        if not samples:
            return None
        ranks = by_rank(samples, "loss")
        shortest = min(map(len, ranks))
        rows.append(np.mean([np.asarray(rank[:shortest], dtype=np.float64) for rank in ranks], axis=0))
    steps = min((len(row) for row in rows), default=0)
    return LossCurves(result, np.stack([row[:steps] for row in rows])) if steps else None


def _agreement(curves: LossCurves, reference: LossCurves) -> Agreement:
    steps = min(curves.losses.shape[1], reference.losses.shape[1])
    ours, theirs = curves.middle[:steps], reference.middle[:steps]
    difference = float(np.max(np.abs(ours - theirs) / _scale(theirs)))
    known: Sequence[float] = [value for value in (curves.noise(steps), reference.noise(steps)) if value is not None]
    return Agreement(curves, steps, difference, sum(known) if known else None)


def _scale(values: Floats) -> Floats:
    found: Floats = np.where(values == 0, 1.0, np.abs(values))
    return found
