"""Common style of all figures: size, colours, fonts, markers, losses and scales.

    images = drawn(lambda figure: draw_scaling(figure, result))      # {"png": ..., "svg": ...}

Each figure becomes a PNG and an SVG, the same bytes each time. Matplotlib is imported when the first
figure is drawn, without pyplot and its global state. Colours are those of Okabe and Ito
(https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart; markers and line styles differ
too, so that print in grey can be read.
"""

import io
import math
import re
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from configs.common.printable import value_text
from reports.numbers.statistics import Estimate
from reports.text import first_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Series = TypeVar("_Series")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
FAILED_COLOUR = "#B00020"
IDEAL = "#777777"
CROSS: Any = {"linestyle": "none", "marker": "x", "color": FAILED_COLOUR, "markersize": 8, "markeredgewidth": 2}
"""How a point without a figure is drawn."""
MOST_TICKS = 12
_MOST_POWERS = 8
_EXPONENT_FORM = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
MOST_BARS = 24
"""More cells than these are in the table only: bars thinner than their labels help nobody."""


MOST_SERIES = 24
"""Lines of a figure with their names in its legend: with thousands it takes minutes, and is hundreds of inches tall."""


def first_series(series: Mapping[str, _Series]) -> dict[str, _Series]:
    """The first MOST_SERIES, by name."""
    return dict(islice(series.items(), MOST_SERIES))


def series_lines(count: int, what: str) -> tuple[str, ...]:
    """`The figure shows the first 24 of 4,096 series.`, where it does not show all of `count`."""
    return (f"The figure shows the first {MOST_SERIES} of {count:,} {what}.",) if count > MOST_SERIES else ()


def bars_text(rows: Sequence[object], what: str) -> str:
    """` The figure shows the first 24 of 30 cells.`: what a figure of bars leaves out; nothing where it has all."""
    return f" The figure shows the first {MOST_BARS} of {len(rows):,} {what}." if len(rows) > MOST_BARS else ""


STYLE: Any = {
    "svg.hashsalt": "rankwise",
    "font.family": ["DejaVu Sans"],  # comes with Matplotlib: the same glyphs on every machine
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,  # ratios of 1.0001 would be 0.0001, with a small +1 beside the axis
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.markersize": 5.0,
}


PNG_COLOURS = 128
_DRAWING = threading.Lock()
"""Matplotlib's settings are those of the process: of two figures at once each would restore the other's."""


def drawn(draw: Callable[["Figure"], None], height: float = 3.1) -> dict[str, bytes]:
    """Draw on a figure 7.2 inches wide; bytes by file suffix. No date and no version goes into the files."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    svg = io.BytesIO()
    with _DRAWING, matplotlib.rc_context(), warnings.catch_warnings():
        # Names in Chinese or Korean become boxes; tables have them, and a line for each sign helps nobody.
        warnings.filterwarnings("ignore", r"Glyph \d+ .*missing from font", UserWarning)
        matplotlib.rcdefaults()  # a user's own settings must not change the report
        matplotlib.rcParams.update(STYLE)
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05)
        figure = Figure(figsize=(7.2, height), dpi=140, layout=layout)
        canvas: Any = FigureCanvasAgg(figure)
        draw(figure)
        # Not savefig, which draws everything twice to find its bounds.
        canvas.draw()
        png = _few_colours(canvas)
        figure.set_layout_engine("none")  # laid out once is enough for both
        canvas = FigureCanvasSVG(figure)
        canvas.print_svg(svg, metadata={"Date": None, "Creator": None})
    return {"png": png, "svg": svg.getvalue()}


def _few_colours(canvas: Any) -> bytes:
    """What is drawn as a PNG with a palette: a quarter of the bytes, and a figure has few colours."""
    from PIL import Image

    content = io.BytesIO()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    few = image.convert("RGB").quantize(PNG_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(content, "PNG", optimize=True)
    return content.getvalue()


PANEL_POINTS, FIGURE_POINTS = 190, 430
"""Width of one of two panels and of a single one in points of type, about: how close ticks may stand."""
LINE_CHARACTERS = 96
"""Of the font's size, about as many as a figure is wide."""
_MARK_CHARACTERS = 8
"""Of a legend: what the mark before a label and the space after it take."""
MOST_TICK_CHARACTERS = 40


