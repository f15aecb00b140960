"""Distributions of numbers of tokens: of a prompt, of an answer.

new_tokens: 64                                                          # each
new_tokens: {distribution: uniform, low: 16, high: 128}                 # both included
new_tokens: {distribution: lognormal, mean: 128, sigma: 0.7, max: 512}  # mean of the length, sigma of its logarithm
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from configs.common.base import Frozen

MAX_TOKENS = 1 << 20


class UniformLengths(Frozen):
    """Every whole number from `low` to `high` equally often."""

    distribution: Literal["uniform"] = "uniform"
    low: PositiveInt
    high: Annotated[int, Field(gt=0, le=MAX_TOKENS)]

    @model_validator(mode="after")
    def _in_order(self) -> "UniformLengths":
        if self.low > self.high:
            raise ValueError(f"low: got {self.low}, more than high ({self.high})")
        return self


class LognormalLengths(Frozen):
    """Lengths whose logarithms are normal, rounded, at least 1 and at most `max`."""

    distribution: Literal["lognormal"] = "lognormal"
    mean: PositiveFloat = Field(le=MAX_TOKENS, description="mean number of tokens, before the bound `max`")
    sigma: PositiveFloat = Field(0.7, le=5, description="standard deviation of the logarithm")
    max: Annotated[int, Field(gt=0, le=MAX_TOKENS)] = Field(8192, description="longer draws are cut to this")

    @model_validator(mode="after")
    def _below_the_bound(self) -> "LognormalLengths":
        if self.mean > self.max:
            raise ValueError(f"mean: got {self.mean:g}, more than max ({self.max}), which longer draws are cut to")
        return self


Lengths = (
    Annotated[int, Field(gt=0, le=MAX_TOKENS)]
    | Annotated[UniformLengths | LognormalLengths, Field(discriminator="distribution")]
)
"""A fixed length, or a distribution of lengths."""

DISTRIBUTIONS = ("uniform", "lognormal")
