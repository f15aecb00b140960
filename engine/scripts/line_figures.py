"""Steps from the lines that a script prints.

reader = LineReader(pattern, ranks=8)
for line in outputs.read(0.05): reader.see(line)
reader.series, reader.broken, reader.seen
"""

import math
import re
from contextlib import suppress

from configs.workloads.script_figures import LOSS, RANK_RATE, RATE, SECONDS, STEP, UNIT_SECONDS, UNITS, LinePattern
from engine.scripts.outputs import Line
from engine.scripts.series import StepSeries

_SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
_NUMBER = re.compile(
    r"\s*([-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))\s*([kmgb]?)\s*", re.I
)


def number(text: str) -> float:
    """The number that a line shows: 8,123 or 8.1k or 3e-4 or nan. Raises ValueError."""
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"not a number: {text[:40]!r}")
    return float(found[1].replace(",", "").replace("_", "")) * _SUFFIXES.get(found[2].lower(), 1.0)


class LineReader:
    """Matches lines of one rank; a line that matches and whose figures are no numbers is broken, and counted."""

    def __init__(self, pattern: LinePattern, ranks: int) -> None:
        self._expression = re.compile(pattern.pattern)
        self._units = {name: UNIT_SECONDS[unit] for name, unit in pattern.units.items()}
        self._rank = {"first": 0, "last": ranks - 1, "any": None}[pattern.rank]
        self._ranks = ranks
        self._before: tuple[float | None, float] | None = None
        self._read_at: tuple[float, float] | None = None
        self._steps_of_read = 0
        self._rate: float | None = None
        self.series = StepSeries()
        self.seen = 0
        self.broken = 0
        self.steps = 0

    def see(self, line: Line) -> None:
        """Take one line."""
        if self._rank is not None and line.rank != self._rank:
            return
        self.seen += 1
        found = self._expression.search(line.text)
        if found is None:
            return
        if not line.whole:
            self.broken += 1
            return
        try:
            values = {
                name: number(text) * self._units.get(name, 1.0)
                for name, text in found.groupdict().items()
                if text is not None
            }
        except ValueError:
            self.broken += 1
            return
        self._take(values, line.at)

    def fill_single(self, wall_seconds: float) -> None:
        """Give the wall time of the whole run to the only line of a command that prints one, and no time."""
        if len(self.series) == 1 and self.series.seconds[0] is None:
            self.series.seconds[0] = wall_seconds
            if self.series.units[0] is None and self._rate is not None:
                self.series.units[0] = self._rate * wall_seconds

    def _since_last_read(self, at: float, between: int) -> float:
        """Seconds of each step by the arrival of lines; those that were read at once share the time since the last."""
        assert self._before is not None
        if self._read_at is None or at != self._read_at[1]:
            self._read_at, self._steps_of_read = (self._before[1], at), 0
        self._steps_of_read += between
        seconds = (at - self._read_at[0]) / self._steps_of_read
        earlier = self._steps_of_read - between
        if earlier:
            self.series.seconds[-earlier:] = [seconds] * min(earlier, len(self.series))
        return seconds

    def _take(self, values: dict[str, float], at: float) -> None:
        step = values.pop(STEP, None)
        seconds, units, loss = values.pop(SECONDS, None), values.pop(UNITS, None), values.pop(LOSS, None)
        rate = values.pop(RATE, None)
        if RANK_RATE in values:
            rate = values.pop(RANK_RATE) * self._ranks
        self._rate = rate
        between = 1
        if self._before is not None and step is not None and self._before[0] is not None:
            between = int(step - self._before[0]) if math.isfinite(step) else 0
            if between < 1:  # the same step again, or a restart: no time lies between
                self._before = (step, at)
                return
        arrived = seconds is None and self._before is not None
        if arrived:
            seconds = self._since_last_read(at, between)
        if seconds is None and rate and units is not None:
            seconds = units / rate
        if units is None and rate is not None and seconds is not None:
            units = rate * seconds
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            self.broken += 1
            return
        self._before = (step, at)
        self.steps = max(self.steps + between, int(step) if step is not None and math.isfinite(step) else 0)
        for _ in range(min(between, 100_000)):
            self.series.add(seconds, units, loss)
        for name, value in values.items():
            with suppress(OverflowError):
                self.series.mark(name, value)
