"""A cell's figure over the runs of the history.

    draw = partial(draw_history, runs=history.runs([key]), key=key, kind=FIGURE_KINDS[0])
    images = drawn(draw, history_height(len(runs)))

Runs stand in the order of their measuring, at equal distances. A line joins runs of one environment only:
where machine or versions change it is broken, and what changed is written there. Filled and hollow marks
alternate with the commit.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, nan
from textwrap import wrap
from typing import TYPE_CHECKING

from configs.common.printable import plural, shortened
from reports.plots.style import COLOURS, IDEAL, crosses
from reports.reading.run_figures import CellFigures, FigureKind
from reports.runs.history import KeptRun
from reports.text import joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 20
WIDE_LABELS = 8
_LETTERS = "abcdefghijkl"
CODE_FACTS = ("commit", "dirty")
"""Facts of an environment that are of the code: marks show their change, no line."""


def draw_history(figure: "Figure", runs: Sequence[KeptRun], key: str, kind: FigureKind) -> None:
    """Median and interval (range where there is none) of a figure in each run, a cross where it has none."""
    axes = figure.subplots()
    cells = [run.figures.cells[key] for run in runs]
    changes = _changes([_facts(run, key) for run in runs])
    breaks = sorted(changes)
    for first, last in pairwise([0, *breaks, len(runs)]):
        _stretch(axes, runs, cells, range(first, last), kind)
    _mark_changes(axes, changes)
    lost = [
        (float(place), "no figure" if cell.completed else cell.status)
        for place, cell in enumerate(cells)
        if cell.estimate(kind.name) is None
    ]
    crosses(axes, lost)
    _label_runs(axes, runs)
    axes.set_xlim(-0.6, len(runs) - 0.4)
    axes.margins(y=0.15)
    axes.set_ylabel(f"{kind.title}, {cells[-1].unit_of(kind)}")
    if len(lost) == len(runs):
        axes.set_yticks([])
    axes.set_xlabel("\n".join(_legend(runs, changes)))
    axes.set_title(shortened(cells[-1].title, 90), pad=16 if breaks else 6)


def history_height(count: int) -> float:
    """Inches that so many runs need: labels of many stand upright."""
    return 3.4 if count <= WIDE_LABELS else 4.4


def _facts(run: KeptRun, key: str) -> dict[str, set[str]]:
    """The environment that a cell was measured in, without what is of the code."""
    names = {name for flat in run.figures.environments.values() for name in flat or ()}
    return run.figures.facts(sorted(names - set(CODE_FACTS)), [key])


def _stretch(
    axes: "Axes", runs: Sequence[KeptRun], cells: Sequence[CellFigures], places: range, kind: FigureKind
) -> None:
    """The runs of one environment: bars, a line, and marks that are filled or hollow by commit."""
    found = [(place, cells[place].estimate(kind.name)) for place in places]
    values = {place: value.scaled(kind.scale) for place, value in found if value is not None}
    if not values:
        return
    # A run without a figure breaks the line: nobody knows what lay there.
    middles, below, above = [], [], []
    for place in places:
        value = values.get(place)
        middles.append(value.median if value else nan)
        below.append(value.median - value.bounds[0] if value else nan)
        above.append(value.bounds[1] - value.median if value else nan)
    axes.errorbar(list(places), middles, yerr=[below, above], capsize=3, linewidth=1.2, color=COLOURS[0], fmt="-")
    for place, value in values.items():
        face = "white" if _commits_before(runs, place) % 2 else COLOURS[0]
        axes.plot([place], [value.median], "o", markersize=6, color=COLOURS[0], markerfacecolor=face, zorder=3)


def _commits_before(runs: Sequence[KeptRun], place: int) -> int:
    """How often the commit changed up to a run, as far as commits are known."""
    commits = [run.figures.commit for run in runs[: place + 1] if run.figures.commit]
    return sum(one != two for one, two in pairwise(commits))


def _changes(facts: Sequence[dict[str, set[str]]]) -> dict[int, str]:
    """Place of a run -> what its environment differs in from the last one that is known."""
    changes, known = {}, facts[0]
    for place, now in enumerate(facts[1:], 1):
        if any(now.values()):
            changed = [name for name in sorted({*known, *now}) if known.get(name, set()) != now.get(name, set())]
            if changed and any(known.values()):
                more = [f"{len(changed) - 2} more"] if len(changed) > 2 else []
                changes[place] = joined([*changed[:2], *more])
            known = now
    return changes


def _mark_changes(axes: "Axes", changes: dict[int, str]) -> None:
    """A dashed line where the environment changes, with what changed above it; a letter where there are more."""
    for place in changes:
        axes.axvline(place - 0.5, color=IDEAL, linestyle="--", linewidth=1)
    for letter, (place, what) in zip(_LETTERS, _lettered(changes), strict=False):
        axes.annotate(
            shortened(what, 60) if len(changes) == 1 else letter,
            (place - 0.5, 1.0),
            (0, 3),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            color="#444444",
        )


def _lettered(changes: dict[int, str]) -> list[tuple[int, str]]:
    """Those that are told: on a cluster each run may be of another host, and the text would leave no room to draw."""
    return list(changes.items())[-len(_LETTERS) :]


def _legend(runs: Sequence[KeptRun], changes: dict[int, str]) -> list[str]:
    """What the axis and the marks mean."""
    text = "run, in the order of measuring (day, commit, name); bars: 95 % interval, range below 6 repeats"
    lines = [text]
    if _commits_before(runs, len(runs) - 1):
        lines.append("filled and hollow marks alternate with the commit")
    if len(changes) > 1:
        told = _lettered(changes)
        said = "; ".join(f"{letter}: {what}" for letter, (_, what) in zip(_LETTERS, told, strict=False))
        earlier = len(changes) - len(told)
        said += f"; {plural(earlier, 'earlier change')} without a letter" if earlier else ""
        lines += wrap(f"the environment changed in {said}", 95)
    return lines


def _label_runs(axes: "Axes", runs: Sequence[KeptRun]) -> None:
    """Day, commit and names below a run; of many, below evenly spaced ones."""
    step = ceil(len(runs) / MOST_LABELS)
    places = list(range(0, len(runs), step))
    if len(runs) <= WIDE_LABELS:
        axes.set_xticks(places, ["\n".join(_label(runs[place])) for place in places])
    else:
        labels = [" ".join(_label(runs[place])) for place in places]
        axes.set_xticks(places, labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=7.5)
    axes.grid(visible=False, axis="x")


def _label(run: KeptRun) -> list[str]:
    day = (run.figures.started_at or "")[:10]
    commit = run.figures.commit or ""
    short = commit[:7] + ("+" if commit.endswith("+") else "")
    return [text for text in (day, short, shortened(", ".join(run.names), 16)) if text]
