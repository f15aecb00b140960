"""The data of a figure, without colours and pixels.

    Chart("Throughput", "ranks", "tokens/s", (ChartSeries("measured", (ChartPoint(1, 412.0, 405.1, 418.3),)),))

A chart of form `xy` has numbers on both axes. `dots` and `stack` have a row for each of `rows`, whose position is
the x of a point; a stack's series are parts that sum up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reports.numbers.statistics import Estimate, Ratio
from reports.text import number

ChartForm = Literal["xy", "dots", "stack"]
MAX_POINTS = 1000
"""Of a series: more could not be told apart."""
MAX_ROWS = 40


@dataclass(frozen=True)
class ChartPoint:
    """A value `y` at `x`, its bounds and raw repeats. `interval`: the bounds are a 95 % interval, not a range."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    interval: bool = False
    repeats: tuple[float, ...] = ()
    label: str = ""

    def text(self, unit: str) -> str:
        """`412 tokens/s (405 to 418, 95 % interval); repeats 405, 412, 418`."""
        told = f"{number(self.y)} {unit}".rstrip()
        if self.low is not None and self.high is not None and (self.low, self.high) != (self.y, self.y):
            kind = "95 % interval" if self.interval else "range"
            told += f" ({number(self.low)} to {number(self.high)}, {kind})"
        if len(self.repeats) > 1:
            told += f"; {len(self.repeats)} repeats: {', '.join(number(value) for value in self.repeats[:20])}"
            told += ", …" if len(self.repeats) > 20 else ""
        return f"{self.label}: {told}" if self.label else told


@dataclass(frozen=True)
class ChartSeries:
    """Points of one name. `line`: joined; `band`: (x, low, high) around a line; `dashed`: not a measurement."""

    name: str
    points: tuple[ChartPoint, ...]
    line: bool = True
    marks: bool = True
    dashed: bool = False
    band: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """One panel of a figure. `lost`: (x or row, why) of what has no figure; `unit` is that of the values."""

    title: str
    x_label: str
    y_label: str
    series: tuple[ChartSeries, ...]
    form: ChartForm = "xy"
    unit: str = ""
    rows: tuple[str, ...] = ()
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True
    lost: tuple[tuple[float, str], ...] = ()
    reference: float | None = None

    @property
    def left_out(self) -> int:
        """Points that are not drawn."""
        return sum(max(0, len(series.points) - MAX_POINTS) for series in self.series)


def measured_point(
    x: float,
    value: Estimate | Ratio,
    repeats: Mapping[int, float] | Sequence[float] = (),
    scale: float = 1.0,
    label: str = "",
) -> ChartPoint:
    """A point of a median or ratio with its bounds and repeats."""
    middle = value.median if isinstance(value, Estimate) else value.value
    low, high = value.bounds
    raw = repeats.values() if isinstance(repeats, Mapping) else repeats
    known = value.interval is not None
    return ChartPoint(x, middle * scale, low * scale, high * scale, known, tuple(each * scale for each in raw), label)


def grows(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis serves these values better: all above 0 and a factor of 4 or more apart."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 4
