"""Servers in virtual time whose highest rate under objectives is known: what the search must find.

    limit = SingleServer(rate=20).limit(ttft_seconds=1.5, share=0.99)        # exact
    scores = SingleServer(rate=20).scores(rate=12, seconds=600, seed=1, ttft_seconds=1.5)

`SingleServer` is the M/M/1 queue, whose time in system is exponential at (service rate - arrival rate) requests/s
(L. Kleinrock, "Queueing Systems", volume 1, Wiley 1975, section 3.2 and 5.7). `BatchingServer` batches all waiting
requests in steps, as an engine does; its limit is found once by long simulations.
"""

from dataclasses import dataclass
from math import log

import numpy as np

from configs.common.arrays import Floats


@dataclass(frozen=True)
class SingleServer:
    """One request after another, exponential service at `rate` requests/s; the answer comes whole."""

    rate: float

    def limit(self, ttft_seconds: float, share: float) -> float:
        """The arrival rate at which just `share` of the requests take up to `ttft_seconds`."""
        return self.rate - log(1 / (1 - share)) / ttft_seconds

    def scores(self, rate: float, seconds: float, seed: int, ttft_seconds: float) -> Floats:
        """Times in system over the bound, of the requests of a run that begins with an empty queue."""
        rng = np.random.default_rng(seed)
        count = max(1, rng.poisson(rate * seconds))
        arrivals = np.sort(rng.uniform(0, seconds, count))
        service = rng.exponential(1 / self.rate, count)
        # Lindley's recursion, solved: the wait is the walk's distance from its lowest point so far.
        walk = np.concatenate(([0.0], (service[:-1] - np.diff(arrivals)).cumsum()))
        waits = walk - np.minimum.accumulate(walk)
        return (waits + service) / ttft_seconds


@dataclass(frozen=True)
class BatchingServer:
    """Steps of `base_seconds` + `each_seconds` for each request in the batch; a request takes `tokens` steps.

    Requests join at the next step while fewer than `slots` run.
    """

    base_seconds: float = 0.02
    each_seconds: float = 0.002
    tokens: int = 16
    slots: int = 16

    def scores(self, rate: float, seconds: float, seed: int, ttft_seconds: float, tpot_seconds: float) -> Floats:
        """The larger of TTFT and TPOT over its bound, for each request in order of arrival."""
        rng = np.random.default_rng(seed)
        arrivals = np.sort(rng.uniform(0, seconds, max(1, rng.poisson(rate * seconds))))
        first, last = np.empty(len(arrivals)), np.empty(len(arrivals))
        now, joined, left = 0.0, 0, np.empty(0, dtype=np.int64)
        running = np.empty(0, dtype=np.int64)
        while joined < len(arrivals) or len(running):
            if not len(running):
                now = max(now, float(arrivals[joined]))
            waiting = int(np.searchsorted(arrivals, now, side="right")) - joined
            new = np.arange(joined, joined + min(waiting, self.slots - len(running)))
            joined += len(new)
            running, left = np.concatenate((running, new)), np.concatenate((left, np.full(len(new), self.tokens)))
            now += self.base_seconds + self.each_seconds * len(running)
            first[new] = now
            left = left - 1
            last[running[left == 0]] = now
            running, left = running[left > 0], left[left > 0]
        ttft, tpot = first - arrivals, (last - first) / (self.tokens - 1)
        return np.maximum(ttft / ttft_seconds, tpot / tpot_seconds)
