"""The profile pass as stacked bars: compute, communication behind it, communication alone, idle."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reports.plots.style import MOST_BARS, wrapped
from reports.profiles.profiled import Profiled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {
    "compute": ("#0072B2", ""),
    "compute with communication behind it": ("#56B4E9", "//"),
    "exposed communication": ("#D55E00", "xx"),
    "idle": ("#BBBBBB", ".."),
}
"""Part -> fill and hatch, as in `reports.plots.experiments.time_split`."""

_LABEL_CHARACTERS = 42


def profiled_height(cells: Sequence[Profiled]) -> float:
    """Inches that the figure needs."""
    return 1.4 + 0.36 * min(len(cells), MOST_BARS)


def draw_profiled(figure: "Figure", cells: Sequence[Profiled]) -> None:
    """A bar for each cell, the first at the top: shares of the recorded pass, means over ranks."""
    axes = figure.subplots()
    shown = cells[:MOST_BARS]
    places = range(len(shown))
    floor = [0.0] * len(shown)
    for name, (colour, hatch) in LOOKS.items():
        widths = [parts(cell)[name] * 100 for cell in shown]
        look: Any = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}
        axes.barh(places, widths, left=floor, height=0.7, label=name, **look)
        floor = [low + width for low, width in zip(floor, widths, strict=True)]
    axes.set_yticks(places, [_label(cell) for cell in shown], fontsize=7.5)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the recorded pass, %")
    axes.grid(visible=False, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def parts(cell: Profiled) -> dict[str, float]:
    """The parts of the bar, which sum to 1."""
    exposed = cell.mean("exposed_communication_share")
    hidden = cell.mean("communication_share") - exposed
    widths = (cell.mean("compute_share") - hidden, hidden, exposed, cell.mean("idle_share"))
    return dict(zip(LOOKS, widths, strict=True))


def _label(cell: Profiled) -> str:
    """In two lines: cells of one model differ in the end of their titles."""
    return wrapped(cell.result.title, _LABEL_CHARACTERS, 2)
