"""What a study wants to hold: each objective is reported as met, missed or undecided."""

from typing import Literal

from pydantic import Field, PositiveFloat

from configs.base import Frozen

Purpose = Literal["batch", "serving", "hybrid"]
"""What the models will be used for: jobs that may wait, users that may not, or both."""


class Objectives(Frozen):
    """Bounds on a cell's figures. Latencies and prices are to stay below, the others above."""

    p99_latency_seconds: PositiveFloat | None = Field(None, description="of a whole request (a step, where it trains)")
    p99_ttft_seconds: PositiveFloat | None = Field(None, description="until the first token")
    p99_token_seconds: PositiveFloat | None = Field(None, description="between two tokens")
    tokens_per_second: PositiveFloat | None = Field(None, description="over all ranks")
    embeddings_per_second: PositiveFloat | None = Field(None, description="over all ranks, where it encodes")
    speedup: PositiveFloat | None = Field(None, description="of the largest point of a scaling experiment")
    exposed_communication_share: float | None = Field(None, gt=0, lt=1, description="of the time of a pass or step")
    usd_per_million_tokens: PositiveFloat | None = None
    usd_per_million_embeddings: PositiveFloat | None = None
