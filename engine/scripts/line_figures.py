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
_DECIMAL_COMMA = re.compile(r",(?!\d{3}(?!\d))\d|^[-+]?0[\d_]*,\d")
# No two parts beside each other take the same characters: a line of 64 KiB is tried in no square of ways.
_NUMBER = re.compile(r"([-+]?(?:\d[\d,_]*(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))\s*([kmgb]?)", re.I)


def number(text: str) -> float:
    """The number that a line shows: 8,123 or 8.1k or 3e-4 or nan. Raises ValueError, for a decimal comma (0,52) too."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None or _DECIMAL_COMMA.search(found[1]):
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
        self._of_read: list[tuple[int, float | None]] = []
        self._rate: float | None = None
        self._series = StepSeries()
        self.seen = 0
        self.broken = 0
        self.why_broken = ""
        """Of the last broken line."""
        self.steps = 0

    @property
    def series(self) -> StepSeries:
        """The steps of all lines so far."""
        self._share_time()
        return self._series

    @property
    def last_step(self) -> int:
        """The number of the last step as the script printed it; where it prints none, as it was counted."""
        shown = self._before[0] if self._before is not None else None
        return int(shown) if shown is not None and math.isfinite(shown) else self.steps

    def see(self, line: Line) -> None:
        """Take one line."""
        if self._rank is not None and line.rank != self._rank:
            return
        self.seen += 1
        found = self._expression.search(line.text)
        if found is None:
            return
        if not line.whole:
            self._break("not UTF-8 text, or too long")
            return
        values: dict[str, float] = {}
        for name, text in found.groupdict().items():
            try:
                values |= {} if text is None else {name: number(text) * self._units.get(name, 1.0)}
            except ValueError as error:
                self._break(f"{name}: {error}")
                return
        # Lines that end when the next ones begin may come after younger ones of another rank or stream.
        self._take(values, line.at if self._before is None else max(line.at, self._before[1]))

    def _break(self, why: str) -> None:
        self.broken += 1
        self.why_broken = why

    def fill_single(self, wall_seconds: float) -> None:
        """Give the wall time of the whole run to the only line of a command that prints one, and no time."""
        if len(self.series) == 1 and self.series.seconds[0] is None:
            self.series.seconds[0] = wall_seconds
            if self.series.units[0] is None and self._rate is not None:
                self.series.units[0] = self._rate * wall_seconds

    def _read_with(self, at: float, between: int) -> bool:
        """Note that a line's steps are timed by its arrival; False where no line was read before those of this time."""
        assert self._before is not None
        if self._read_at is None or at != self._read_at[1]:
            self._share_time()
            self._read_at, self._steps_of_read, self._of_read = (self._before[1], at), 0, []
        self._steps_of_read += between
        return at > self._read_at[0]

    def _share_time(self) -> None:
        """Give the steps of lines that were read at once an equal part of the time since the last read, and the units
        that they made in it at their rate.
        """
        if self._read_at is None or not self._of_read:
            return
        seconds = (self._read_at[1] - self._read_at[0]) / self._steps_of_read
        for place, rate in self._of_read:
            self._series.seconds[place] = seconds
            if rate is not None:
                self._series.units[place] = rate * seconds

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
        if any(told is not None and not (math.isfinite(told) and told >= 0) for told in (seconds, units, rate)):
            self._break("a time, a number of units or a rate that is negative or not finite")
            return
        arrived = seconds is None and self._before is not None and self._read_with(at, between)
        if seconds is None and not arrived and rate and units is not None:
            seconds = units / rate
        by_arrival = rate if arrived and units is None else None
        if units is None and rate is not None and seconds is not None:
            units = rate * seconds
        self._before = (step, at)
        self.steps += between  # a script that resumes begins at a high number
        first = len(self._series)
        for _ in range(min(between, 100_000)):
            self._series.add(seconds, units, loss)
        if arrived:
            self._of_read += [(place, by_arrival) for place in range(first, len(self._series))]
        for name, value in values.items():
            with suppress(OverflowError):
                self._series.mark(name, value)
