"""What a planner must know of machines: accelerators, the links between them, and how they stand together.

An accelerator's figures are either peaks of a data sheet, or rates that were measured here (`measured`), of
which nothing is to be taken off any more. On a CPU one rank's cores are one accelerator.
"""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.base import Frozen

AcceleratorKind = Literal["cuda", "rocm", "cpu"]
NumberFormat = Literal["float32", "tfloat32", "bfloat16", "float16", "float8", "int8"]


class Link(Frozen):
    """How two ranks reach each other: a message of n bytes takes latency_seconds + n / bytes_per_second."""

    name: str
    latency_seconds: PositiveFloat = Field(description="of one message, software included")
    bytes_per_second: PositiveFloat = Field(description="one direction, the share of one rank")


class Accelerator(Frozen):
    """One device that computes: a GPU, or the cores of one rank."""

    name: str = Field(description="short and stable, such as `h100-80gb`")
    title: str = Field("", description="as its maker calls it")
    kind: AcceleratorKind
    memory_bytes: PositiveInt
    bytes_per_second: PositiveFloat = Field(description="of its memory")
    peak_flops: dict[NumberFormat, PositiveFloat] = Field(description="dense FLOP/s by number format")
    link: Link | None = Field(None, description="to its neighbours in the node")
    kernel_seconds: NonNegativeFloat = Field(0.0, description="least time of one operator, its launch included")
    measured: bool = Field(False, description="figures are rates reached here, not peaks of a data sheet")
    source: str
    as_of: str | None = Field(None, description="YYYY-MM-DD")

    def flops(self, dtype: str) -> float:
        """Dense FLOP/s in a format; a format that the device has not is computed in the next wider one."""
        for name in _WIDER[dtype]:
            if name in self.peak_flops:
                return self.peak_flops[name]
        raise ValueError(f"{self.name}: no FLOP/s are known for {dtype}; known: {', '.join(self.peak_flops)}")


_WIDER: dict[str, tuple[NumberFormat, ...]] = {
    "float32": ("float32",),
    "tfloat32": ("tfloat32", "float32"),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "float8": ("float8", "bfloat16", "float16", "float32"),
    "int8": ("int8", "bfloat16", "float16", "float32"),
}


class Machine(Frozen):
    """A node and how it is joined to its like. `accelerators` is how many ranks it holds."""

    name: str
    accelerator: Accelerator
    accelerators: PositiveInt = 1
    inside: Link | None = Field(None, description="between ranks of a node; none: the accelerator's own link")
    between: Link | None = Field(None, description="between nodes, the share of one rank; none: one node only")
    host_memory_bytes: PositiveInt | None = None
    storage_bytes: PositiveInt | None = Field(None, description="local NVMe")
    usd_per_hour: PositiveFloat | None = Field(None, description="of one node")

    @property
    def neighbour(self) -> Link | None:
        """The link within a node."""
        return self.inside or self.accelerator.link
