"""A target: where cells run, and what of it each rank gets."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from configs.base import Frozen


class LocalTarget(Frozen):
    """This machine. A rank gets `cores_per_rank` cores of its own (or one GPU, where there are GPUs)."""

    kind: Literal["local"] = "local"
    name: str = "local"
    cores_per_rank: PositiveInt = 1
    max_ranks: PositiveInt | None = Field(None, description="none: as many as cores or GPUs allow")
    env: dict[str, str] = Field({}, description="passed to the ranks and kept in the record")
    price_usd_per_hour: Annotated[PositiveFloat | None, Field(description="of the whole machine")] = None
    machine: str | None = Field(
        None, description="what is rented, as provider/instance/region: `aws/g4dn.xlarge/us-east-1`; finds its price"
    )

    @field_validator("machine")
    @classmethod
    def _names_an_instance(cls, machine: str | None) -> str | None:
        parts = machine.split("/") if machine is not None else []
        if machine is not None and (
            len(parts) not in (2, 3) or any(not part or part != part.strip() for part in parts)
        ):
            raise ValueError(
                f"{machine!r} is no machine; write it as provider/instance/region, such as aws/g4dn.xlarge/us-east-1"
            )
        return machine

    @property
    def instance(self) -> str | None:
        """`provider/instance`, without the region."""
        return None if self.machine is None else "/".join(self.machine.split("/")[:2])

    @property
    def region(self) -> str | None:
        """The region, where the machine names one."""
        parts = self.machine.split("/") if self.machine is not None else []
        return parts[2] if len(parts) == 3 else None