def tick_text(text: str, max_characters: int = MOST_TICK_CHARACTERS) -> str:
    """A name that fits beside an axis: long ones, which mostly differ at their ends, lose their middle."""
    if len(text) <= max_characters:
        return text
    kept = max(max_characters - 1, 0)
    end = kept // 2
    return f"{text[: kept - end].rstrip()}…{text[len(text) - end :].lstrip()}"


def wrapped(text: str, width: int, max_lines: int) -> str:
    """A long name on so many lines: the last one has its end, in which names of cells mostly differ."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f"…{text[1 - width :].lstrip()}"]
    return "\n".join(lines)


def legend_texts(labels: Sequence[str]) -> list[str]:
    """Labels that leave room for their marks."""
    return [tick_text(label, LINE_CHARACTERS - _MARK_CHARACTERS) for label in labels]


def legend_label(name: str) -> str:
    """A name as the label of what is drawn: Matplotlib leaves labels that begin with an underscore out of legends."""
    return f" {name}" if name.startswith("_") else name


def legend_columns(labels: Sequence[str], columns: int = 3) -> int:
    """So many columns of a legend below a figure as its labels leave room for."""
    longest = max(map(len, legend_texts(labels)), default=0)
    return max(1, min(columns, LINE_CHARACTERS // (longest + _MARK_CHARACTERS)))


def legend_height(labels: Sequence[str], columns: int = 3) -> float:
    """Inches of such a legend: one of many labels in a figure of fixed height would leave its panels none."""
    return 0.2 * -(-len(labels) // legend_columns(labels, columns))


def legend(figure: "Figure", axes: "Axes", columns: int = 3) -> None:
    """The legend of one panel for the whole figure, below it, where it hides no point."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, legend_texts(labels), loc="outside lower center", ncols=legend_columns(labels, columns))


def are_slanted(names: Sequence[str], panels: int) -> bool:
    """Whether names below an axis of one of so many panels would run into each other."""
    return max(map(len, names), default=0) * len(names) * panels > 0.8 * LINE_CHARACTERS


