"""What a handful of repeats can say: medians with intervals, ratios with intervals, corrected comparisons.

    value = estimate([412.0, 405.1, 418.3, 410.0, 411.2, 409.9])    # median, range and, from six on, interval
    ratio = paired_ratio(variant, baseline)                          # by repeat: blocks are compared within
    ratio = unpaired_ratio(today, yesterday)                         # two runs, whose repeats share no block

The sampling unit is the repeat: one visit in one launch. Nothing here supposes a normal distribution:
intervals come from the order of the values alone, and are None where there are too few of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
LEAST_REPEATS = 6
"""Fewer values hold no 95 % interval of their median: five span it with 93.75 % only (binomial, p = 1/2)."""

Bounds = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A median over so many repeats, their range, and where they are enough an interval of the median."""

    median: float
    low: float
    high: float
    count: int
    interval: Bounds | None = None

    @property
    def bounds(self) -> Bounds:
        """The interval, else the range: what a plot draws as a bar."""
        return self.interval or (self.low, self.high)

    def scaled(self, factor: float) -> "Estimate":
        """The same in another unit; the factor is above 0."""
        interval = None if self.interval is None else (self.interval[0] * factor, self.interval[1] * factor)
        return Estimate(self.median * factor, self.low * factor, self.high * factor, self.count, interval)


@dataclass(frozen=True)
class Ratio:
    """How many times the second is the first. `low` to `high` is the range of pairs where there are pairs.

    `interval` is simultaneous over the `comparisons` made in one table (Bonferroni), None where the
    repeats are too few for that.
    """

    value: float
    low: float
    high: float
    count: int
    interval: Bounds | None
    comparisons: int = 1

    @property
    def bounds(self) -> Bounds:
        """The interval, else the range."""
        return self.interval or (self.low, self.high)

    @property
    def differs(self) -> bool | None:
        """Whether the interval leaves out 1; None where there is no interval."""
        return None if self.interval is None else not self.interval[0] <= 1 <= self.interval[1]


def estimate(values: Iterable[float | None], confidence: float = CONFIDENCE) -> Estimate | None:
    """Median, range and interval of the values that are known; None where none is."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Estimate(float(np.median(known)), known[0], known[-1], len(known), median_interval(known, confidence))


def median_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> Bounds | None:
    """Interval of the median of whatever distribution the values come from; None below LEAST_REPEATS.

    Between the two pairs of order statistics whose coverage lies around the one asked for, interpolated
    as in T. P. Hettmansperger and S. J. Sheather, "Confidence intervals based on interpolated order
    statistics", Statistics & Probability Letters 4 (1986) 75-79.
    """
    ordered = np.sort(np.fromiter(values, dtype=np.float64))
    weights = _order_weights(len(ordered), confidence)
    if weights is None:
        return None
    depth, share = weights
    low = (1 - share) * ordered[depth - 1] + share * ordered[depth]
    high = (1 - share) * ordered[-depth] + share * ordered[-depth - 1]
    return float(low), float(high)


@lru_cache(maxsize=4096)
def _order_weights(count: int, confidence: float) -> tuple[int, float] | None:
    """(depth k counted from 1, share of the next inner order statistic); None where even the range is too little."""
    from scipy.stats import binom

    def coverage(depth: int) -> float:
        return float(1 - 2 * binom.cdf(depth - 1, count, 0.5))

    if count < LEAST_REPEATS or coverage(1) < confidence:
        return None
    depth = 1
    while coverage(depth + 1) >= confidence:
        depth += 1
    outer, inner = coverage(depth), coverage(depth + 1)
    excess = (outer - confidence) / (outer - inner)
    share = (count - depth) * excess / (depth + (count - 2 * depth) * excess)
    return depth, share


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float], comparisons: int = 1) -> Ratio | None:
    """first / second in each block that has both, by repeat; None where no block has both.

    The value is the median of the pairs' ratios.
    """
    ratios = sorted(pair_ratios(first, second).values())
    if not ratios:
        return None
    interval = median_interval(np.log(ratios), 1 - (1 - CONFIDENCE) / comparisons)
    bounds = None if interval is None else (float(np.exp(interval[0])), float(np.exp(interval[1])))
    return Ratio(float(np.median(ratios)), ratios[0], ratios[-1], len(ratios), bounds, comparisons)


def pair_ratios(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """first / second for each repeat that both have, by repeat."""
    return {repeat: first[repeat] / second[repeat] for repeat in sorted(first) if second.get(repeat)}
