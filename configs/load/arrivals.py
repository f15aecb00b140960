"""Arrival processes of requests: open loop (a rate or a trace, whatever the server does) and closed loop (users).

arrivals: {kind: poisson, rate: 4}                            # exponential gaps, requests/s
arrivals: {kind: gamma, rate: 4, burstiness: 0.5}             # below 1: burstier than Poisson, above 1: smoother
arrivals: {kind: constant, rate: 4}
arrivals: {kind: trace, file: trace.jsonl, speed: 2}          # times and lengths of each request
arrivals: {kind: closed, users: 8, think_seconds: 1}          # each user waits for its answer
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.common.base import Frozen

MAX_RATE = 100_000.0
MIN_BURSTINESS = 1e-3
"""Below it almost all gaps are 0 and the others endless: no number of draws gets through a run."""


class PoissonArrivals(Frozen):
    """Open loop with independent exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate: PositiveFloat = Field(le=MAX_RATE, description="conversations per second; requests where `turns` is 1")


class GammaArrivals(Frozen):
    """Open loop with gamma-distributed gaps, whose squared coefficient of variation is 1 / burstiness."""

    kind: Literal["gamma"] = "gamma"
    rate: PositiveFloat = Field(le=MAX_RATE, description="conversations per second")
    burstiness: float = Field(0.5, ge=MIN_BURSTINESS, le=1000, description="shape of the gaps; 1 is Poisson")


class ConstantArrivals(Frozen):
    """Open loop with equal gaps."""

    kind: Literal["constant"] = "constant"
    rate: PositiveFloat = Field(le=MAX_RATE, description="conversations per second")


class TraceArrivals(Frozen):
    """Open loop of a recorded trace: one JSON object per line with `seconds`, `prompt_tokens` and `new_tokens`.

    The lengths are optional; missing ones are drawn as without a trace.
    """

    kind: Literal["trace"] = "trace"
    file: str = Field(min_length=1, description="JSONL file")
    speed: PositiveFloat = Field(1.0, le=1000, description="factor on the rate: 2 halves all gaps")


class ClosedLoop(Frozen):
    """Users who wait for each answer, think, and send the next request."""

    kind: Literal["closed"] = "closed"
    users: PositiveInt = Field(le=10_000)
    think_seconds: NonNegativeFloat = Field(0.0, le=3600, description="mean of the exponential time between requests")


Arrivals = Annotated[
    PoissonArrivals | GammaArrivals | ConstantArrivals | TraceArrivals | ClosedLoop, Field(discriminator="kind")
]
