"""Latency distribution: the share of completed requests and of pending ones over time."""

from typing import TYPE_CHECKING

from reports.experiments.latency import LatencyCurves
from reports.plots.style import COLOURS, IDEAL, LINES, MARKERS, legend_label, tick_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOG_FROM = 8.0
"""x is logarithmic where the longest drawn latency is so many times the shortest."""

_LABEL = 34


def draw_latency(figure: "Figure", drawn: LatencyCurves) -> None:
    """Left the cumulative share with P50 marked, right the tail on a logarithmic scale with P99 marked."""
    left, right = figure.subplots(1, 2)
    for index, curve in enumerate(drawn.curves):
        colour, line, marker = COLOURS[index], LINES[index % len(LINES)], MARKERS[index]
        label = legend_label(tick_text(curve.label, _LABEL))
        milliseconds = curve.seconds * 1000
        left.step(milliseconds, curve.shares * 100, where="post", color=colour, linestyle=line, linewidth=1.3)
        # The share that takes longer than each sample; the slowest itself has none and would be at log(0).
        right.step(milliseconds, (1 - curve.shares) * 100, where="post", color=colour, linestyle=line, linewidth=1.3)
        known = curve.percentiles
        left.plot([], [], color=colour, linestyle=line, marker=marker, label=label)
        left.plot([known.p50 * 1000], [50], marker=marker, color=colour, markeredgecolor="white", markersize=7)
        hollow = {"markerfacecolor": "white", "markeredgecolor": colour} if known.marked else {}
        right.plot(
            [known.p99 * 1000],
            [1],
            marker=marker,
            color=colour,
            markersize=7,
            **{"markeredgecolor": "white", **hollow},
        )
    everything = [value for curve in drawn.curves for value in (curve.seconds[0], curve.seconds[-1])]
    span = float(max(everything) / min(everything)) if min(everything) > 0 else 1.0
    for axes in (left, right):
        _x(axes, drawn.kind, span)
    left.axhline(50, color=IDEAL, linestyle=":", linewidth=0.9)
    left.set_ylim(0, 101)
    left.set_ylabel(f"{_plural(drawn.kind)} done, %")
    left.set_title("Distribution, P50 marked")
    right.set_yscale("log")
    most = max(curve.percentiles.samples for curve in drawn.curves)
    right.set_ylim(min(0.5, max(0.001, 50 / most)), 110)
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.minorticks_off()
    right.axhline(1, color=IDEAL, linestyle=":", linewidth=0.9)
    right.set_ylabel(f"{_plural(drawn.kind)} that take longer, %")
    few = any(curve.percentiles.marked for curve in drawn.curves)
    right.set_title("Tail, P99 marked" + (" (hollow: too few samples)" if few else ""))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if max(map(len, labels)) > 22 else 3)


def _plural(kind: str) -> str:
    return "passes" if kind == "pass" else f"{kind}s"


def _x(axes: "Axes", kind: str, span: float) -> None:
    from matplotlib.ticker import LogLocator

    if span >= LOG_FROM:
        axes.set_xscale("log")
        subs = (1.0, 2.0, 5.0) if span < 40 else (1.0, 3.0) if span < 400 else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=subs))
        axes.xaxis.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(f"latency of a {kind}, ms" + (" (logarithmic)" if span >= LOG_FROM else ""))
