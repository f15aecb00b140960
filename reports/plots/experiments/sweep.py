"""Throughput and memory over a swept field; further fields are series."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.common.files.reading import MIB
from configs.common.printable import value_text
from reports.experiments.comparison import SweepPoint
from reports.numbers.statistics import Estimate
from reports.plots.style import (
    are_slanted,
    axis_positions,
    crosses,
    first_series,
    is_numeric,
    legend,
    legend_columns,
    medians,
    name_ticks,
    numeric,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sweep_height(points: Sequence[SweepPoint]) -> float:
    """Inches: the legend has lines for its series, and slanted names need room."""
    axis, series = drawn_axes(points)
    _, labels = axis_positions([point.values[axis] for point in points])
    slanted = labels is not None and are_slanted(labels, _panels(points))
    return 3.1 + 0.2 * (len(series) // legend_columns(list(series))) + (0.7 if slanted else 0.0)


def _panels(points: Sequence[SweepPoint]) -> int:
    return 2 if any(point.result.peak_bytes is not None for point in points) else 1


def draw_sweep(figure: "Figure", points: Sequence[SweepPoint]) -> None:
    """Throughput, and where it is known peak memory, over the swept field; further fields are series."""
    axis, series = drawn_axes(points)
    panels = figure.subplots(1, _panels(points), squeeze=False)[0]
    xs, labels = axis_positions([point.values[axis] for point in points])
    for panel, axes in enumerate(panels):
        for index, (name, members) in enumerate(series.items()):
            values: list[tuple[float, Estimate]] = []
            for position in members:
                result = points[position].result
                peak = result.peak_bytes
                value = (
                    result.estimate("throughput")
                    if panel == 0
                    else (None if peak is None else Estimate(peak / MIB, peak / MIB, peak / MIB, 1))
                )
                if value is not None:
                    values.append((xs[position], value))
            medians(axes, values, index, name)
        lost = [(xs[i], point.result.status) for i, point in enumerate(points) if not point.result.completed]
        axes.set_xlabel(axis.removeprefix("workload.").replace("_", " "))
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.04)
        if labels is None:
            numeric(axes, xs)
        else:
            name_ticks(axes, labels, len(panels))
            axes.margins(x=0.15)
        crosses(axes, lost)
        axes.set_title("Throughput" if panel == 0 else "Peak memory, all ranks")
        axes.set_ylabel(f"throughput, {points[0].result.unit}" if panel == 0 else "peak memory, MiB")
    if len(series) > 1:
        legend(figure, panels[0])


def drawn_axes(points: Sequence[SweepPoint]) -> tuple[str, dict[str, list[int]]]:
    """The field on the x axis and the series that a figure shows, of many the first."""
    axis, series = sweep_axes(points)
    return axis, first_series(series)


def sweep_axes(points: Sequence[SweepPoint]) -> tuple[str, dict[str, list[int]]]:
    """The field on the x axis (the one of most values) and the points of each series, by its name."""
    fields = list(points[0].values)
    counts = {field: len({repr(point.values[field]) for point in points}) for field in fields}
    axis = max(fields, key=lambda field: (is_numeric([point.values[field] for point in points]), counts[field]))
    series: dict[str, list[int]] = {}
    for position, point in enumerate(points):
        rest = [
            f"{field.removeprefix('workload.').replace('_', ' ')} {value_text(point.values[field])}"
            for field in fields
            if field != axis
        ]
        series.setdefault(", ".join(rest) or "measured", []).append(position)
    return axis, series
