"""The `communication` workload: single collectives and transfers, over sizes."""

from typing import Literal, get_args

from pydantic import Field, PositiveInt

from configs.common.execution import Layout
from configs.workloads.descriptor import BaseWorkload, Descriptor, GroupTransportKind

TransportName = Literal["auto", "shared memory", "gloo", "nccl"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "point_to_point"]


class CommunicationWorkload(BaseWorkload):
    """Collectives and point-to-point transfers over sizes, among `layout.tp` ranks; requires no model."""

    kind: Literal["communication"] = "communication"
    operations: tuple[Collective, ...] = Field(get_args(Collective), min_length=1)
    sizes_bytes: tuple[PositiveInt, ...] = Field(
        (1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216), min_length=1
    )
    transport: TransportName = Field("auto", description="auto: the engine's choice")

    def scaled(self, factor: int) -> "CommunicationWorkload":
        """Sizes are those of a rank already."""
        return self

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        return "communication" if self.transport == "auto" else f"communication by {self.transport}"

    @property
    def process_state(self) -> dict[str, object]:
        """Groups are opened once a launch."""
        return {"transport": self.transport}

    @property
    def group_transport(self) -> GroupTransportKind:
        return self.transport


def _among_tp(layout: Layout) -> None:
    if layout.dp > 1 or layout.pp > 1 or layout.tp < 2:
        raise ValueError("layout: a communication workload requires tp. Use tp of 2 or more")


DESCRIPTOR = Descriptor(
    kind="communication",
    model=CommunicationWorkload,
    unit="operation",
    throughput="items_per_second",
    columns=("pass_seconds",),
    latencies={"pass": "pass_seconds"},
    latency=None,  # its figures are those of single operations
    axes=("tp",),
    layout_rule=_among_tp,
    own_groups=True,
    repeats_passes=True,
    compared=False,
    shown_by="communication",
    unpredicted="single operations are what predictions are made from",
)
