"""Time split of a pass as stacked bars over the number of ranks."""

from typing import TYPE_CHECKING, Any

from reports.plots.style import FAILED_COLOUR
from reports.profiles.time_split import PARTS, TimeSplit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = dict(
    zip(
        PARTS.values(),
        (
            ("#0072B2", ""),
            ("#56B4E9", "//"),
            ("#F0E442", ".."),
            ("#0072B2", ""),
            ("#56B4E9", "//"),
            ("#D55E00", "xx"),
            ("#CC79A7", "\\\\"),
            ("#009E73", ""),
            ("#BBBBBB", ".."),
            ("#E69F00", "xx"),
        ),
        strict=True,
    )
)
"""Part -> fill (Okabe and Ito, grey for what is neither) and hatch, which tells them apart in grey print.

Generation has prefill and decode where training has forward and backward, so these share their looks.
"""

TICK_CHARACTERS = 36
"""Of all ticks below a panel, a space after each included."""


def draw_time_split(figure: "Figure", result: TimeSplit) -> None:
    """Left milliseconds of a mean pass, right the same as shares of it."""
    left, right = figure.subplots(1, 2)
    _bars(left, result, share=False)
    _bars(right, result, share=True)
    left.set_ylabel(f"time of a mean {result.unit}, ms")
    left.set_title(f"Time of a {result.unit}")
    right.set_ylabel(f"share of the {result.unit}, %")
    right.set_title("Shares")
    right.set_ylim(0, 100)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3))


def _bars(axes: "Axes", result: TimeSplit, share: bool) -> None:
    places = range(len(result.points))
    floor = [0.0] * len(result.points)
    for name in result.names:
        heights = [
            point.parts.get(name, 0.0) * (100 / point.seconds if share else 1000) if point.seconds > 0 else 0.0
            for point in result.points
        ]
        colour, hatch = LOOKS[name]
        # No line around a part: it would hide a thin one.
        look: Any = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}
        axes.bar(places, heights, bottom=floor, width=0.7, label=name, **look)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for place, point in zip(places, result.points, strict=True):
        if point.seconds <= 0:
            axes.annotate(
                point.result.status.replace("_", " "),
                (place, 0),
                (0, 4),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                color=FAILED_COLOUR,
                fontsize=8,
            )
    names = [str(point.ranks) for point in result.points]
    stride = -(-len(names) * (1 + max(map(len, names))) // TICK_CHARACTERS)
    axes.set_xticks(places[::stride], names[::stride])
    if not share:
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_ylim(top=axes.get_ylim()[1] * 1.04)
    axes.set_xlim(-0.6, len(result.points) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("ranks")
