"""The `noop` workload: it sleeps and allocates as its fields say, to test and time the pipeline."""

from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from configs.common.execution import Layout
from configs.workloads.descriptor import BaseWorkload, ComparedLatency, Descriptor

Fault = Literal["raise", "kill", "hang", "out_of_memory"]


class NoopWorkload(BaseWorkload):
    """Sleep and allocate memory: times and tests the pipeline, not a model.

    `fault` injects a real fault in `fault_rank` on the first `fault_attempts` attempts.
    """

    kind: Literal["noop"] = "noop"
    seconds: Annotated[float, Field(ge=0)] = 0.01
    allocate_bytes: NonNegativeInt = 0
    items: PositiveInt = Field(1, description="work items over all ranks; each takes `seconds`")
    label: str | None = Field(None, description="distinguishes otherwise equal cells")
    fault: Fault | None = None
    fault_rank: NonNegativeInt = 0
    fault_attempts: PositiveInt = 1_000_000

    def scaled(self, factor: int) -> "NoopWorkload":
        """The same work a rank for `factor` times as many ranks."""
        return self.model_copy(update={"items": self.items * factor})

    @property
    def summary(self) -> str:
        """The work in a few words, for a table."""
        return self.label or f"noop {self.seconds:g} s"

    def units_per_pass(self, dp: int) -> int | None:
        return self.items

    def known_seconds(self, ranks: int) -> float | None:
        """The slowest rank has the most items."""
        return self.seconds * ceil(self.items / ranks)

    @property
    def known_bytes(self) -> int:
        return self.allocate_bytes

    def compared_fields(self, dp: int) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"label"})

    def check(self, layout: Layout) -> None:
        if self.fault_rank >= layout.ranks:
            raise ValueError(f"workload.fault_rank: got {self.fault_rank}, expected a rank below {layout.ranks}")


DESCRIPTOR = Descriptor(
    kind="noop",
    model=NoopWorkload,
    unit="item",
    throughput="items_per_second",
    columns=("pass_seconds",),
    latencies={"pass": "pass_seconds"},
    latency=ComparedLatency("latency_seconds", "ms a pass", waited_for="pass", awaited=False),
    predicted=("items_per_second",),
    grows="items",
    batch_fields=("items",),
    batch="items",
    usd_per_units=1000,
    form_title="Noop",
)
