"""Charts as inline SVG, drawn without script; the page's script moves the marks where a scale is changed.

Everything is placed by attributes, because a content security policy refuses inline styles. Elements of class `v` carry
their values (`data-v`), so that the script can place them on the other scale; both sets of ticks are drawn.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from configs.common.printable import terminal_columns
from reports.charts.chart import MAX_POINTS, Chart, ChartPoint, ChartSeries
from reports.plots.style import statuses_by_place, tick_text
from reports.text import number

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 82, 14, 12, 44
ROW, ROW_TOP = 40, 8
COLOURS = 7
"""Classes c0 to c6 of the style sheet."""
MAX_RAW = 400
"""Raw repeats in one chart: more are told, not drawn."""
_LABEL = 70
_ROW_COLUMNS = 54
_DIGIT = 8
"""Width of one on a narrow screen, whose letters are the largest of the picture."""
_EXPONENT_FROM = 1e6


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; what a logarithm has no place for stands at the edge."""
        if self.log:
            share = (math.log(max(value, self.low)) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, about five of them."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps: tuple[float, ...] = (1,) if last - first > 3 else (1, 3) if last - first > 1 else (1, 2, 5)
            stride = max(1, (last - first) // 6)
            powers = range(first, last + 1, stride)
            found = [s * 10.0**p for p in powers for s in steps if self.low <= s * 10.0**p <= self.high]
            if len(found) > 1:
                return found  # else within a decade, where round values of the linear scale are closer
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [place * step for place in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _domain(values: Sequence[float], log: bool, zero: bool) -> tuple[float, float]:
    """Ends of an axis with room round the values."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not known:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(known), max(known)
    if log:
        return (low / 1.15, high * 1.15) if low < high else (low / 2, high * 2)
    if zero and low >= 0:
        return 0.0, high * 1.06 or 1.0
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _values(chart: Chart) -> list[float]:
    found = [] if chart.reference is None else [chart.reference]
    for series in chart.series:
        for point in series.points[:MAX_POINTS]:
            found += [point.y, *(bound for bound in (point.low, point.high) if bound is not None), *point.repeats]
        found += [bound for _, low, high in series.band for bound in (low, high)]
    return found


def svg(chart: Chart) -> str:
    """The chart as an `svg` element. Decoration for a screen reader: the table below says the same."""
    return _stack(chart) if chart.form == "stack" else _dots(chart) if chart.form == "dots" else _xy(chart)


def _f(value: float) -> str:
    text = f"{value:.1f}"
    return text.removesuffix(".0")


def _v(values: Iterable[float]) -> str:
    return ",".join(f"{value:.7g}" for value in values)


def _head(height: float, lin: Scale, log: Scale | None, axis: str, shown_log: bool) -> str:
    data = f'data-axis="{axis}" data-lin="{lin.low:.9g},{lin.high:.9g}" data-px="{_f(lin.start)},{_f(lin.end)}"'
    if log is not None:
        data += f' data-log="{log.low:.9g},{log.high:.9g}"'
    mode = "log" if shown_log else "lin"
    return f'<svg viewBox="0 0 {WIDTH} {_f(height)}" class="{mode}" aria-hidden="true" focusable="false" {data}>'


def _value_ticks(scales: Sequence[tuple[str, Scale]], axis: str, low: float, high: float) -> str:
    parts = []
    for name, scale in scales:
        parts.append(f'<g class="ticks {name}">')
        for tick in scale.ticks():
            at, text = _f(scale.at(tick)), escape(_tick(tick))
            if axis == "y":
                parts.append(
                    f'<path d="M{_f(low)} {at}H{_f(high)}"/><text x="{_f(low - 6)}" y="{at}" dy="4">{text}</text>'
                )
            else:
                parts.append(f'<path d="M{at} {_f(low)}V{_f(high)}"/>')
                if _is_inside(scale.at(tick), text):
                    parts.append(f'<text x="{at}" y="{_f(high + 16)}" class="mid">{text}</text>')
        parts.append("</g>")
    return "".join(parts)


def _large(value: float) -> str:
    """`2.5e9`: all its digits would run out of the picture."""
    mantissa, _, exponent = f"{value:.6e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _scales(chart: Chart, start: float, end: float) -> tuple[Scale, Scale | None]:
    """The linear scale of values, and the logarithmic one where all are above 0."""
    values = _values(chart)
    lin = Scale(*_domain(values, False, chart.from_zero), start, end)
    able = bool(values) and min(values) > 0
    return lin, Scale(*_domain(values, True, False), start, end, True) if able else None


def _xy(chart: Chart) -> str:
    lin, log = _scales(chart, HEIGHT - BOTTOM, TOP)
    shown_log = chart.log_y and log is not None
    y = log if shown_log and log is not None else lin
    xs = [point.x for series in chart.series for point in series.points] + [x for x, _ in chart.lost]
    log_x = chart.log_x and bool(xs) and min(xs) > 0
    domain = _domain(
        xs, log_x, chart.from_zero and not chart.log_x and bool(xs) and min(xs) > 0 and max(xs) > 3 * min(xs)
    )
    x = Scale(*domain, LEFT, WIDTH - RIGHT, log_x)
    parts = [_head(HEIGHT, lin, log, "y", shown_log)]
    scales = [("lin", lin)] + ([("log", log)] if log is not None else [])
    parts.append(_value_ticks(scales, "y", LEFT, WIDTH - RIGHT))
    parts.append(_x_ticks(x, sorted(set(xs))))
    parts.append(_titles(chart.x_label, chart.y_label))
    raw = sum(len(point.repeats) for series in chart.series for point in series.points) <= MAX_RAW
    for index, series in enumerate(chart.series):
        parts.append(_series(series, index, x, y, chart.unit, raw))
    for place, why in statuses_by_place(chart.lost)[:MAX_POINTS]:
        parts.append(_cross(x.at(place), HEIGHT - BOTTOM, f"{_place(place)}: {why}"))
    return "".join(parts) + "</svg>"


def _x_ticks(x: Scale, xs: Sequence[float]) -> str:
    """At the values themselves where they are few and whole, else at round ones."""
    few = len(xs) <= 7 and all(value == int(value) for value in xs)
    places = list(xs) if few else x.ticks()
    drawn, last = [], -1e9
    for place in places:
        at, text = x.at(place), _tick(place)
        if at - last < max(34, _DIGIT * len(text)) or not LEFT - 1 <= at <= WIDTH - RIGHT + 1:
            continue
        if not _is_inside(at, text):
            continue
        last = at
        drawn.append(f'<text x="{_f(at)}" y="{HEIGHT - BOTTOM + 16}" class="mid">{escape(text)}</text>')
    return f'<g class="ticks"><path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>{"".join(drawn)}</g>'


def _is_inside(at: float, text: str) -> bool:
    """Whether a text whose middle is at a pixel of the picture's width is whole."""
    half = 3.5 * len(text)
    return half <= at <= WIDTH - half


def _tick(value: float) -> str:
    """A value beside an axis. Not rounded: 16,384 tokens are not 16,400, and close ticks must differ."""
    if value == 0:
        return "0"
    return f"{value:,.10g}" if 1e-3 <= abs(value) < _EXPONENT_FROM else _large(value)


def _place(value: float) -> str:
    """A value of the x axis in a sentence, every digit of a whole number: 1,024 ranks are not 1,020."""
    return f"{value:,.0f}" if abs(value) < 1e15 and value == int(value) else number(value, 4)


def _titles(x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    told = f'<text class="label mid" x="{_f(middle)}" y="{HEIGHT - 8}">{escape(_short(x_label))}</text>'
    up = (TOP + HEIGHT - BOTTOM) / 2
    return (
        told
        + f'<text class="label mid" transform="translate(13 {_f(up)}) rotate(-90)">{escape(_short(y_label, 46))}</text>'
    )


def _row_name(text: str) -> str:
    """A name above its row, at most as wide as the picture on a narrow screen."""
    most = _ROW_COLUMNS
    while terminal_columns(shown := tick_text(text, most)) > _ROW_COLUMNS:
        most -= 1
    return shown


def _short(text: str, most: int = _LABEL) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _series(series: ChartSeries, index: int, x: Scale, y: Scale, unit: str, raw: bool) -> str:
    points = series.points[:MAX_POINTS]
    dashed = " dashed" if series.dashed else ""
    parts = [f'<g class="s c{index % COLOURS}{dashed}" data-s="{index}">']
    if series.band:
        around = [(at, low) for at, low, _ in series.band] + [(at, high) for at, _, high in reversed(series.band)]
        parts.append(_path(around, x, y, "band", closed=True))
    if series.line and len(points) > 1:
        parts.append(_path([(point.x, point.y) for point in points], x, y, "line"))
    for point in points if series.marks else ():
        parts.append(_mark(point, index, x.at(point.x), y, unit, "y", raw, f"{series.name}, {_place(point.x)}"))
    if not series.marks and not series.dashed:
        every = max(1, len(points) // 24)
        for point in points[::every]:
            parts.append(_mark(point, index, x.at(point.x), y, unit, "y", False, _place(point.x), small=True))
    return "".join(parts) + "</g>"


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale, name: str, closed: bool = False) -> str:
    places = [(x.at(at), y.at(value)) for at, value in points]
    drawn = "M" + "L".join(f"{_f(at)} {_f(value)}" for at, value in places) + ("Z" if closed else "")
    xs = ",".join(_f(at) for at, _ in places)
    return f'<path class="v {name}" d="{drawn}" data-x="{xs}" data-v="{_v(value for _, value in points)}"/>'


def _mark(
    point: ChartPoint,
    index: int,
    place: float,
    scale: Scale,
    unit: str,
    axis: str,
    raw: bool,
    where: str,
    small: bool = False,
) -> str:
    """A mark with its bar and raw repeats; `place` is its pixel on the other axis."""
    parts = []
    if raw and len(point.repeats) > 1:
        parts += [_circle("raw", place, value, scale, axis, 2) for value in point.repeats]
    if point.low is not None and point.high is not None and point.low < point.high:
        low, high, at = _f(scale.at(point.low)), _f(scale.at(point.high)), _f(place)
        ends = (
            f'x1="{at}" x2="{at}" y1="{low}" y2="{high}"'
            if axis == "y"
            else f'y1="{at}" y2="{at}" x1="{low}" x2="{high}"'
        )
        kind = "" if point.interval else " range"
        parts.append(f'<line class="v bar{kind}" {ends} data-v="{_v((point.low, point.high))}"/>')
    told = escape(point.text(unit) if point.label else f"{where}: {point.text(unit)}", quote=True)
    circle = _circle("m small" if small else "m", place, point.y, scale, axis, 3 if small else 5)
    return "".join(parts) + circle.replace("/>", f' data-t="{told}"/>')


def _circle(name: str, place: float, value: float, scale: Scale, axis: str, radius: int) -> str:
    at, other = _f(scale.at(value)), _f(place)
    where = f'cx="{other}" cy="{at}"' if axis == "y" else f'cx="{at}" cy="{other}"'
    return f'<circle class="v {name}" {where} r="{radius}" data-v="{value:.7g}"/>'


def _cross(x: float, y: float, told: str) -> str:
    a, b, c, d = _f(x - 5), _f(x + 5), _f(y - 5), _f(y + 5)
    text = escape(told, quote=True)
    return f'<path class="m lost" d="M{a} {c}L{b} {d}M{a} {d}L{b} {c}" data-t="{text}"/>'


def _rows_head(chart: Chart, lin: Scale, log: Scale | None, shown_log: bool) -> tuple[list[str], float]:
    bottom = ROW_TOP + ROW * len(chart.rows)
    parts = [_head(bottom + 40, lin, log, "x", shown_log)]
    scales = [("lin", lin)] + ([("log", log)] if log is not None else [])
    parts.append(_value_ticks(scales, "x", ROW_TOP, bottom))
    middle = WIDTH / 2
    parts.append(f'<text class="label mid" x="{_f(middle)}" y="{bottom + 34}">{escape(_short(chart.y_label))}</text>')
    for row, name in enumerate(chart.rows):
        y = ROW_TOP + ROW * row + 13
        parts.append(f'<text class="row" x="10" y="{y}">{escape(_row_name(name))}</text>')
    for row_at, why in statuses_by_place(chart.lost):
        place = ROW_TOP + ROW * row_at + 26
        parts.append(_cross(18, place, f"{chart.rows[int(row_at)]}: {why}"))
        parts.append(f'<text class="row why" x="30" y="{_f(place + 4)}">{escape(_short(why))}</text>')
    return parts, bottom


def _dots(chart: Chart) -> str:
    lin, log = _scales(chart, 14, WIDTH - 26)
    shown_log = chart.log_y and log is not None
    x = log if shown_log and log is not None else lin
    parts, bottom = _rows_head(chart, lin, log, shown_log)
    if chart.reference is not None:
        at = _f(x.at(chart.reference))
        value = _v((chart.reference, chart.reference))
        parts.append(
            f'<line class="v reference" x1="{at}" x2="{at}" y1="{ROW_TOP}" y2="{_f(bottom)}" data-v="{value}"/>'
        )
    raw = sum(len(point.repeats) for series in chart.series for point in series.points) <= MAX_RAW
    count = len(chart.series)
    for index, series in enumerate(chart.series):
        parts.append(f'<g class="s c{index % COLOURS}{" dashed" if series.dashed else ""}" data-s="{index}">')
        shift = 26 + (0 if count == 1 else 10 * (index / (count - 1) - 0.5))
        for point in series.points[:MAX_POINTS]:
            place = ROW_TOP + ROW * point.x + shift
            parts.append(_mark(point, index, place, x, chart.unit, "x", raw, chart.rows[int(point.x)]))
        parts.append("</g>")
    return "".join(parts) + "</svg>"


def _stack(chart: Chart) -> str:
    totals = [0.0] * len(chart.rows)
    for series in chart.series:
        for point in series.points:
            totals[int(point.x)] += max(0.0, point.y)
    lin = Scale(0.0, max(totals, default=0.0) * 1.03 or 1.0, 14, WIDTH - 26)
    parts, _ = _rows_head(chart, lin, None, False)
    floor = [0.0] * len(chart.rows)
    for index, series in enumerate(chart.series):
        parts.append(f'<g class="s c{index % COLOURS} p{index // COLOURS}" data-s="{index}">')
        for point in series.points:
            row = int(point.x)
            low, high = lin.at(floor[row]), lin.at(floor[row] + max(0.0, point.y))
            floor[row] += max(0.0, point.y)
            share = f", {number(100 * point.y / totals[row], 2)} %" if totals[row] > 0 else ""
            told = escape(point.text(chart.unit) + share, quote=True)
            parts.append(
                f'<rect class="m part" x="{_f(low)}" y="{_f(ROW_TOP + ROW * row + 18)}" '
                f'width="{_f(max(0.5, high - low))}" height="17" data-t="{told}"/>'
            )
        parts.append("</g>")
    return "".join(parts) + "</svg>"


def log_able(chart: Chart) -> bool:
    """Whether the scale of values can be changed."""
    return chart.form != "stack" and _scales(chart, 0, 1)[1] is not None
