"""Load curves: throughput and latency over the rate or the number of users, a line for each engine or layout."""

from typing import TYPE_CHECKING, Any

from reports.experiments.load.experiment import LoadExperiment, LoadPoint
from reports.plots.style import (
    COLOURS,
    LINES,
    MARKERS,
    crosses,
    first_series,
    legend,
    legend_height,
    legend_label,
    log2,
    log_ticks,
    spread_by_logarithm,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND_COLUMNS = 2
_NAMES = {"rate": "requests/s asked for", "users": "users"}


def drawn_axis(found: LoadExperiment) -> str | None:
    """The axis of the curves; None where there are none."""
    drawn = any(sum(bool(point.valid) for _, point in points) > 1 for points in found.series().values())
    return found.axis if drawn else None


def lost_points(found: LoadExperiment) -> list[tuple[float, str]]:
    """Loads without a result, and how they ended: the verdicts of their repeats, else the cell's status."""
    lost = []
    for points in found.series().values():
        for at, point in points:
            if not point.valid:
                verdicts = dict.fromkeys(str(one.judgement.verdict) for one in point.repeats.values())
                status = "damaged samples" if point.damaged else point.result.status
                lost.append((at, " and ".join(verdicts) or status))
    return lost


def load_height(found: LoadExperiment) -> float:
    """Inches: the legend has two labels for each series."""
    labels = [f"{title}, TTFT P99" for title in first_series(found.series())]
    return 2.9 + legend_height([*labels, *labels], _LEGEND_COLUMNS)


def draw_load(figure: "Figure", found: LoadExperiment) -> None:
    """Left the tokens per second, right P99 of TTFT and ITL; a cross for each load without a result."""
    left, right = figure.subplots(1, 2)
    for index, (title, points) in enumerate(first_series(found.series()).items()):
        colour, line = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)]
        marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]  # of a colour's second series another one
        valid = [(at, point) for at, point in points if point.valid]
        _line(left, valid, "tokens", 1.0, colour, line, marker, title or "tokens/s")
        named = f"{title}, " if title else ""
        _line(right, valid, "ttft_p99", 1000.0, colour, "-", marker, f"{named}TTFT P99")
        _line(right, valid, "itl_p99", 1000.0, colour, ":", marker, f"{named}ITL P99")
    loads, lost = [at for points in found.series().values() for at, _ in points], lost_points(found)
    for axes in (left, right):
        axes.set_xlabel(_NAMES[found.axis or "rate"])
        if spread_by_logarithm(loads):
            log2(axes, loads)
        crosses(axes, lost)
    left.set_ylim(bottom=0, top=left.get_ylim()[1] * 1.04)
    left.set_ylabel("tokens/s")
    left.set_title("Throughput")
    right.set_yscale("log")
    log_ticks(right)
    right.set_ylabel("ms")
    right.set_title("Latency, P99")
    legend(figure, right, _LEGEND_COLUMNS)


def _line(
    axes: "Axes",
    points: list[tuple[float, LoadPoint]],
    name: str,
    scale: float,
    colour: str,
    line: str,
    marker: str,
    label: str,
) -> None:
    known = [(at, value) for at, point in points if (value := point.value(name)) is not None]
    if not known:
        return
    at = [one for one, _ in known]
    middle = [value.median * scale for _, value in known]
    low = [(value.median - value.bounds[0]) * scale for _, value in known]
    high = [(value.bounds[1] - value.median) * scale for _, value in known]
    look: Any = {"color": colour, "linestyle": line, "marker": marker, "capsize": 2}
    axes.errorbar(at, middle, yerr=[low, high], label=legend_label(label), **look)
