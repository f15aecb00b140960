"""Training: loss by step, time split of a step, and comparison of strategies."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.common.arrays import Floats
from reports.plots.experiments.time_split import LOOKS
from reports.plots.style import (
    COLOURS,
    FAILED_COLOUR,
    IDEAL,
    LINES,
    MOST_BARS,
    legend,
    legend_label,
    log_ticks,
    wrapped,
)
from reports.reading.load import CellResult, short_titles
from reports.training.cells import step_parts
from reports.training.equality import TOLERANCES, SameLearning, relative
from reports.training.strategies import Strategies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_CHARACTERS = 48
_PREDICTED: Any = {"marker": "D", "color": "black", "markerfacecolor": "white", "linestyle": "none", "markersize": 5}


def _losses(axes: "Axes", name: str, losses: Floats, look: Mapping[str, Any]) -> None:
    """Losses by step, joined; a dot for one without a finite neighbour, through which no line goes."""
    known = np.isfinite(losses)
    sides = np.concatenate([[False], known, [False]])
    alone = np.flatnonzero(known & ~sides[:-2] & ~sides[2:])
    dots: Any = {"marker": "."} if len(alone) else {}
    axes.plot(np.arange(1, len(losses) + 1), losses, label=legend_label(name), markevery=alone.tolist(), **dots, **look)


def draw_losses(figure: "Figure", curves: Mapping[str, Floats]) -> None:
    """Training loss by step; at most as many curves as there are colours."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for index, (name, losses) in enumerate(list(curves.items())[: len(COLOURS)]):
        look: Any = {"color": COLOURS[index], "linestyle": LINES[index % len(LINES)], "linewidth": 1.2}
        _losses(axes, name, losses, look)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss, nats a token")
    legend(figure, axes, columns=1)


def draw_equality(figure: "Figure", found: SameLearning) -> None:
    """Left the losses, which should lie on each other; right how far each lies from the reference, logarithmic."""
    from matplotlib.ticker import MaxNLocator

    left, right = figure.subplots(1, 2)
    curves = [found.reference, *(item.curve for item in found.others)][: len(COLOURS)]
    for index, curve in enumerate(curves):
        look: Any = {"color": COLOURS[index], "linestyle": LINES[index % len(LINES)], "linewidth": 1.2}
        steps = np.arange(1, len(curve.losses) + 1)
        _losses(left, curve.result.name, curve.losses, look)
        apart = relative(curve.losses, found.reference.losses)
        shown = apart > 0  # a logarithm has no place for what is equal
        if index and shown.any():
            right.plot(steps[: len(apart)][shown], apart[shown], marker=".", **look)
    dtypes = {curve.result.cell.dtype for curve in curves}
    for dtype, (loss, _) in TOLERANCES.items():
        if dtype in dtypes:
            right.axhline(loss, color=IDEAL, linewidth=0.8)
            right.annotate(f"allowed in {dtype}", (1, loss), (0, 2), textcoords="offset points", fontsize=7)
    right.set_yscale("log")
    log_ticks(right)
    right.set_xlim(left.get_xlim())
    left.set_ylabel("training loss, nats a token")
    right.set_ylabel("relative difference of loss")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("optimizer step")
    legend(figure, left, columns=1)


def bars_height(count: int) -> float:
    """Inches that so many horizontal bars need."""
    return 1.5 + 0.4 * min(count, MOST_BARS)


def draw_step_split(figure: "Figure", cells: Sequence[CellResult]) -> None:
    """A bar for each cell, the first at the top: the parts of a mean step."""
    shown = cells[:MOST_BARS]
    axes = figure.subplots()
    _stacked(axes, short_titles(shown), [step_parts(result) for result in shown])
    axes.set_xlabel("time of a mean step, ms")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def draw_strategies(figure: "Figure", found: Strategies) -> None:
    """A bar for each way, the fastest at the top, what has no figure last; a diamond where it was predicted."""
    lost = [way for way in found.ways if way.measured is None]
    shown = [*found.ranked, *lost][:MOST_BARS]
    axes = figure.subplots()
    _stacked(axes, [way.name for way in shown], [step_parts(way.result) for way in shown])
    said = [(way.predicted * 1000, place) for place, way in enumerate(shown) if way.predicted is not None]
    if said:
        axes.plot([x for x, _ in said], [y for _, y in said], label="predicted step", **_PREDICTED)
    for place, way in enumerate(shown):
        if way.measured is None:
            status = way.result.status.replace("_", " ")
            axes.annotate(
                status, (0, place), (4, 0), textcoords="offset points", va="center", color=FAILED_COLOUR, fontsize=8
            )
    axes.set_xlabel("time of a mean step, ms")
    axes.set_xlim(left=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _stacked(axes: "Axes", names: Sequence[str], bars: Sequence[Mapping[str, float]]) -> None:
    """Horizontal bars of parts in milliseconds, in the order of a step."""
    places = range(len(bars))
    floor = [0.0] * len(bars)
    for name, (colour, hatch) in LOOKS.items():
        if not any(parts.get(name) for parts in bars):
            continue
        widths = [parts.get(name, 0.0) * 1000 for parts in bars]
        # No line around a part: it would hide a thin one.
        look: Any = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}
        axes.barh(places, widths, left=floor, height=0.7, label=name, **look)
        floor = [low + width for low, width in zip(floor, widths, strict=True)]
    axes.set_yticks(places, [_label(name) for name in names], fontsize=6.5)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _label(name: str) -> str:
    """In three lines: cells of one model differ in the end of their titles."""
    return wrapped(name, _LABEL_CHARACTERS, 3)
