"""Distribution-free intervals by inversion of a counting test.

    low, high = inverted(differences(first, second), rank_sum(len(first), len(second)), 0.95)

Each of these tests counts how many of its candidates (differences of values, slopes between points) lie
below the true one; the distribution of that count is known exactly, whatever the data's distribution.
The true values that the test would not reject lie between two of the sorted candidates: the interval.
Source: M. Hollander, D. A. Wolfe and E. Chicken, "Nonparametric Statistical Methods", 3rd ed. (Wiley
2014), sections 4.3 (difference) and 9.3 (slope).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from configs.common.arrays import Floats

EXACT_CANDIDATES = 10_000
"""Up to here the count's exact distribution is used, beyond its normal limit (100 values against 100, 141 points)."""


class Null(NamedTuple):
    """Distribution of the count of candidates below the true value.

    `cumulative[k]` is the probability of k or fewer; it need only reach up to the middle.
    """

    candidates: int
    cumulative: Floats


def inverted(
    candidates: Floats, null: Null, confidence: float, interpolated: bool = True
) -> tuple[float, float] | None:
    """The true values that the test does not reject; None where even all candidates hold too little confidence.

    Interpolated linearly between the two pairs of candidates whose confidence lies around the one asked
    for. Not interpolated, it is the outer pair, and leaves a value out just where the test's `p_value`
    of it is at most 1 - confidence.
    """
    assert len(candidates) == null.candidates
    tail = (1 - confidence) / 2
    depth = int(np.searchsorted(null.cumulative, tail * (1 + 1e-9), side="right"))
    if depth == 0:
        return None
    outer, inner = null.cumulative[depth - 1], null.cumulative[depth]
    share = (tail - outer) / (inner - outer) if interpolated else 0.0
    ordered = np.sort(candidates)
    lowest, highest = ordered[depth - 1], ordered[-depth]
    low = lowest + share * (ordered[depth] - lowest)
    high = highest + share * (ordered[-depth - 1] - highest)
    return float(low), float(high)


def p_value(candidates: Floats, null: Null) -> float:
    """Of the test that the true difference or slope is 0, two-sided; a candidate of just 0 speaks for it."""
    count = min(int(np.count_nonzero(candidates <= 0)), int(np.count_nonzero(candidates >= 0)))
    return float(min(1.0, 2 * null.cumulative[min(count, len(null.cumulative) - 1)]))


def differences(first: Floats, second: Floats) -> Floats:
    """Every value of the first less every value of the second, unordered."""
    return np.subtract.outer(first, second).ravel()


def slopes(positions: Floats, values: Floats) -> Floats:
    """The slope between every two points; the positions differ from each other."""
    first, second = np.triu_indices(len(values), 1)
    return np.asarray((values[second] - values[first]) / (positions[second] - positions[first]))


@lru_cache(maxsize=256)
def rank_sum(first: int, second: int) -> Null:
    """Differences of two samples below the shift between their distributions: the Mann-Whitney statistic."""
    candidates = first * second
    if candidates > EXACT_CANDIDATES:
        return _normal(candidates, candidates * (first + second + 1) / 12)
    # The largest of all values is of the first sample with chance m / (m + n), and is then above all n of the second.
    row = [np.ones(1)] * (second + 1)
    for m in range(1, first + 1):
        above = row
        row = [np.ones(1)]
        for n in range(1, second + 1):
            both = m * np.pad(above[n], (n, 0)) + n * np.pad(row[n - 1], (0, m))
            row.append(both / (m + n))
    return Null(candidates, np.cumsum(row[second]))


@lru_cache(maxsize=256)
def concordance(count: int) -> Null:
    """Slopes between points below the true slope: Kendall's statistic (inversions of a random order)."""
    candidates = count * (count - 1) // 2
    if candidates > EXACT_CANDIDATES:
        return _normal(candidates, count * (count - 1) * (2 * count + 5) / 72)
    chances = np.ones(1)
    for size in range(2, count + 1):
        chances = np.convolve(chances, np.full(size, 1 / size))
    return Null(candidates, np.cumsum(chances))


def _normal(candidates: int, variance: float) -> Null:
    """The limit for many candidates, corrected for continuity."""
    from scipy.special import ndtr

    counts = np.arange(candidates // 2 + 1)
    return Null(candidates, ndtr((counts + 0.5 - candidates / 2) / np.sqrt(variance)))
