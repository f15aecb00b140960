"""The figures: scaling, sweep, optimization, loss. Each becomes a PNG and an SVG, the same bytes each time.

    images = drawn(lambda figure: draw_scaling(figure, result))      # {"png": ..., "svg": ...}

Matplotlib is imported when the first figure is drawn, without pyplot and its global state. Colours are
those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers tell apart; markers
and line styles differ too, so that print in grey can be read. Points are medians, bars the range over
repeats; a point without a figure is a cross on the axis, with its status.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.rates import Floats, Spread
from reports.comparison import Gain, SweepPoint
from reports.scaling import Scaling, ScalingPoint
from reports.text import MIB, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
FAILED = "#B00020"
IDEAL = "#777777"

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
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.markersize": 5.0,
}


def drawn(draw: Callable[["Figure"], None], height: float = 3.1) -> dict[str, bytes]:
    """Draw on a figure 7.2 inches wide; bytes by file suffix. No date and no version goes into the files."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    png, svg = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's own settings must not change the report
        matplotlib.rcParams.update(STYLE)
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.05)
        figure = Figure(figsize=(7.2, height), dpi=140, layout=layout)
        canvas: Any = FigureCanvasAgg(figure)
        draw(figure)
        # Not savefig, which draws everything twice to find its bounds.
        canvas.print_png(png, metadata={"Software": None})
        figure.set_layout_engine("none")  # laid out once is enough for both
        canvas = FigureCanvasSVG(figure)
        canvas.print_svg(svg, metadata={"Date": None, "Creator": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def draw_scaling(figure: "Figure", result: Scaling) -> None:
    """Throughput with the ideal line on the left, efficiency on the right; ranks on a scale of base 2."""
    left, right = figure.subplots(1, 2)
    points = [(point.ranks, point.throughput) for point in result.points if point.throughput]
    lost = [(point.ranks, point.result.status) for point in result.points if not point.throughput]
    ranks = [point.ranks for point in result.points]
    base = result.baseline
    if base.throughput is not None:
        ideal = [base.throughput.median * n / base.ranks for n in ranks]
        left.plot(ranks, ideal, color=IDEAL, linestyle="--", linewidth=1, label="linear")
    _medians(left, points, 0, "measured, median and range")
    left.set_ylabel(f"throughput, {result.unit}")
    left.set_title("Throughput")
    efficient = [(point.ranks, _efficiency_spread(point, base)) for point in result.measured]
    right.axhline(100, color=IDEAL, linestyle="--", linewidth=1)
    _medians(right, efficient, 0, "measured")
    right.set_ylabel("efficiency, % of linear")
    right.set_title("Efficiency against the baseline's median")
    _legend(figure, left)
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.04)
        _log2(axes, ranks)
        _crosses(axes, lost)
    right.set_ylim(top=max(112.0, 1.08 * max((value.high for _, value in efficient), default=100)))


def _efficiency_spread(point: ScalingPoint, base: ScalingPoint) -> Spread:
    """Efficiency in per cent; its range is that of the point, the baseline being held at its median."""
    assert point.throughput is not None and base.throughput is not None
    scale = 100 * base.ranks / (point.ranks * base.throughput.median)
    value = point.throughput
    return Spread(value.median * scale, value.low * scale, value.high * scale, value.count)


def draw_sweep(figure: "Figure", points: Sequence[SweepPoint]) -> None:
    """Throughput, and where it is known peak memory, over the swept field; further fields are series."""
    axis, series = sweep_axes(points)
    memory = any(point.result.peak_bytes is not None for point in points)
    panels = figure.subplots(1, 2 if memory else 1, squeeze=False)[0]
    places, labels = _places([point.values[axis] for point in points])
    for panel, axes in enumerate(panels):
        for index, (name, members) in enumerate(series.items()):
            values: list[tuple[float, Spread]] = []
            for position in members:
                result = points[position].result
                peak = result.peak_bytes
                value = (
                    result.spread("throughput")
                    if panel == 0
                    else (None if peak is None else Spread(peak / MIB, peak / MIB, peak / MIB, 1))
                )
                if value is not None:
                    values.append((places[position], value))
            _medians(axes, values, index, name)
        lost = [(places[i], point.result.status) for i, point in enumerate(points) if not point.result.completed]
        axes.set_xlabel(axis.removeprefix("workload.").replace("_", " "))
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.04)
        if labels is None:
            _numeric(axes, places)
        else:
            axes.set_xticks(range(len(labels)), labels)
            axes.margins(x=0.15)
        _crosses(axes, lost)
        axes.set_title("Throughput" if panel == 0 else "Peak memory, all ranks")
        axes.set_ylabel(f"throughput, {points[0].result.unit}" if panel == 0 else "peak memory, MiB")
    if len(series) > 1:
        _legend(figure, panels[0])


