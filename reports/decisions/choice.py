"""What to run of several candidates: the smallest that none larger clearly beats for what it costs.

    found = choose_candidate([Candidate("1 rank", 1, {0: 210.0, ...}), Candidate("dp=2", 2, {0: 350.0, ...})])
    found.chosen, found.gain, found.larger, found.more

`size` is what a candidate costs: dollars an hour, else ranks. Going up in size, a larger candidate is taken only if its
work per size is clearly more than that of the one held so far: the whole interval of the ratio, paired by block and
corrected for as many comparisons as there are candidates, is above 1. Of one size the best is held; of those not told
apart from it, the one that surely answers soonest, else the simplest. Nothing here knows of records or plans.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reports.numbers.statistics import CONFIDENCE, Ratio, paired_ratio

RepeatValues = Mapping[int, float]


@dataclass(frozen=True)
class Candidate:
    """size: USD an hour, or ranks; rates: work a second by repeat; latency: seconds by repeat, where somebody waits.

    batch: the smallest of the smallest size is the simplest candidate.
    """

    name: str
    size: float
    rates: RepeatValues
    latency: RepeatValues = field(default_factory=dict)
    batch: int = 1


@dataclass(frozen=True)
class Choice:
    """Indices of candidates, and ratios of their work a second.

    gain: chosen over simplest; None where they are one or share no block. larger: the one that does the most work of
    those that cost more than the chosen one, None where none does; more: its work over that of the chosen one, which
    may be less than 1; per_size: the same for what each costs. rival: which of those that cost more is nearest to being
    chosen, and better: how many times better it is: larger and per_size, or by latency the one that answers soonest.
    """

    chosen: int
    simplest: int
    gain: Ratio | None
    larger: int | None
    more: Ratio | None
    per_size: Ratio | None
    comparisons: int
    rival: int | None = None
    better: Ratio | None = None


def choose_candidate(
    candidates: Sequence[Candidate], by_latency: bool = False, confidence: float = CONFIDENCE
) -> Choice:
    """Choose among one or more candidates that have rates. by_latency: less latency is better, not more work for the
    size; candidates without latency are passed over."""
    assert candidates and all(one.rates for one in candidates)
    comparisons = max(1, len(candidates) - 1)
    value = _speed if by_latency else _work_per_size
    known = [index for index, one in enumerate(candidates) if value(one)] or list(range(len(candidates)))
    sizes = sorted({candidates[index].size for index in known})

    def ratio(first: int, second: int, of: Callable[[Candidate], RepeatValues]) -> Ratio | None:
        return paired_ratio(of(candidates[first]), of(candidates[second]), comparisons, confidence)

    def best_of(size: float) -> int:
        """The best of a size; of those not told apart from it what surely answers soonest, else the simplest."""
        same = [index for index in known if candidates[index].size == size]
        best = max(same, key=lambda index: _median(value(candidates[index])))
        tied = [index for index in same if index == best or not _above_one(ratio(best, index, value))]
        held = min(tied, key=lambda index: (candidates[index].batch, index))
        if by_latency or not all(candidates[index].latency for index in tied):
            return held
        sooner = [index for index in tied if _above_one(ratio(held, index, _latency))]
        return min(sooner, key=lambda index: _median(candidates[index].latency), default=held)

    chosen = best_of(sizes[0])
    for size in sizes[1:]:
        challenger = best_of(size)
        if _clear(ratio(challenger, chosen, value)):
            chosen = challenger
    simplest = min(known, key=lambda index: (candidates[index].size, candidates[index].batch, index))
    gain = None if simplest == chosen else ratio(chosen, simplest, _rates)
    bigger = [index for index, one in enumerate(candidates) if one.size > candidates[chosen].size]
    larger = max(bigger, key=lambda index: _median(candidates[index].rates), default=None)
    more = None if larger is None else ratio(larger, chosen, _rates)
    per_size = None if larger is None else ratio(larger, chosen, _work_per_size)
    rival, better = larger, per_size
    if by_latency:
        soonest = [index for index in bigger if value(candidates[index])]
        rival = max(soonest, key=lambda index: _median(value(candidates[index])), default=None)
        better = None if rival is None else ratio(rival, chosen, value)
    return Choice(chosen, simplest, gain, larger, more, per_size, comparisons, rival, better)


def _clear(found: Ratio | None) -> bool:
    """Whether the whole interval is above 1; without an interval nothing is clear."""
    return found is not None and found.interval is not None and found.is_above(1)


def _above_one(found: Ratio | None) -> bool:
    """Whether the interval, or the range of repeats too few for one, is above 1."""
    return found is not None and found.is_above(1)


def _rates(one: Candidate) -> RepeatValues:
    return one.rates


def _latency(one: Candidate) -> RepeatValues:
    return {repeat: seconds for repeat, seconds in one.latency.items() if seconds > 0}


def _work_per_size(one: Candidate) -> RepeatValues:
    return {repeat: rate / one.size for repeat, rate in one.rates.items()}


def _speed(one: Candidate) -> RepeatValues:
    return {repeat: 1 / seconds for repeat, seconds in one.latency.items() if seconds > 0}


def _median(values: RepeatValues) -> float:
    return float(np.median(list(values.values())))
