"""Drift of the machine between blocks and noise between repeats during a study.

    drift([cell.values("throughput") for cell in cells])     # does it get slower or faster over the study?
    noise([cell.values("throughput") for cell in cells])     # how much do two repeats of the same thing differ?

Each mapping is one cell's throughput (or another positive figure) by repeat; a repeat's number is that of
its block, so repeats with the same number were measured near each other in time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

import numpy as np

from configs.common.arrays import Floats
from reports.numbers.inversion import concordance, inverted, p_value, slopes
from reports.numbers.statistics import CONFIDENCE, LEAST_REPEATS, Bounds, corrected, order_weights

POWER = 0.95
MAD_TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation, over its median distance from the middle: 1 / 0.6745."""


@dataclass(frozen=True)
class Drift:
    """How a study's figures changed from its first block to its last, as a share: -0.02 is 2 % lower at the end.

    `p_value` is of Kendall's test of block against figure. `drifts` is None where the blocks are too few to tell.
    """

    change: float
    blocks: int
    cells: int
    interval: Bounds | None
    p_value: float | None

    @property
    def drifts(self) -> bool | None:
        """Whether the change is more than chance, at 95 % confidence."""
        return None if self.interval is None else not self.interval[0] <= 0 <= self.interval[1]


def drift(series: Iterable[Mapping[int, float]]) -> Drift | None:
    """The trend over the blocks that more than half the cells have; None where no cell was measured in two of them.

    Of the logarithms, each cell's own level is taken away, and a block's figure is their median over its
    cells, so that one stray cell does not move it. The change is the median of the slopes between all
    blocks (P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", J. American
    Statistical Association 63 (1968) 1379-1389), times the blocks from first to last; interval and
    p-value are of Kendall's test, exact.
    """
    cells = _logs(series)
    measured = Counter(block for values in cells for block in values)
    shared = {block for block, count in measured.items() if 2 * count > len(cells)}
    cells = [rest for values in cells if len(rest := {block: values[block] for block in values if block in shared}) > 1]
    if not cells:
        return None
    blocks = np.array(sorted(shared), dtype=np.float64)
    figures = _block_figures(cells, sorted(shared))
    trends = slopes(blocks, figures) * (blocks[-1] - blocks[0])
    change = exp(float(np.median(trends))) - 1
    if len(blocks) < LEAST_REPEATS:
        return Drift(change, len(blocks), len(cells), None, None)
    null = concordance(len(blocks))
    bounds = inverted(trends, null, CONFIDENCE, interpolated=False)
    changes = None if bounds is None else (exp(bounds[0]) - 1, exp(bounds[1]) - 1)
    return Drift(change, len(blocks), len(cells), changes, p_value(trends, null))


def _block_figures(cells: Sequence[Mapping[int, float]], blocks: Sequence[int]) -> Floats:
    """What all cells have in common in each block: the median of what is above or below each cell's level.

    Levels are those of the least-squares fit of level plus block. A cell's own mean would not do: that of
    a cell measured in the early blocks only has less of a drift in it than others'.
    """
    table = np.array([[values.get(block, np.nan) for block in blocks] for values in cells])
    known = ~np.isnan(table)
    shares = known / known.sum(axis=1, keepdims=True)
    above = np.where(known, table - np.nanmean(table, axis=1, keepdims=True), 0)
    normal = np.diag(known.sum(axis=0)) - shares.T @ known
    effects = np.linalg.lstsq(normal, above.sum(axis=0))[0]
    levels = np.nanmean(table - effects, axis=1, keepdims=True)
    return np.asarray(np.nanmedian(table - levels, axis=0))


@dataclass(frozen=True)
class RepeatNoise:
    """How much two repeats of the same cell differ, from launches that follow each other: an A/A comparison.

    `typical` is the median difference as a share; `deviation` the robust standard deviation of the
    logarithm of one repeat over the other (1.4 times that of a single repeat).
    """

    typical: float
    deviation: float
    pairs: int

    def smallest_change(self, repeats: int, comparisons: int = 1) -> float | None:
        """The least true rise, as a share, that `paired_ratio` of so many repeats finds in 95 % of cases.

        None where so few repeats give no interval. A change by d is found by the order statistic of
        depth k of n pairs where fewer than k of them fall, each with chance Phi(-d / deviation): a
        binomial's tail, solved for d. Supposes normal noise; between two depths it is interpolated like
        the interval.
        """
        from scipy.special import betaincinv, ndtri

        weights = order_weights(repeats, corrected(CONFIDENCE, comparisons))
        if weights is None:
            return None
        depth, share = weights
        outer, inner = (float(-ndtri(betaincinv(k, repeats - k + 1, 1 - POWER))) for k in (depth, depth + 1))
        return exp(self.deviation * ((1 - share) * outer + share * inner)) - 1


def noise(series: Iterable[Mapping[int, float]]) -> RepeatNoise | None:
    """From all pairs of consecutive repeats of each cell; None where there is no pair."""
    distances = [
        abs(values[block + 1] - values[block]) for values in _logs(series) for block in values if block + 1 in values
    ]
    if not distances:
        return None
    middle = median(distances)
    return RepeatNoise(exp(middle) - 1, MAD_TO_DEVIATION * middle, len(distances))


def _logs(series: Iterable[Mapping[int, float]]) -> list[dict[int, float]]:
    """Of the cells with at least two figures above 0; one repeat says nothing about time."""
    known = [{block: log(value) for block, value in values.items() if value > 0} for values in series]
    return [values for values in known if len(values) > 1]
