"""Detection of steady state: the end of the start-up passes of a measurement.

    found = steady(walls)        # wall seconds of each pass, in order
    walls[found.first :]         # the steady part, where found.found is True

Two steps. First the start is cut where that makes the mean of the rest surest: the marginal standard error
rule (MSER), K. P. White, "An effective truncation heuristic for bias reduction in simulation output",
Simulation 69 (1997) 323-334; single passes far off the others are drawn in before, so that one slow pass
late in a measurement cuts nothing. Then the rest is tested, in blocks of a few passes: for a trend (Mann-Kendall, its
variance corrected for autocorrelation as in K. H. Hamed and A. R. Rao, "A modified Mann-Kendall trend test
for autocorrelated data", Journal of Hydrology 204 (1998) 182-196) and for a change of level (A. N. Pettitt,
"A non-parametric approach to the change-point problem", Applied Statistics 28 (1979) 126-135, held against
the same correction). It is not steady where one of them is sure and the change is worth a mention.

That no steady state is found is a result: the rates are then over all passes and marked.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import exp, sqrt

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats
from configs.common.printable import plural
from configs.records.rates import SORTED_AT_ONCE

LEAST_PASSES = 20
"""In fewer, neither a trend nor a start can be told from noise."""

LARGEST_CUT = 0.5
"""A steady part that is less than half of a measurement is none: it may be the next start-up as well."""

LEAST_CHANGE = 0.01
"""A drift or step of less than this share of the level is steady: its effect on the mean is half of it."""

TREND_Z = 2.576
CHANGE_LEVEL = 0.01
"""Each of both tests errs in one of a hundred steady measurements: |z| of the one, probability of the other."""

_BLOCKS = 64
_CLIP_DEVIATIONS = 5.0
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_ACF_Z = 1.96
_SCREEN_Z = 1.9
_DRIFT_OVER_STEP = 1.25
_TRIES = 3  # a start that the cut leaves a rest of is cut again at the likeliest change of level


@dataclass(frozen=True, slots=True)
class Steady:
    """Where a series is steady. `found` is None where it is too short to tell.

    `first` and `count` are the part that rates are taken over: the steady one, else all of it.
    """

    found: bool | None
    first: int
    count: int
    reason: str


def steady(series: Floats, noun: str = "pass", each: int = 1) -> Steady:
    """Find the steady part of a series of durations, in order of time. About 60 microseconds for 512.

    noun, each: what a reader counts, and how many of them a value stands for.
    """
    count = len(series)
    if count < LEAST_PASSES:
        return Steady(None, 0, count, f"{plural(count, 'pass')}, at least {LEAST_PASSES} are needed to tell")
    if not np.isfinite(series).all():
        return Steady(False, 0, count, "a time is no number")
    drawn_in, level = _drawn_in(series)
    level = level or float(series.mean())  # more than half are 0: read with a clock of whole seconds, for one
    first, reason = _start(drawn_in), ""
    for _ in range(_TRIES):
        found = _unsteady(drawn_in[first:], level)
        if found is None:
            return Steady(True, first, count - first, f"after {first} passes" if first else "from the first pass")
        reason = reason or found.reason(first, noun, each)
        first += found.place
        if first > count * LARGEST_CUT:
            break
    return Steady(False, 0, count, reason)


def _drawn_in(series: Floats) -> tuple[Floats, float]:
    """The series with far values drawn in to a few deviations from the median, and the median."""
    level = _middle(series)
    distance = _middle(np.abs(series - level))
    if distance == 0:  # more than half are the same value: nothing tells what is far
        return series, level
    reach = _CLIP_DEVIATIONS * _MAD_TO_DEVIATION * distance
    return np.minimum(np.maximum(series, level - reach), level + reach), level


def _middle(values: Floats) -> float:
    middle = len(values) // 2
    placed = np.sort(values) if len(values) <= SORTED_AT_ONCE else np.partition(values, middle)
    return float(placed[middle])


def _start(series: Floats) -> int:
    """How many values to leave out so that the squared standard error of the mean of the rest is least."""
    count = len(series)
    most = int(count * LARGEST_CUT)
    backwards = (series - series[-1])[::-1]  # differences of like values: no cancellation in the squares
    sizes = np.arange(1.0, count + 1.0)
    sums, squares = backwards.cumsum(), (backwards * backwards).cumsum()
    errors = ((squares - sums * sums / sizes) / (sizes * sizes))[count - most - 1 :]
    return int(errors[::-1].argmin())


def _block_means(series: Floats) -> Floats:
    """At most `_BLOCKS` means of equally many values; the first few that fill no block are left out."""
    size = -(-len(series) // _BLOCKS)
    blocks = len(series) // size
    means: Floats = series[len(series) - blocks * size :].reshape(blocks, size).mean(axis=1)
    return means


@dataclass(frozen=True, slots=True)
class _Change:
    """What makes a series not steady, as shares of its level.

    drift: last against first quarter; step: after against before the likeliest change of level; place: how many
    values lie before that.
    """

    drift: float
    step: float
    place: int

    def reason(self, first: int, noun: str, each: int) -> str:
        """What it looks like more: a drift's quarters differ by half as much again as its halves, a step's alike."""
        if abs(self.drift) > _DRIFT_OVER_STEP * abs(self.step):
            return f"it drifts by {_signed(self.drift)}" + (f" after {noun} {first * each}" if first else "")
        return f"the level changes by {_signed(self.step)} at about {noun} {(first + self.place) * each + 1}"


def _unsteady(series: Floats, level: float) -> _Change | None:
    """Why a series is not steady; None where it is."""
    blocks = _block_means(series)
    count = len(blocks)
    ranks = _ranks(blocks)
    times = np.arange(count) - (count - 1) / 2
    slope = 12 * float(np.dot(ranks, times)) / (count * (count**2 - 1))
    # Spearman's correlation: where it is far from sure, Kendall's score, which is dearer, is not sure either.
    score = _kendall(blocks) if abs(slope) * sqrt(count - 1) > _SCREEN_Z else 0
    variance = count * (count - 1) * (2 * count + 5) / 18
    excess = np.abs(2 * ranks.cumsum() - (count - 1) * np.arange(1, count + 1))
    place = min(int(excess.argmax()) + 1, count - 1)
    peak = float(excess[place - 1])
    if abs(score) < TREND_Z * sqrt(variance) and _change_probability(peak, count) > CHANGE_LEVEL:
        return None  # the corrections below only make both less sure
    values = len(series) - (count - place) * (len(series) // count)
    trend = ranks - slope * times
    levels = np.concatenate([ranks[:place] - ranks[:place].mean(), ranks[place:] - ranks[place:].mean()])
    quarter = count // 4
    drift = float(blocks[-quarter:].mean() - blocks[:quarter].mean()) / level
    step = float(blocks[place:].mean() - blocks[:place].mean()) / level
    probability = _change_probability(peak / sqrt(_variance_factor(levels)), count)
    if probability < CHANGE_LEVEL and abs(step) >= LEAST_CHANGE:
        return _Change(drift, step, values)
    if abs(score) >= TREND_Z * sqrt(variance * _variance_factor(trend)) and abs(drift) >= LEAST_CHANGE:
        return _Change(drift, step, values)
    return None


def _signed(share: float) -> str:
    return f"{share * 100:+.1f} %"


def _ranks(values: Floats) -> Floats:
    """From 0; equal values share the mean of their ranks."""
    order = values.argsort()
    ordered = values[order]
    places = np.arange(len(values), dtype=np.float64)
    if (ordered[1:] == ordered[:-1]).any():
        places = (np.searchsorted(ordered, ordered, "left") + np.searchsorted(ordered, ordered, "right") - 1) / 2
    ranks = np.empty(len(values))
    ranks[order] = places
    return ranks


def _kendall(values: Floats) -> int:
    """Pairs in which the later value is greater, less those in which it is smaller."""
    later = _later(len(values))
    greater = np.count_nonzero((values[None, :] > values[:, None]) & later)
    return int(greater) - int(np.count_nonzero((values[None, :] < values[:, None]) & later))


def _change_probability(peak: float, count: int) -> float:
    """How often values without a change of level come so far from balance (Pettitt's approximation)."""
    return 2 * exp(-6 * peak * peak / (count**3 + count**2))


@lru_cache(maxsize=256)
def _later(count: int) -> NDArray[np.bool_]:
    """[earlier, later] pairs of so many values."""
    return np.triu(np.ones((count, count), dtype=np.bool_), 1)


def _variance_factor(ranks: Floats) -> float:
    """How many times autocorrelation of ranks without their trend or step widens a score; never below 1.

    Hamed and Rao (1998), equation 8, with the correlations that are surely none of chance.
    """
    count = len(ranks)
    rest = ranks - ranks.mean()
    total = float(np.dot(rest, rest))
    if total == 0:
        return 1.0
    correlations = np.correlate(rest, rest, "full")[count:] / total
    counted = np.where(np.abs(correlations) > _ACF_Z / sqrt(count), correlations, 0.0)
    left = np.arange(count - 1.0, 0.0, -1.0)  # pairs at lags 1, 2, ...
    widening = float(np.dot(left * (left - 1) * (left - 2), counted))
    return max(1.0, 1 + 2 * widening / (count * (count - 1) * (count - 2)))
