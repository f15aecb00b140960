"""Search for the highest rate at which a share of the requests meets its objectives.

    search = RateSearch(SearchGoal(share=0.99, first_rate=1.0))
    while (rate := search.next_rate()) is not None:
        search.add(rate, scores)          # of one run at that rate: reports.load.metrics.scores
    search.result()                       # estimate, and an interval that holds the limit

A rate passes where the `share` quantile of the scores is surely up to 1, and fails where it is surely above. Sureness
comes from the quantile's interval by sections (`reports.numbers.percentiles.section_interval`): parts of the
runs, whole runs as soon as there are enough. An undecided rate is measured again with another seed, up to
`max_runs_per_rate`, in doubling numbers. First the rate is doubled or halved until one passes and one fails, then the
bracket is split.

Only monotony is supposed: a server that meets its objectives at a rate meets them at lower rates. The interval is that
from the highest rate that passes to the lowest that fails. Each decision is made at a confidence that leaves 95 % to
DECISIONS of them together (Bonferroni); an interval that misses the limit needs a wrong decision.
"""

from dataclasses import dataclass, field
from math import ceil, exp, sqrt

import numpy as np

from configs.common.arrays import Floats
from configs.common.printable import plural
from reports.numbers.percentiles import quantiles, section_interval
from reports.numbers.statistics import CONFIDENCE, LEAST_REPEATS, Bounds, corrected

DECISIONS = 20
_FACTOR = 2.0
_TINY = 1e-9
_FIRST_RUNS = 8
"""Of a rate that stays undecided while no rate above it fails or none below it passes."""
_FEW_RUNS_MARGIN = 1.5
"""Parts of one run share its queue, and their interval is too short: it must then stay this far from 1."""


@dataclass(frozen=True)
class SearchGoal:
    """What is searched for, and what the search may cost.

    share: of the requests that must have a score up to 1. tolerance: the interval's width, as a share of its lower end.
    min_rate, max_rate: bounds of the search. max_runs: over all rates.
    """

    share: float
    first_rate: float
    tolerance: float = 0.05
    min_rate: float = 0.01
    max_rate: float = 10_000.0
    max_runs: int = 100
    max_runs_per_rate: int = 16

    @property
    def least_samples(self) -> int:
        """Of a section: one request is expected beyond the quantile."""
        return ceil(1 / (1 - self.share) - _TINY)


@dataclass
class ProbedRate:
    """A rate and the scores of the runs at it. passes: None while it is undecided."""

    rate: float
    runs: list[Floats] = field(default_factory=list)
    passes: bool | None = None
    quantile: float = float("nan")
    interval: Bounds | None = None

    @property
    def requests(self) -> int:
        return sum(map(len, self.runs))


@dataclass(frozen=True)
class FoundRate:
    """The answer: requests per second. low: None where no rate passed; high: None where none failed.

    reason: why the search ended. settled: whether the interval is as short as asked for.
    """

    estimate: float | None
    low: float | None
    high: float | None
    settled: bool
    reason: str
    probes: tuple[ProbedRate, ...]


