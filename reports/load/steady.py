"""The steady part of a load run.

The start is cut by MSER-5, the rule of `reports.numbers.steady` on means of five consecutive requests (K. P. White,
M. J. Cobb and S. C. Spratt, "A comparison of five steady-state truncation heuristics for simulation", Winter Simulation
Conference 2000, 755-760), which also tests what is left for a trend and a change of level: a queue that grows is no
steady state.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats
from reports.load.samples import LoadRun
from reports.numbers.steady import Steady, steady
from reports.text import plural

BATCH = 5
"""Requests of a mean."""
_CLOCK_DIGITS = 9
"""Of seconds: differences below the clock's resolution are rounding, and no start-up."""


@dataclass(frozen=True)
class Window:
    """Requests that were due from `begin` to before `end`, in seconds since the run's start, are counted.

    found: whether that part is steady; None where the run is too short to tell.
    """

    begin: float
    end: float
    found: bool | None
    reason: str

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, moments: Floats) -> NDArray[np.bool_]:
        """Which moments lie in it."""
        inside: NDArray[np.bool_] = (moments >= self.begin) & (moments <= self.end)
        return inside


def steady_window(run: LoadRun) -> Window:
    """The steady part of what was issued; all of it where there is none, or too little to tell."""
    end = run.facts.issuing_seconds
    latest, unknown = 0, ""
    for name, values in (("TTFT", run.ttft_seconds), ("TPOT", run.tpot_seconds)):
        known = np.flatnonzero(~np.isnan(values))
        found = steady_requests(values[known])
        if found.found is False:
            return Window(0.0, end, False, f"{name}: {found.reason}")
        if found.found is None and name == "TTFT":
            answered = "" if len(known) == len(run) else f"{len(known):,} answers to "
            alone = len(run) == 1 and not answered
            unknown = f"{answered}{plural(len(run), 'request')} {'is' if alone else 'are'} too few to tell"
        if found.found and found.first:
            latest = max(latest, int(known[found.first]))
    if unknown:
        return Window(0.0, end, None, unknown)
    begin = float(run.columns["scheduled_seconds"][latest]) if latest else 0.0
    return Window(begin, end, True, f"from request {latest + 1:,}" if latest else "from the first request")


def steady_requests(values: Floats) -> Steady:
    """Where latencies of consecutive requests are steady; `first` and `count` are in requests."""
    batches = len(values) // BATCH
    values = values.round(_CLOCK_DIGITS)
    means: Floats = values[: batches * BATCH].reshape(batches, BATCH).mean(axis=1)
    found = steady(means, "request", BATCH)
    first = found.first * BATCH
    return Steady(found.found, first, len(values) - first, found.reason)
