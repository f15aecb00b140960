"""A target: where cells run, and what of it each rank gets."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from configs.base import Frozen


class LocalTarget(Frozen):
    """This machine. A rank gets `cores_per_rank` cores of its own (or one GPU, where there are GPUs)."""

    kind: Literal["local"] = "local"
    name: str = "local"
    cores_per_rank: PositiveInt = 1
    max_ranks: PositiveInt | None = Field(None, description="none: as many as cores or GPUs allow")
    env: dict[str, str] = Field({}, description="passed to the ranks and kept in the record")
    price_usd_per_hour: Annotated[PositiveFloat | None, Field(description="of the whole machine")] = None