def name_ticks(axes: "Axes", names: Sequence[str], panels: int = 1) -> None:
    """Names at 0, 1, ... below an axis; slanted and shortened where they would run into each other; of many, only
    some evenly spaced ones."""
    if not are_slanted(names, panels):
        axes.set_xticks(range(len(names)), names)
        return
    places = range(0, len(names), -(-len(names) // MOST_BARS))
    shown = [tick_text(names[place], MOST_TICK_CHARACTERS // panels) for place in places]
    axes.set_xticks(places, shown, rotation=30, ha="right", rotation_mode="anchor", fontsize=7.5)


def medians(axes: "Axes", points: Sequence[tuple[float, Estimate]], index: int, label: str) -> None:
    """Medians joined by a line, with a bar over the interval, or the range where there is no interval."""
    if not points:
        return
    ordered = sorted(points, key=lambda point: point[0])
    middles = [value.median for _, value in ordered]
    below = [value.median - value.bounds[0] for _, value in ordered]
    above = [value.bounds[1] - value.median for _, value in ordered]
    axes.errorbar(
        [x for x, _ in ordered],
        middles,
        yerr=[below, above],
        label=legend_label(label),
        capsize=3,
        linewidth=1.4,
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        linestyle=LINES[index % len(LINES)],
    )


def crosses(axes: "Axes", lost: Sequence[tuple[float, str]]) -> None:
    """A cross on the x axis for each x without a figure, with its statuses; of many, some evenly spaced ones."""
    places = statuses_by_place(lost)
    every = -(-len(places) // MOST_TICKS)
    for place, (x, statuses) in enumerate(places):
        axes.plot(
            [x],
            [0.0],
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            **CROSS,
        )
        if place % every:
            continue
        axes.annotate(
            statuses,
            (x, 0.0),
            (0, 8),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            color=FAILED_COLOUR,
            fontsize=8,
        )


def statuses_by_place(lost: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """(place, statuses) in the order given: several of one place, as of two series, would cover each other."""
    found: dict[float, list[str]] = {}
    for place, status in lost:
        known = found.setdefault(place, [])
        text = status if " " in status else status.replace("_", " ")  # names of runs keep their underscores
        known += [text] if text not in known else []
    return [(place, first_of(statuses, 2)) for place, statuses in found.items()]


def axis_positions(values: Sequence[Any]) -> tuple[list[float], list[str] | None]:
    """x of each value: itself where all are numbers, else the position of its text, and the texts."""
    if is_numeric(values):
        return [float(value) for value in values], None
    texts = [value_text(value) for value in values]
    labels = list(dict.fromkeys(texts))
    return [float(labels.index(text)) for text in texts], labels


def is_numeric(values: Sequence[Any]) -> bool:
    return all(_is_number(value) for value in values)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or written as one that YAML 1.1 takes for text: 1e-3."""
    if isinstance(value, str):
        return _EXPONENT_FORM.fullmatch(value) is not None and math.isfinite(float(value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def numeric(axes: "Axes", places: Sequence[float]) -> None:
    """Base 2 where values span a factor of 4 or more, with a tick at each value; else a linear scale."""
    distinct = sorted(set(places))
    if distinct[0] > 0 and distinct[-1] / distinct[0] >= 4:
        log2(axes, distinct)
    elif len(distinct) <= 8:
        axes.margins(x=0.1)
        _value_ticks(axes, distinct)


def spread_by_logarithm(places: Sequence[float]) -> bool:
    """Whether the closest of these values are further apart, in shares of the axis, where it is logarithmic."""
    distinct = sorted(set(places))
    if len(distinct) < 3 or distinct[0] <= 0:
        return False
    pairs = list(pairwise(distinct))
    on_linear = min(high - low for low, high in pairs) / (distinct[-1] - distinct[0])
    return min(math.log(high / low) for low, high in pairs) / math.log(distinct[-1] / distinct[0]) > on_linear


def log2(axes: "Axes", values: Sequence[float]) -> None:
    """A scale of base 2 with a tick at each value (of many, at some) and room at both ends."""
    distinct = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xlim(distinct[0] / 1.25, distinct[-1] * 1.25)
    _value_ticks(axes, distinct)
    axes.minorticks_off()


def log_ticks(axes: "Axes") -> None:
    """Plain numbers on a logarithmic y axis: 1, 2 and 5 of each decade, or of many decades powers of ten.

    One stands at either end. Matplotlib's own would be none within one decade, or formulas, which are not set here.
    """
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    steps, stride = ((1.0,), math.ceil(decades / _MOST_POWERS)) if decades > 3 else ((1.0, 2.0, 5.0), 1)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + stride, stride)
    places = [step * 10.0**power for power in powers for step in steps]
    least = max((place for place in places if place <= low), default=low)
    most = min((place for place in places if place >= high), default=high)
    shown = [place for place in places if least <= place <= most]
    axes.set_yticks(shown, [f"{place:,.10g}" for place in shown])
    axes.set_ylim(least, most)
    axes.yaxis.minorticks_off()


def _value_ticks(axes: "Axes", distinct: Sequence[float]) -> None:
    """Ticks at values of an axis, as many as can be read: last and first, then others from the greatest down."""
    spec = axes.get_subplotspec()
    width = PANEL_POINTS if spec is not None and spec.get_gridspec().ncols > 1 else FIGURE_POINTS
    measure = math.log2 if axes.get_xscale() == "log" else float
    low, high = map(measure, axes.get_xlim())
    places = {value: width * (measure(value) - low) / (high - low) for value in distinct}
    texts = {value: _value_text(value) for value in distinct}
    kept: list[float] = []
    for value in (distinct[-1], distinct[0], *distinct[-2:0:-1]):
        if all(abs(places[value] - places[at]) > 3 * len(texts[value] + texts[at]) + 4 for at in kept):
            kept.append(value)
    axes.set_xticks(sorted(kept), [texts[value] for value in sorted(kept)])


def _value_text(value: float) -> str:
    """`16384`, every digit of a whole number, `0.0003`, `1e-05`."""
    return f"{value:.10g}" if float(value).is_integer() else f"{value:g}"
