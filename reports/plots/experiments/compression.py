"""Compression trade-offs: speed and size against loss of quality, with the Pareto-optimal passes connected."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.experiments.compression import MOST_LOSS, Compressed, CompressionResult
from reports.plots.style import COLOURS, FAILED_COLOUR, IDEAL, tick_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES_A_LINE = 3
_TICKS = 6
"""Of the axis of losses, at most: a pass that breaks a model raises its perplexity by many orders of magnitude."""


def drawn_rows(result: CompressionResult) -> list[Compressed]:
    """Those that stand in at least one panel, numbered in this order."""
    return [row for row in result.rows if row.loss is not None and (row.speed is not None or row.share is not None)]


def compression_height(result: CompressionResult) -> float:
    """Inches: a line of names for every three points."""
    return 3.2 + 0.17 * -(-len(drawn_rows(result)) // _NAMES_A_LINE)


def draw_compression(figure: "Figure", result: CompressionResult) -> None:
    """Left speed over the base's, right the size of the weights; both over the loss, little of which is to the left."""
    left, right = figure.subplots(1, 2)
    rows = drawn_rows(result)
    scale = 1.0 if result.encodes else 100.0
    for axes, name in ((left, "speed"), (right, "share")):
        _panel(axes, result, rows, name, scale)
        _loss_axis(axes, result, scale)
    left.set_ylabel(f"times the base's {result.base.result.unit}")
    left.set_title("Speed: better is up and left")
    right.set_ylabel("weights, % of the base's bytes")
    right.set_title("Size: better is down and left")
    names = [f"{place}  {tick_text(row.label, 30)}" for place, row in enumerate(rows, start=1)]
    width = max(map(len, names), default=0)
    starts = range(0, len(names), _NAMES_A_LINE)
    lines = ["   ".join(name.ljust(width) for name in names[start : start + _NAMES_A_LINE]) for start in starts]
    text = figure.supxlabel("\n".join(lines), x=0.02, ha="left", fontsize=7.5)
    text.set_fontfamily("DejaVu Sans Mono")


def _panel(axes: "Axes", result: CompressionResult, rows: Sequence[Compressed], name: str, scale: float) -> None:
    factor = 1.0 if name == "speed" else 100.0
    front = sorted(result.front(name), key=lambda row: row.loss or 0.0)
    xs = [scale * (row.loss or 0.0) for row in front]
    axes.plot(xs, [factor * getattr(row, name) for row in front], color=COLOURS[0], linewidth=1.2, zorder=2)
    names: dict[tuple[float, float], list[str]] = {}
    axes.margins(x=0.12, y=0.16)
    for place, row in enumerate(rows, start=1):
        value = getattr(row, name)
        if value is None or row.loss is None:
            continue
        best = row in front
        x, y = scale * row.loss, factor * value
        if name == "speed" and row.throughput is not None and row.throughput.count > 1:
            low, high = row.throughput.bounds
            axes.errorbar([x], [y], yerr=[[y - low], [high - y]], color=COLOURS[5], elinewidth=1, capsize=2, zorder=1)
        axes.plot(
            [x],
            [y],
            marker="*" if row.base else "D" if best else "o",
            markersize=10 if row.base else 6,
            color=COLOURS[0] if best else IDEAL,
            markerfacecolor=COLOURS[0] if best else "white",
            linestyle="none",
            zorder=3,
        )
        near = (at for at in names if abs(at[0] - x) < 0.05 * max(1.0, abs(x)) and abs(at[1] - y) < 0.04 * factor)
        names.setdefault(next(near, (x, y)), []).append(str(place))
    for at, places in names.items():
        axes.annotate(", ".join(places), at, (6, 4), textcoords="offset points", fontsize=8, zorder=4)
    axes.set_ylim(bottom=0)


def _loss_axis(axes: "Axes", result: CompressionResult, scale: float) -> None:
    """Logarithmic to both sides of a linear middle: passes lose next to nothing, or everything."""
    from matplotlib.ticker import SymmetricalLogLocator

    limit = scale * MOST_LOSS
    losses = [scale * row.loss for row in result.rows if row.loss is not None]
    if max(losses) > 5 * limit:
        locator = SymmetricalLogLocator(base=10, linthresh=limit)
        locator.set_params(numticks=_TICKS)
        axes.set_xscale("symlog", linthresh=limit, linscale=1.0)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(min(3 * min(losses), -0.2 * limit), 4 * max(losses))
    axes.axvline(limit, color=FAILED_COLOUR, linestyle=":", linewidth=1)
    axes.set_xlabel("cosine distance, mean" if result.encodes else "change of perplexity, %")
