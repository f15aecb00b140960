"""Statistics of few repeats: medians and ratios with intervals, and corrected comparisons.

    value = estimate([412.0, 405.1, 418.3, 410.0, 411.2, 409.9])    # median, range and, from six on, interval
    ratio = paired_ratio(variant, baseline)                          # by repeat: blocks are compared within
    ratio = unpaired_ratio(today, yesterday)                         # two runs, whose repeats share no block

The sampling unit is the repeat: one measurement in one launch. Nothing here supposes a normal distribution:
intervals come from the order of the values alone, and are None where there are too few of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, log2, sqrt

import numpy as np

from configs.common.arrays import Floats
from reports.numbers.inversion import differences, inverted, rank_sum

CONFIDENCE = 0.95
LEAST_REPEATS = 6
"""Fewer values hold no 95 % interval of their median: five span it with 93.75 % only (binomial, p = 1/2)."""

ROUNDING = 1e-9
"""Ratios nearer to 1 than this are 1: figures without any noise differ by what rounding leaves of equal work."""

TAIL_SAMPLES = 10
"""A percentile is marked where fewer samples than these lie beyond it: their number then varies by over 30 %."""

Bounds = tuple[float, float]


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
    """How many times the second is the first. `low` to `high` is the range of the pairs' ratios.

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
        return None if self.interval is None else self.is_above(1) or self.interval[1] < 1 - ROUNDING

    def is_above(self, value: float) -> bool:
        """Whether the interval, or the range of repeats too few for one, lies above a value, by more than rounding."""
        return self.bounds[0] > value * (1 + ROUNDING)


