"""Noise between runs of the same code (A/A comparison), estimated from the history.

    noise = between_runs(history.runs(), keys)     # figure -> BetweenRuns, where there are enough runs
    noise["throughput"].margin                     # 1.03: two runs of the same code differ by up to 3 %

Repeats of one run share the day, the machine's neighbours, its temperature and where its memory lies. What
these do to all repeats alike is invisible to their interval, which therefore says "different" of two runs of
the same code more often than 1 time in 20 wherever such shifts exist. Only runs of the same code at
different times show them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING

import numpy as np

from reports.numbers.statistics import CONFIDENCE
from reports.reading.run_figures import FIGURE_KINDS, RunFigures

if TYPE_CHECKING:
    import pandas as pd

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
        noise = _noise(_medians(runs, keys, kind.name))
        if noise is not None:
            found[kind.name] = noise
    return found


def _medians(runs: Sequence[RunFigures], keys: frozenset[str], figure: str) -> "pd.DataFrame":
    """Logs of the medians of each cell in one environment and on one device that several runs measured; `run` is the
    place in `runs`."""
    import pandas as pd

    rows = []
    for place, run in enumerate(runs):
        if run.commit is None or run.commit.endswith("+"):
            continue  # code that was changed since its commit, or is unknown, may be any code
        for key in keys & run.cells.keys():
            cell = run.cells[key]
            value = cell.estimate(figure)
            if value is not None and value.median > 0:
                # The environment of a script names no device: its records do.
                devices = tuple(sorted(run.facts(("device",), [key])["device"]))
                rows.append((place, (key, cell.environments, devices), float(np.log(value.median))))
    frame = pd.DataFrame(rows, columns=["run", "cell", "log"])
    return frame[frame.groupby("cell")["run"].transform("size") > 1]


def _noise(medians: "pd.DataFrame") -> BetweenRuns | None:
    """Pooled over cells. A shift hits all cells of a run together, so runs, not cells, are what is counted."""
    cells = medians.groupby("cell")
    freedom = _degrees_of_freedom(set(runs) for _, runs in cells["run"])
    if freedom < LEAST_RUNS - 1:
        return None
    from scipy.special import stdtrit

    squares = float(((medians["log"] - cells["log"].transform("mean")) ** 2).sum())
    deviation = sqrt(squares / (len(medians) - cells.ngroups))
    quantile = float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / 2))
    return BetweenRuns(exp(quantile * deviation * sqrt(2)), medians["run"].nunique(), cells.ngroups)


def _degrees_of_freedom(groups: Iterable[set[int]]) -> int:
    """Runs less sets of runs that share no cell with another set."""
    sets: list[set[int]] = []
    for group in groups:
        linked = [others for others in sets if others & group]
        sets = [others for others in sets if others not in linked] + [group.union(*linked)]
    return sum(len(runs) - 1 for runs in sets)
