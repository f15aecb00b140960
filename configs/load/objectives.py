"""Objectives of a served request, and the share of requests that must meet all of them."""

from pydantic import Field, PositiveFloat, model_validator

from configs.common.base import Frozen


class RequestObjectives(Frozen):
    """Upper bounds on the latencies of one request. A request that fails meets none."""

    ttft_seconds: PositiveFloat | None = Field(None, description="time to first token")
    tpot_seconds: PositiveFloat | None = Field(None, description="mean time per token after the first")
    e2e_seconds: PositiveFloat | None = Field(None, description="whole request")
    share: float = Field(0.99, gt=0, lt=1, description="share of the requests that must meet all bounds")

    @model_validator(mode="after")
    def _bounded(self) -> "RequestObjectives":
        if not self.bounds:
            raise ValueError("expected at least one of ttft_seconds, tpot_seconds, e2e_seconds")
        return self

    @property
    def bounds(self) -> dict[str, float]:
        """Bound by the latency's name: ttft, tpot, e2e."""
        given = {"ttft": self.ttft_seconds, "tpot": self.tpot_seconds, "e2e": self.e2e_seconds}
        return {name: bound for name, bound in given.items() if bound is not None}
