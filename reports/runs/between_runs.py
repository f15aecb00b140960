"""How far two runs of the same code lie apart, seen from runs that are in the history: A against A.

    noise = between_runs(history.runs())           # figure -> BetweenRuns, where there are enough runs
    noise["throughput"].margin                     # 1.03: two runs of the same code differ by up to 3 %

Repeats of one run share the day, the machine's neighbours, its temperature and where its memory lies. What
these do to all repeats alike is invisible to their interval, which therefore says "different" of two runs of
the same code more often than 1 time in 20 wherever such shifts exist. Only runs of the same code at
different times show them.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt

import numpy as np

from reports.numbers.statistics import CONFIDENCE
from reports.reading.run_figures import FIGURE_KINDS, RunFigures

LEAST_RUNS = 3
"""Two runs give one degree of freedom, whose 95 % quantile (12.7) makes any bound meaningless."""


@dataclass(frozen=True)
class BetweenRuns:
    """`margin`: with 95 % confidence two runs of the same code differ by no more than this factor, above 1."""

    margin: float
    runs: int
    cells: int


def between_runs(runs: Sequence[RunFigures], keys: frozenset[str]) -> dict[str, BetweenRuns]:
    """The noise between runs by figure, over the named cells; a figure with too few runs is left out."""
    found = {}
    for kind in FIGURE_KINDS:
        noise = _noise(_groups(runs, keys, kind.name))
        if noise is not None:
            found[kind.name] = noise
    return found


def _groups(runs: Sequence[RunFigures], keys: frozenset[str], figure: str) -> list[dict[int, float]]:
    """Logs of the medians of runs that measured one cell in one environment, by place of the run in `runs`."""
    groups: dict[tuple[str, tuple[str, ...]], dict[int, float]] = defaultdict(dict)
    for place, run in enumerate(runs):
        if run.commit is None or run.commit.endswith("+"):
            continue  # code that was changed since its commit, or is unknown, may be any code
        for key in keys & run.cells.keys():
            cell = run.cells[key]
            value = cell.estimate(figure)
            if value is not None and value.median > 0:
                groups[key, cell.environments][place] = float(np.log(value.median))
    return [group for group in groups.values() if len(group) > 1]


def _noise(groups: list[dict[int, float]]) -> BetweenRuns | None:
    """Pooled over cells. A shift hits all cells of a run together, so runs, not cells, are what is counted."""
    freedom = _degrees_of_freedom(groups)
    if freedom < LEAST_RUNS - 1:
        return None
    from scipy.stats import t

    logs = [np.fromiter(group.values(), dtype=np.float64) for group in groups]
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in logs)
    deviation = sqrt(squares / sum(len(values) - 1 for values in logs))
    quantile = float(t.ppf(1 - (1 - CONFIDENCE) / 2, freedom))
    runs = {place for group in groups for place in group}
    return BetweenRuns(exp(quantile * deviation * sqrt(2)), len(runs), len(groups))


def _degrees_of_freedom(groups: Sequence[Mapping[int, float]]) -> int:
    """Runs less sets of runs that share no cell with another set."""
    sets: list[set[int]] = []
    for group in groups:
        linked = [others for others in sets if others & group.keys()]
        sets = [others for others in sets if others not in linked] + [set(group).union(*linked)]
    return sum(len(runs) - 1 for runs in sets)