def draw_optimization(figure: "Figure", gains: Sequence[Gain]) -> None:
    """The gain of each variant: a faint dot for each pair, the median and the range of pairs."""
    axes = figure.subplots()
    axes.axvline(1, color=IDEAL, linestyle="--", linewidth=1)
    for row, gain in enumerate(gains):
        colour = COLOURS[row % len(COLOURS)]
        if gain.throughput is None:
            edge = axes.get_yaxis_transform()
            axes.plot(
                [0.015],
                [row],
                transform=edge,
                linestyle="none",
                marker="x",
                color=FAILED,
                markersize=8,
                markeredgewidth=2,
            )
            status = gain.result.status.replace("_", " ")
            axes.annotate(
                status, (0.015, row), (8, 0), xycoords=edge, textcoords="offset points", va="center", color=FAILED
            )
            continue
        value = gain.throughput
        axes.plot([value.low, value.high], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(
            list(gain.throughput_by_repeat.values()),
            [row] * value.count,
            linestyle="none",
            marker="o",
            color=colour,
            alpha=0.35,
            markersize=4,
        )
        axes.plot(
            [value.median], [row], linestyle="none", marker=MARKERS[row % len(MARKERS)], color=colour, markersize=8
        )
        axes.annotate(
            f"{number(value.median)}×",
            (value.median, row),
            (0, 9),
            textcoords="offset points",
            ha="center",
            color=colour,
        )
    axes.set_yticks(range(len(gains)), [gain.variant for gain in gains])
    axes.set_ylim(len(gains) - 0.4, -0.7)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.set_xlabel("throughput of the variant over the baseline's of the same block (ratio; 1 is no gain)")


def draw_losses(figure: "Figure", curves: Mapping[str, Floats]) -> None:
    """Training loss by step; at most as many curves as there are colours."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for index, (name, losses) in enumerate(list(curves.items())[: len(COLOURS)]):
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses, color=COLOURS[index], linestyle=LINES[index % len(LINES)], linewidth=1.2, label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, nats a token")
    _legend(figure, axes, columns=1)


def sweep_axes(points: Sequence[SweepPoint]) -> tuple[str, dict[str, list[int]]]:
    """The field on the x axis (the one of most values) and the points of each series, by its name."""
    fields = list(points[0].values)
    counts = {field: len({repr(point.values[field]) for point in points}) for field in fields}
    axis = max(fields, key=lambda field: (_is_numeric([point.values[field] for point in points]), counts[field]))
    series: dict[str, list[int]] = {}
    for position, point in enumerate(points):
        rest = [
            f"{field.removeprefix('workload.').replace('_', ' ')} {point.values[field]}"
            for field in fields
            if field != axis
        ]
        series.setdefault(", ".join(rest) or "measured", []).append(position)
    return axis, series


def _legend(figure: "Figure", axes: "Axes", columns: int = 3) -> None:
    """The legend of one panel for the whole figure, below it, where it hides no point."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _medians(axes: "Axes", points: Sequence[tuple[float, Spread]], index: int, label: str) -> None:
    """Medians joined by a line, with a bar from least to greatest."""
    if not points:
        return
    ordered = sorted(points, key=lambda point: point[0])
    medians = [value.median for _, value in ordered]
    bars = [[value.median - value.low for _, value in ordered], [value.high - value.median for _, value in ordered]]
    axes.errorbar(
        [x for x, _ in ordered],
        medians,
        yerr=bars,
        label=label,
        capsize=3,
        linewidth=1.4,
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        linestyle=LINES[index % len(LINES)],
    )


def _crosses(axes: "Axes", lost: Sequence[tuple[float, str]]) -> None:
    """A cross on the x axis, with the status, for each point without a figure."""
    for x, status in lost:
        axes.plot(
            [x],
            [0.0],
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            linestyle="none",
            marker="x",
            color=FAILED,
            markersize=8,
            markeredgewidth=2,
        )
        axes.annotate(
            status.replace("_", " "),
            (x, 0.0),
            (0, 8),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            color=FAILED,
            fontsize=8,
        )


def _places(values: Sequence[Any]) -> tuple[list[float], list[str] | None]:
    """x of each value: itself where all are numbers, else the position of its text, and the texts."""
    if _is_numeric(values):
        return [float(value) for value in values], None
    labels = list(dict.fromkeys(str(value) for value in values))
    return [float(labels.index(str(value))) for value in values], labels


def _is_numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _numeric(axes: "Axes", places: Sequence[float]) -> None:
    """Base 2 where values span a factor of 4 or more, with a tick at each value; else a linear scale."""
    distinct = sorted(set(places))
    if distinct[0] > 0 and distinct[-1] / distinct[0] >= 4:
        _log2(axes, distinct)
    elif len(distinct) <= 8:
        axes.set_xticks(distinct, [f"{value:g}" for value in distinct])
        axes.margins(x=0.1)


def _log2(axes: "Axes", values: Sequence[float]) -> None:
    """A scale of base 2 with a tick at each value and room at both ends."""
    distinct = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(distinct, [f"{value:g}" for value in distinct])
    axes.minorticks_off()
    axes.set_xlim(distinct[0] / 1.25, distinct[-1] * 1.25)
