"""Dollars per million tokens (or embeddings) by cell, the cheapest first."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.common.printable import plural_noun
from reports.decisions.cost import CellCost
from reports.plots.style import COLOURS, MOST_BARS, legend, legend_height, legend_label, tick_text
from reports.text import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEGEND_COLUMNS = 2


def cheapest_first(costs: Sequence[CellCost]) -> list[CellCost]:
    """The bars that are drawn: the cheapest MOST_BARS of the cells whose work has a price."""
    known = [cost for cost in costs if cost.usd_per_million is not None]
    return sorted(known, key=lambda cost: cost.usd_per_million.median if cost.usd_per_million else 0)[:MOST_BARS]


def cost_height(costs: Sequence[CellCost]) -> float:
    """Inches for so many bars and the legend."""
    return 1.2 + 0.26 * len(cheapest_first(costs)) + legend_height(_models(costs), _LEGEND_COLUMNS)


def draw_costs(figure: "Figure", costs: Sequence[CellCost]) -> None:
    """A bar for each cell with its interval (or range); models differ in colour and hatching."""
    axes = figure.subplots()
    drawn = cheapest_first(costs)
    models = _models(costs)
    hatches = ("", "//", "..", "xx", "--", "\\\\", "oo")
    widest = 0.0
    for row, cost in enumerate(drawn):
        value = cost.usd_per_million
        assert value is not None
        index = models.index(cost.result.model)
        first = next(other for other in drawn if other.result.model == cost.result.model) is cost
        axes.barh(
            row,
            value.median,
            height=0.68,
            color=COLOURS[index % len(COLOURS)],
            hatch=hatches[index % len(hatches)],
            edgecolor="white",
            linewidth=0,
            label=legend_label(cost.result.model) if first else "_",
        )
        low, high = value.bounds
        axes.errorbar(
            value.median,
            row,
            xerr=[[value.median - low], [high - value.median]],
            color="#222222",
            capsize=2.5,
            linewidth=1,
        )
        widest = max(widest, high)
        axes.annotate(number(value.median), (high, row), (5, 0), textcoords="offset points", va="center", fontsize=8)
    labels = [tick_text(cost.result.name, 62) for cost in drawn]
    axes.set_yticks(range(len(drawn)), labels, fontsize=8)
    axes.set_ylim(len(drawn) - 0.4, -0.6)
    axes.set_xlim(0, widest * 1.14)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"USD per million {plural_noun(drawn[0].result.work_unit)}")
    if len(models) > 1:
        legend(figure, axes, _LEGEND_COLUMNS)


def _models(costs: Sequence[CellCost]) -> list[str]:
    return list(dict.fromkeys(cost.result.model for cost in cheapest_first(costs)))
