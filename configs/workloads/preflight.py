"""The `preflight` workload: a test of nodes before a study, never asked for by one."""

from typing import Literal

from pydantic import Field, PositiveFloat

from configs.workloads.descriptor import BaseWorkload, Descriptor


class PreflightWorkload(BaseWorkload):
    """Preflight check of nodes: compute and memory rate of each node, bandwidth of each pair of nodes."""

    kind: Literal["preflight"] = "preflight"
    seconds: PositiveFloat = Field(1.0, description="duration of computing and of reading on each rank")

    def scaled(self, factor: int) -> "PreflightWorkload":
        """Return the workload unchanged: the work per rank is independent of the number of ranks."""
        return self

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        return "preflight"


DESCRIPTOR = Descriptor(
    kind="preflight",
    model=PreflightWorkload,
    unit="operation",
    throughput="items_per_second",
    columns=(),
    latencies={},
    latency=None,
    in_studies=False,
    compared=False,
    unpredicted="single operations are what predictions are made from",
)
