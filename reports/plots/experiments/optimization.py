"""Gain of each variant over the baseline of the same block."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reports.experiments.comparison import Gain
from reports.plots.style import COLOURS, CROSS, FAILED_COLOUR, IDEAL, MARKERS, tick_text
from reports.text import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABEL_CHARACTERS = 32


def draw_optimization(figure: "Figure", gains: Sequence[Gain]) -> None:
    """The gain of each variant: a faint dot for each pair, the value and its interval (or the range of pairs)."""
    axes = figure.subplots()
    axes.axvline(1, color=IDEAL, linestyle="--", linewidth=1)
    for row, gain in enumerate(gains):
        colour = COLOURS[row % len(COLOURS)]
        if gain.throughput is None:
            edge = axes.get_yaxis_transform()
            axes.plot([0.015], [row], transform=edge, **CROSS)
            status = gain.result.status.replace("_", " ")
            axes.annotate(
                status,
                (0.015, row),
                (8, 0),
                xycoords=edge,
                textcoords="offset points",
                va="center",
                color=FAILED_COLOUR,
            )
            continue
        value = gain.throughput
        axes.plot(list(value.bounds), [row, row], color=colour, linewidth=2, solid_capstyle="butt")
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
            [value.value], [row], linestyle="none", marker=MARKERS[row % len(MARKERS)], color=colour, markersize=8
        )
        axes.annotate(
            f"{number(value.value)}×",
            (value.value, row),
            (0, 9),
            textcoords="offset points",
            ha="center",
            color=colour,
        )
    axes.set_yticks(range(len(gains)), [tick_text(gain.variant, _LABEL_CHARACTERS) for gain in gains])
    axes.set_ylim(len(gains) - 0.4, -0.7)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.set_xlabel("throughput of the variant over the baseline's of the same block\n(ratio; 1 is no gain)")
