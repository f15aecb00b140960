"""Steps of a rank, from wherever they were read: seconds, units and loss of each, and figures besides.

series = StepSeries(seconds=[...], units=[...], losses=[...])
series.cut(warmup_steps=1, steps=100)          # what a record keeps
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from configs.records.record import Figure
from configs.workloads.script import ScriptWorkload

_MAX_FIGURES = 24
_MAX_STEPS = 4_000_000


class NoFiguresError(ValueError):
    """The script ended, and nothing of what was to be measured was found."""


@dataclass
class StepSeries:
    """One entry a step. None: the source does not say."""

    seconds: list[float | None] = field(default_factory=list)
    units: list[float | None] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    marks: dict[str, list[float]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    device_clock: bool = False

    def __len__(self) -> int:
        return len(self.seconds)

    def add(self, seconds: float | None, units: float | None = None, loss: float | None = None) -> None:
        """Add a step; beyond millions nothing more is kept."""
        if len(self.seconds) < _MAX_STEPS:
            self.seconds.append(seconds)
            self.units.append(units)
            self.losses.append(loss)

    def mark(self, name: str, value: float) -> None:
        """Keep a figure of one's own; its median becomes a figure of the record."""
        if name in self.marks or len(self.marks) < _MAX_FIGURES:
            self.marks.setdefault(name, []).append(value)

    def cut(self, warmup_steps: int, steps: int | None) -> "StepSeries":
        """Without warm-up, and without what came after the number of steps that was asked for."""
        kept = slice(min(warmup_steps, max(0, len(self) - 1)), steps)
        return StepSeries(
            self.seconds[kept], self.units[kept], self.losses[kept], self.marks, self.figures, self.device_clock
        )

    def bad_loss(self) -> tuple[int, float] | None:
        """(step from 1, value) of the first loss that is no number."""
        for place, loss in enumerate(self.losses, start=1):
            if loss is not None and not math.isfinite(loss):
                return place, loss
        return None

    def own_figures(self) -> dict[str, Figure]:
        """Figures of the source, and the median of each mark."""
        found: dict[str, Figure] = dict(self.figures)
        for name, values in self.marks.items():
            finite = [value for value in values if math.isfinite(value)]
            found[name] = median(finite) if finite else None
        return found

    def columns(self, units_per_step: int | None) -> dict[str, list[float]]:
        """Columns of samples. Raises NoFiguresError where a step has no time."""
        known = [(seconds, place) for place, seconds in enumerate(self.seconds) if seconds is not None]
        if not known:
            raise NoFiguresError("no step has a time")
        places = [place for _, place in known]
        columns = {"step_seconds": [seconds for seconds, _ in known]}
        units = [self.units[place] for place in places]
        if units_per_step is None and all(value is not None for value in units):
            columns["step_units"] = [value for value in units if value is not None]
        losses = [self.losses[place] for place in places]
        if any(loss is not None for loss in losses):
            columns["loss"] = _filled(losses)
        return columns


def missing_figures(work: ScriptWorkload, lines_seen: int, broken: int = 0, why_broken: str = "") -> str:
    """Why no step was found, and what to do. broken: lines that matched, without the figures that were expected."""
    if work.measure == "probe":
        return "no step was seen. Call rankwise_probe.step() in the script, or set workload.measure to what it prints"
    if work.measure == "lines" and broken:
        return (
            f"workload.lines.pattern matched {broken:,} of {lines_seen:,} lines, none with figures that can be read "
            f"({why_broken}). Let each group match a number alone"
        )
    if work.measure == "lines":
        return (
            f"workload.lines.pattern matched none of {lines_seen:,} lines. Compare it with the rank's log "
            f"(lines.rank is {work.pattern.rank if work.pattern else 'first'})"
        )
    if work.measure == "tensorboard":
        return (
            f"workload.tensorboard: no scalar {work.tensorboard.tag!r} of two steps below {work.tensorboard.folder!r}"
        )
    if work.measure == "json":
        return "workload.json_figures: no JSON document was found"
    return f"workload.measure: {work.measure} saw no step. Does the script import and use the library's Trainer?"


def untimed(steps: int, kept: int, by_lines: bool) -> str:
    """Why no step has a time, and what to do. kept: steps after the warm-up."""
    if by_lines and kept > 1:
        return (
            f"{steps:,} steps, none of them with a time: their lines came at once, as a program writes them that keeps "
            "its output until it ends. Let it flush each line (stdbuf -oL for one in C), or let it print a time that "
            "workload.lines.pattern reads"
        )
    return f"{steps:,} steps, none of them with a time; the first is the warm-up. Measure more steps"


def _filled(losses: Sequence[float | None]) -> list[float]:
    """Losses that are logged every few steps hold until the next."""
    first = next(loss for loss in losses if loss is not None)
    found, last = [], first
    for loss in losses:
        last = last if loss is None else loss
        found.append(last)
    return found