class RateSearch:
    """The state of a search. It measures nothing itself."""

    def __init__(self, goal: SearchGoal) -> None:
        assert 0 < goal.min_rate <= goal.first_rate <= goal.max_rate, goal
        self.goal = goal
        self.probes: dict[float, ProbedRate] = {}
        self._stopped: str | None = None

    def add(self, rate: float, scores: Floats) -> ProbedRate:
        """Take the scores of one run at a rate, in the order in which its requests were due."""
        probe = self.probes.setdefault(rate, ProbedRate(rate))
        probe.runs.append(scores)
        count = len(probe.runs)
        if count & (count - 1) == 0 or count == self.goal.max_runs_per_rate:
            _decide(probe, self.goal)
        return probe

    def stop(self, reason: str) -> None:
        """End the search: what limits now is not the server."""
        self._stopped = reason

    def next_rate(self) -> float | None:
        """The rate of the next run; None when the search has ended."""
        if self._stopped is not None or self._spent:
            return None
        undecided = [probe for probe in self.probes.values() if probe.passes is None]
        waiting = [probe for probe in undecided if len(probe.runs) < self.goal.max_runs_per_rate]
        # A rate at the limit may take all runs and stay undecided: a bound that is missing is looked for first.
        has_bounds = None not in self._bracket
        begun = [probe for probe in waiting if has_bounds or len(probe.runs) < _FIRST_RUNS]
        if begun:
            return begun[0].rate
        new = self._new_rate()
        return new if new is not None or not waiting else waiting[0].rate

    def result(self) -> FoundRate:
        """The best answer so far."""
        low, high = self._bracket
        probes = tuple(sorted(self.probes.values(), key=lambda probe: probe.rate))
        settled = low is not None and high is not None and high / low - 1 <= self.goal.tolerance + _TINY
        return FoundRate(self._estimate(low, high), low, high, settled, self._reason(settled, low, high), probes)

    @property
    def _spent(self) -> bool:
        return sum(len(probe.runs) for probe in self.probes.values()) >= self.goal.max_runs

    @property
    def _bracket(self) -> tuple[float | None, float | None]:
        """The highest rate that passes below all that fail, and the lowest that fails."""
        failing = [probe.rate for probe in self.probes.values() if probe.passes is False]
        high = min(failing, default=None)
        passing = [probe.rate for probe in self.probes.values() if probe.passes and (high is None or probe.rate < high)]
        return max(passing, default=None), high

    def _new_rate(self) -> float | None:
        goal, (low, high) = self.goal, self._bracket
        open_rates = sorted(probe.rate for probe in self.probes.values() if probe.passes is None)
        if not self.probes:
            return goal.first_rate
        if high is None:
            highest = max(self.probes)
            return None if highest >= goal.max_rate else min(goal.max_rate, highest * _FACTOR)
        if low is None:
            lowest = min(self.probes)
            return None if lowest <= goal.min_rate else max(goal.min_rate, lowest / _FACTOR)
        if high / low - 1 <= goal.tolerance:
            return None
        between = [rate for rate in open_rates if low < rate < high]
        if not between:
            return sqrt(low * high)
        # The limit is near the undecided rates: both sides are closed in, the wider one first.
        gaps = sorted(((low, between[0]), (between[-1], high)), key=lambda gap: gap[0] / gap[1])
        wide = [gap for gap in gaps if gap[1] / gap[0] - 1 > goal.tolerance / 4]
        return sqrt(wide[0][0] * wide[0][1]) if wide else None

    def _estimate(self, low: float | None, high: float | None) -> float | None:
        """Where the line through the quantiles of the bracket's rates reaches 1, both in logarithms; None without one.

        It stays within the bracket, whatever the noise.
        """
        if low is None or high is None:
            return None
        near = [probe for probe in self.probes.values() if low <= probe.rate <= high and probe.quantile > 0]
        rates = np.log([probe.rate for probe in near])
        heights = np.clip(np.log([probe.quantile for probe in near]), -1.0, 1.0)  # an overload is far from any line
        weights = np.array([probe.requests for probe in near], dtype=np.float64)
        center, level = np.average(rates, weights=weights), np.average(heights, weights=weights)
        spread = float(np.dot(weights, (rates - center) ** 2))
        slope = float(np.dot(weights, (rates - center) * (heights - level))) / spread if spread else 0.0
        root = sqrt(low * high) if slope <= 0 else exp(float(center - level / slope))
        return min(high, max(low, root))

    def _reason(self, settled: bool, low: float | None, high: float | None) -> str:
        if settled:
            return f"the interval is within {self.goal.tolerance:.0%}"
        if self._stopped is not None:
            return self._stopped
        if high is None and self.probes and max(self.probes) >= self.goal.max_rate:
            return f"no rate up to {self.goal.max_rate:g} requests/s fails"
        if low is None and self.probes and min(self.probes) <= self.goal.min_rate:
            return f"no rate down to {self.goal.min_rate:g} requests/s passes"
        if self._spent:
            return f"{plural(self.goal.max_runs, 'run')} {'is' if self.goal.max_runs == 1 else 'are'} spent"
        return f"more than {plural(self.goal.max_runs_per_rate, 'run')} of a rate, or longer ones, would be needed"


def _decide(probe: ProbedRate, goal: SearchGoal) -> None:
    """Set what is known of a rate from all its runs."""
    scores = np.concatenate(probe.runs)
    if not len(scores):
        return
    (probe.quantile,) = quantiles(scores, (goal.share,))
    count = min(max(LEAST_REPEATS, len(probe.runs)), len(scores) // goal.least_samples)
    if count < LEAST_REPEATS:
        return
    parts = [quantiles(part, (goal.share,))[0] for part in np.array_split(scores, count)]
    probe.interval = section_interval(max(probe.quantile, _TINY), [max(part, _TINY) for part in parts], _CONFIDENCE)
    if probe.interval is not None:
        margin = 1.0 if len(probe.runs) >= LEAST_REPEATS else _FEW_RUNS_MARGIN
        low, high = probe.interval
        probe.passes = True if high * margin <= 1 else False if low > margin else None


_CONFIDENCE = corrected(CONFIDENCE, DECISIONS)
