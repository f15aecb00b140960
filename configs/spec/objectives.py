"""Objectives of a study; each is reported as met, missed or undecided."""

from typing import Literal

from pydantic import Field, PositiveFloat

from configs.common.base import Frozen
from configs.workloads.descriptor import Descriptor

Purpose = Literal["batch", "serving", "hybrid"]
"""Intended use of the models: batch jobs, interactive serving, or both."""


class Objectives(Frozen):
    """Bounds on a cell's figures: upper bounds for latencies and prices, lower bounds for the others."""

    p99_latency_seconds: PositiveFloat | None = Field(None, description="of a whole request (in training, of a step)")
    p99_ttft_seconds: PositiveFloat | None = Field(None, description="time to first token")
    p99_itl_seconds: PositiveFloat | None = Field(None, description="inter-token latency: each time between two tokens")
    tokens_per_second: PositiveFloat | None = Field(None, description="over all ranks")
    embeddings_per_second: PositiveFloat | None = Field(None, description="over all ranks, for encoders")
    speedup: PositiveFloat | None = Field(None, description="of the largest point of a scaling experiment")
    exposed_communication_share: float | None = Field(None, gt=0, lt=1, description="of the time of a pass or step")
    usd_per_million_tokens: PositiveFloat | None = None
    usd_per_million_embeddings: PositiveFloat | None = None


P99_LATENCIES = {"p99_ttft_seconds": "ttft", "p99_itl_seconds": "token"}
"""Objective -> the latency whose P99 it bounds; `p99_latency_seconds` is of what the kind's users wait for."""


def has_figure(field: str, known: Descriptor) -> bool:
    """Return whether cells of a kind have the figure that an objective bounds; `speedup` is one of experiments."""
    if field in P99_LATENCIES:
        return P99_LATENCIES[field] in known.latencies
    if field == "p99_latency_seconds":
        return known.latency is not None
    if field == "exposed_communication_share":
        return known.marks_work
    counted = "embeddings_per_second" if "embeddings" in field else "tokens_per_second"
    return field != "speedup" and known.compared and known.throughput == counted
