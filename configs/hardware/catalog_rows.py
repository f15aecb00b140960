"""One row of each table of the hardware catalog: its columns, and what they may hold.

Rows stand in `configs/catalog/*.csv` (shipped), in files of the same form in the cache (refreshed) and in the
user's YAML file; `configs.hardware.catalog` lays them over each other and makes machines of them. A row may say
only a part of its columns where a layer below says the rest, so that rows are checked when they are put together.
"""

from datetime import date
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator

from configs.common.base import Frozen
from configs.hardware.hardware import AcceleratorKind, NumberFormat


def _whole(value: Any) -> Any:
    """`85e9`, as people write bytes, is a whole number too."""
    if isinstance(value, str | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() else value
    return value


Whole = Annotated[PositiveInt, BeforeValidator(_whole)]


class CatalogRow(Frozen):
    """What every row says: since when its figures are known, and from where."""

    title: str = ""
    as_of: date | None = Field(None, description="when the source was read, or what date it bears")
    source: str = Field(min_length=1)

    @field_validator("*", mode="before")
    @classmethod
    def _trimmed(cls, value: Any) -> Any:
        return value.strip() if isinstance(value, str) else value


class LinkRow(CatalogRow):
    """A way between two ranks. Networks have no bytes_per_second of their own: the instance says them."""

    latency_seconds: PositiveFloat
    bytes_per_second: PositiveFloat | None = None


class AcceleratorRow(CatalogRow):
    """A GPU. FLOP/s are dense: what a data sheet reaches with 2:4 sparsity counts half."""

    aliases: str = Field("", description="other names, with `;` between them")
    kind: AcceleratorKind
    memory_bytes: Whole = Field(description="that a process can see, not the nominal size")
    bytes_per_second: PositiveFloat
    float32: PositiveFloat
    tfloat32: PositiveFloat | None = None
    bfloat16: PositiveFloat | None = None
    float16: PositiveFloat | None = None
    float8: PositiveFloat | None = None
    float4: PositiveFloat | None = None
    int8: PositiveFloat | None = None
    link: str | None = Field(None, description="to its neighbours: a name in the table of links")
    link_domain: PositiveInt | None = Field(
        None, description="devices joined by `link`, where they are more than a node's"
    )
    kernel_seconds: PositiveFloat


class CpuRow(CatalogRow):
    """A processor of CPU-only instances, by socket. FLOP/s of an instance: cores x clock_hertz x FLOP a cycle."""

    cores: PositiveInt
    threads_per_core: PositiveInt
    clock_hertz: PositiveFloat = Field(description="that all cores hold at once")
    bytes_per_second: PositiveFloat = Field(description="of the socket's memory")
    float32: PositiveFloat = Field(description="FLOP a cycle and core")
    bfloat16: PositiveFloat | None = None
    int8: PositiveFloat | None = None
    kernel_seconds: PositiveFloat


class InstanceRow(CatalogRow):
    """A type of instance: `provider/instance`."""

    accelerator: str | None = None
    accelerators: PositiveInt | None = None
    attachable: str = Field("", description="accelerators that can be had with it, with `;` between them")
    cpu: str | None = Field(None, description="its processor, where that is what computes")
    vcpus: PositiveInt
    host_memory_bytes: Whole
    network: str | None = Field(None, description="a name in the table of links")
    network_bits_per_second: PositiveFloat | None = Field(
        None, description="of the node, one direction; of the accelerators' own network where there is one"
    )
    inside: str | None = Field(None, description="link between its accelerators, where it is not their own")
    storage_bytes: Whole | None = Field(None, description="local NVMe; none where it is none or a choice")
    retired: date | None = Field(None, description="since when the provider no longer rents it")
    successor: str | None = Field(None, description="what the provider names in its place: a name in this table")


TABLES: dict[str, type[CatalogRow]] = {
    "links": LinkRow,
    "accelerators": AcceleratorRow,
    "cpus": CpuRow,
    "instances": InstanceRow,
}
FORMATS: tuple[NumberFormat, ...] = ("float32", "tfloat32", "bfloat16", "float16", "float8", "int8", "float4")
