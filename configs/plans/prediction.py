"""What the planner said of a cell before it was run; kept in the plan, so that a report can hold it to account."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from configs.common.base import Frozen


class Prediction(Frozen):
    """Figures bear the names of `configs.records.rates.Rates`, whose medians they are to be held against.

    All None with a `reason` where the planner cannot say.
    """

    tokens_per_second: PositiveFloat | None = None
    embeddings_per_second: PositiveFloat | None = None
    items_per_second: PositiveFloat | None = None
    step_seconds: PositiveFloat | None = None
    ttft_seconds: PositiveFloat | None = None
    time_per_output_token_seconds: PositiveFloat | None = None
    factor: float | None = Field(None, ge=1, description="in 9 of 10 cases the truth lies within times or over this")
    peak_memory_bytes: PositiveInt | None = Field(None, description="of the fullest rank")
    fits: bool | None = None
    usd_per_million_tokens: PositiveFloat | None = None
    exposed_communication_seconds: NonNegativeFloat | None = Field(None, description="of a step, waited for")
    network_bytes_per_step: NonNegativeFloat | None = Field(
        None, description="that one node sends to other nodes; none: unknown, or one node only"
    )
    peak_flops: PositiveFloat | None = Field(None, description="dense FLOP/s of one rank's device in the cell's dtype")
    peak_source: str = Field("", description="where peak_flops comes from")
    basis: str = Field("", description="where the hardware's figures come from")
    correction: PositiveFloat | None = Field(None, description="the time was multiplied by this, learnt from records")
    learnt_from: NonNegativeInt = Field(0, description="records that taught the correction")
    reason: str | None = Field(None, description="why there is no prediction, or none of a part")

    @property
    def throughput(self) -> float | None:
        """As `Rates.throughput`: embeddings a second where it encodes, items of noop, else tokens."""
        rates = (self.embeddings_per_second, self.tokens_per_second, self.items_per_second)
        return next((rate for rate in rates if rate is not None), None)
