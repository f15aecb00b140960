"""Machines as the planner models them: accelerators, links and nodes.

An accelerator's figures are either peaks of a data sheet or measured rates (`measured`), which are used without
an efficiency factor. On a CPU, the cores of one rank are one accelerator.
"""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.common.base import Frozen

AcceleratorKind = Literal["cuda", "rocm", "xpu", "tpu", "neuron", "hpu", "cpu"]
"""What programs call the platform; `xpu` is Intel's GPUs, `neuron` AWS Trainium and Inferentia, `hpu` Intel Gaudi."""
NumberFormat = Literal["float32", "tfloat32", "bfloat16", "float16", "float8", "int8", "float4"]


class Link(Frozen):
    """How two ranks reach each other: a message of n bytes takes latency_seconds + n / bytes_per_second."""

    name: str
    latency_seconds: PositiveFloat = Field(description="of one message, software included")
    bytes_per_second: PositiveFloat = Field(description="one direction, the share of one rank")
    message_seconds: PositiveFloat | None = Field(
        None, description="latency between two ranks, where it was measured apart from a hop of an all-reduce"
    )


class OperatorRates(Frozen):
    """What the engine's operators take on one rank of a CPU, measured; where a roofline of peaks says too little.

    linear, linear_cached: rows of the input -> seconds a weight, for weights that do not, or do, stay in the caches.
    """

    linear: dict[NumberFormat, dict[PositiveInt, PositiveFloat]]
    linear_cached: dict[NumberFormat, dict[PositiveInt, PositiveFloat]]
    cache_bytes: PositiveInt = Field(description="of the last level that a core has for itself")
    attention_flops: dict[NumberFormat, PositiveFloat] = Field(description="FLOP/s of causal attention over a prompt")
    context_bytes_per_second: dict[NumberFormat, PositiveFloat] = Field(description="of keys and values, decoding")
    layer_seconds: PositiveFloat = Field(description="least time of a layer, one token, no work to speak of")
    step_seconds: PositiveFloat = Field(description="least time of a pass besides its layers")
    recorded_layer_seconds: PositiveFloat = Field(description="as layer_seconds, of a recorded decode step")
    recorded_step_seconds: PositiveFloat = Field(description="as step_seconds, of a recorded decode step")
    element_seconds: dict[NumberFormat, PositiveFloat] = Field(
        description="norms, rotation, activation and sums of a layer, by row and hidden element"
    )
    training_flops: dict[NumberFormat, PositiveFloat] = Field(description="of linear layers, forward and backward")
    training_element_seconds: dict[NumberFormat, PositiveFloat] = Field(description="as element_seconds, both ways")
    logit_seconds: PositiveFloat = Field(description="of the loss, both ways, by logit")
    parameter_seconds: PositiveFloat = Field(description="of clipping and AdamW, by parameter")


class Accelerator(Frozen):
    """One device that computes: a GPU, or the cores of one rank."""

    name: str = Field(description="short and stable, such as `h100-80gb`")
    title: str = Field("", description="as its maker calls it")
    kind: AcceleratorKind
    memory_bytes: PositiveInt
    bytes_per_second: PositiveFloat = Field(description="of its memory")
    peak_flops: dict[NumberFormat, PositiveFloat] = Field(description="dense FLOP/s by number format")
    link: Link | None = Field(None, description="to its neighbours in the node")
    link_domain: PositiveInt | None = Field(
        None, description="devices that reach each other by `link`, across nodes too; none: those of a node"
    )
    kernel_seconds: NonNegativeFloat = Field(0.0, description="least time of one operator, its launch included")
    measured: bool = Field(False, description="figures are rates reached here, not peaks of a data sheet")
    operators: OperatorRates | None = Field(None, description="measured; of CPUs")
    others_cpu_share: float | None = Field(None, ge=0, description="taken by other processes while it was measured")
    framework_bytes: PositiveInt | None = Field(None, description="of a process that generates, its model left out")
    training_framework_bytes: PositiveInt | None = Field(None, description="of one that trains")
    learned_times: PositiveFloat = Field(1.0, description="measured over predicted seconds, learned from runs on it")
    source: str
    as_of: str | None = Field(None, description="YYYY-MM-DD")

    def flops(self, dtype: str) -> float:
        """Dense FLOP/s in a format; a format that the device has not is computed in the next wider one."""
        for name in _WIDER[dtype]:
            if name in self.peak_flops:
                return self.peak_flops[name]
        raise ValueError(f"{self.name}: FLOP/s unknown for {dtype}; known: {', '.join(self.peak_flops)}")

    def lacks(self, dtype: str) -> bool:
        """Whether an NVIDIA GPU multiplies float16 and not bfloat16 (before Ampere): ranks are refused bfloat16 there,
        and the rate of the next wider format would promise what no run reaches.
        """
        only_float16 = "float16" in self.peak_flops and "bfloat16" not in self.peak_flops
        return self.kind == "cuda" and dtype == "bfloat16" and only_float16

    def widens(self, dtype: str) -> bool:
        """Whether a CPU makes products of a 16-bit format in float32, for want of instructions: they are no faster."""
        if self.kind != "cpu" or dtype not in ("bfloat16", "float16") or dtype not in self.peak_flops:
            return False
        return self.flops(dtype) <= self.peak_flops.get("float32", 0.0)

    def multiplies_in_tiles(self, dtype: str) -> bool:
        """Whether a CPU makes products of a format in tiles (AMX: 16 to 32 times the rate of float32)."""
        plain = self.peak_flops.get("float32")
        return self.kind == "cpu" and plain is not None and self.flops(dtype) >= 8 * plain


_WIDER: dict[str, tuple[NumberFormat, ...]] = {
    "float32": ("float32",),
    "tfloat32": ("tfloat32", "float32"),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
    "float8": ("float8", "bfloat16", "float16", "float32"),
    "float4": ("float4", "float8", "bfloat16", "float16", "float32"),
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
    def joined_ranks(self) -> int:
        """Return how many ranks reach each other without the network: those of a node, or of a rack's link domain."""
        return max(self.accelerators, self.accelerator.link_domain or 1)

    @property
    def neighbour(self) -> Link | None:
        """The link within a node."""
        return self.inside or self.accelerator.link
