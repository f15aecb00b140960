"""Throughput by target, one series per point; crossing lines mark a change of the best layout."""

from typing import TYPE_CHECKING

from reports.experiments.targets import SideBySide
from reports.plots.style import LINE_CHARACTERS, MOST_SERIES, crosses, legend, legend_height, medians, tick_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def targets_height(found: SideBySide) -> float:
    """Inches: the legend has lines for its points."""
    return 3.1 + legend_height(drawn_labels(found))


def drawn_labels(found: SideBySide) -> list[str]:
    """The points that a figure shows, of many the first."""
    return found.labels[:MOST_SERIES]


def draw_targets(figure: "Figure", found: SideBySide) -> None:
    """Targets stand beside each other, at equal distances; their links, where known, are below their names."""
    axes = figure.subplots()
    lost: list[tuple[float, str]] = []
    for index, label in enumerate(drawn_labels(found)):
        values = []
        for place, side in enumerate(found.sides):
            point = next((point for point in side.points if point.label == label), None)
            value = point.throughput if point is not None else None
            if value is not None:
                values.append((float(place), value))
            elif point is not None:
                lost.append((float(place), point.result.status))
        medians(axes, values, index, label)
    crosses(axes, lost)
    most = LINE_CHARACTERS // len(found.sides)
    targets = [tick_text(side.target, most) for side in found.sides]
    names = [
        name if side.link is None else f"{name}\n{side.link}" for name, side in zip(targets, found.sides, strict=True)
    ]
    axes.set_xticks(range(len(names)), names)
    axes.margins(x=0.15)
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.04)
    axes.set_ylabel(f"throughput, {found.unit}")
    legend(figure, axes)