def estimate(values: Iterable[float | None], confidence: float = CONFIDENCE) -> Estimate | None:
    """Median, range and interval of the values that are known; None where none is."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    middle = len(known) // 2
    median = known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2
    return Estimate(float(median), known[0], known[-1], len(known), _ordered_interval(known, confidence))


def _ordered_interval(ordered: Sequence[float], confidence: float) -> Bounds | None:
    """`median_intervals` of one short sorted sample, to the same bits and in a tenth of the time."""
    weights = order_weights(len(ordered), confidence)
    if weights is None:
        return None
    depth, share = weights
    lowest, highest = ordered[depth - 1], ordered[-depth]
    low, high = lowest + share * (ordered[depth] - lowest), highest + share * (ordered[-depth - 1] - highest)
    return float(low), float(high)


def median_interval(values: Iterable[float], confidence: float = CONFIDENCE) -> Bounds | None:
    """Interval of the median of whatever distribution the values come from; None below LEAST_REPEATS."""
    found = median_intervals(np.fromiter(values, dtype=np.float64), confidence)
    return None if found is None else (float(found[0]), float(found[1]))


def median_intervals(samples: Floats, confidence: float = CONFIDENCE) -> tuple[Floats, Floats] | None:
    """The same for many samples at once: lower and upper ends along the last axis.

    An end lies between the two order statistics whose coverage is just above and just below the one
    asked for, interpolated as in T. P. Hettmansperger and S. J. Sheather, "Confidence intervals based on
    interpolated order statistics", Statistics & Probability Letters 4 (1986) 75-79.
    """
    weights = order_weights(samples.shape[-1], confidence)
    if weights is None:
        return None
    depth, share = weights
    ordered = np.sort(samples, axis=-1)
    lowest, highest = ordered[..., depth - 1], ordered[..., -depth]
    low = lowest + share * (ordered[..., depth] - lowest)
    high = highest + share * (ordered[..., -depth - 1] - highest)
    return low, high


@lru_cache(maxsize=4096)
def order_weights(count: int, confidence: float) -> tuple[int, float] | None:
    """Depth of the outer order statistic, counted from 1, and the share of the next inner one, for a median's interval.

    None below LEAST_REPEATS, and where even least and most hold too little confidence.
    """
    assert 0.5 <= confidence < 1, confidence
    from scipy.special import bdtr

    # Of the order statistics of each depth from 1: the median is above so many or more of the values.
    coverage = 1 - 2 * bdtr(np.arange(count // 2), count, 0.5)
    depth = int((coverage >= confidence).sum())
    if count < LEAST_REPEATS or depth == 0:
        return None
    outer, inner = float(coverage[depth - 1]), float(coverage[depth])
    excess = (outer - confidence) / (outer - inner)
    share = (count - depth) * excess / (depth + (count - 2 * depth) * excess)
    return depth, share


def paired_ratio(
    first: Mapping[int, float], second: Mapping[int, float], comparisons: int = 1, confidence: float = CONFIDENCE
) -> Ratio | None:
    """first / second in each block that has both, by repeat; None where no block has both.

    Value and interval are those of the median of the pairs' ratios, of logarithms (`median_interval`),
    which supposes nothing of the noise, not even that both cells have the same. The signed-rank test's
    interval is shorter where the noise is normal, but wrong where two cells' noise is skewed differently
    (docs/measurements/statistics.md).
    """
    ratios = sorted(pair_ratios(first, second).values())
    if not ratios:
        return None
    found = median_interval(np.log(ratios), corrected(confidence, comparisons))
    # Of two in the middle the geometric mean: with the arithmetic one, a ratio and its inverse may both exceed 1.
    low, high = ratios[(len(ratios) - 1) // 2], ratios[len(ratios) // 2]
    value = min(max(sqrt(low) * sqrt(high), low), high)
    # Without noise exp(log(x)) is not quite x, and the interval would leave the value out.
    bounds = None if found is None else (min(value, exp(found[0])), max(value, exp(found[1])))
    return Ratio(value, ratios[0], ratios[-1], len(ratios), bounds, comparisons)


def unpaired_ratio(
    first: Sequence[float], second: Sequence[float], comparisons: int = 1, confidence: float = CONFIDENCE
) -> Ratio | None:
    """first / second where the repeats share no block, as in two separate runs; None where one has no values.

    Value (Hodges-Lehmann) and interval come from the differences of all logs, the interval by inversion
    of the Mann-Whitney test (`reports.numbers.inversion`). That test supposes noise of one shape in both; with
    three times the noise in one run it errs in 8 % instead of 5. What else differs between two runs (day,
    machine, neighbours) is in the ratio and not in its interval.
    `count` is that of the smaller sample, `low` and `high` are the extremes of any two values.
    """
    upper, lower = (np.array([value for value in values if value > 0], dtype=np.float64) for values in (first, second))
    if not len(upper) or not len(lower):
        return None
    extremes = float(upper.min() / lower.max()), float(upper.max() / lower.min())
    logs = differences(np.log(upper), np.log(lower))
    count, value = min(len(upper), len(lower)), exp(float(np.median(logs)))
    bounds = None
    if count >= LEAST_REPEATS:
        found = inverted(logs, rank_sum(len(upper), len(lower)), corrected(confidence, comparisons))
        bounds = None if found is None else (min(value, exp(found[0])), max(value, exp(found[1])))
    return Ratio(value, *extremes, count, bounds, comparisons)


def ties(best: Mapping[int, float], others: Sequence[Mapping[int, float]], confidence: float = CONFIDENCE) -> list[int]:
    """Indices of those that the one with the highest median is not told apart from, in blocks that both have.

    The whole interval of a ratio, or the range of repeats too few for one, has to be above 1. One that shares no block
    with the best is in none of them.
    """
    ratios = [paired_ratio(best, other, len(others), confidence) for other in others]
    return [index for index, ratio in enumerate(ratios) if ratio is not None and not ratio.is_above(1)]


def corrected(confidence: float, comparisons: int) -> float:
    """Of each of so many intervals, for all of them to hold at once with the given confidence (Bonferroni)."""
    return 1 - (1 - confidence) / comparisons


def pair_ratios(first: Mapping[int, float], second: Mapping[int, float]) -> dict[int, float]:
    """first / second for each repeat in which both are above 0, by repeat."""
    return {
        repeat: first[repeat] / second[repeat]
        for repeat in sorted(first)
        if first[repeat] > 0 and second.get(repeat, 0) > 0
    }


def min_repeats(comparisons: int = 1, confidence: float = CONFIDENCE) -> int:
    """The fewest repeats that give each of so many comparisons in one table an interval.

    Least and most of so many pairs hold the median with confidence 1 - 2 / 2^repeats; that must be 1 - (1 - confidence)
    / comparisons or more.
    """
    return max(LEAST_REPEATS, ceil(1 + log2(comparisons / (1 - confidence)) - 1e-9))


@dataclass(frozen=True)
class Percentile:
    """A percentile with the number of samples behind it; `marked` where they are too few to trust it."""

    value: float
    quantile: float
    samples: int

    @property
    def marked(self) -> bool:
        """Fewer than TAIL_SAMPLES samples beyond the percentile: P99 from fewer than 1,000, P50 from fewer than 20."""
        tail = min(self.quantile, 1 - self.quantile)
        return self.samples * tail < TAIL_SAMPLES - 1e-6
