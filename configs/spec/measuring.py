"""The rules of measuring that a study states once for all its cells."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from configs.common.base import Frozen

Profiler = Literal["perf", "nsys"]
LiveSink = Literal["tensorboard", "mlflow", "wandb", "prometheus"]
LIVE_LIBRARIES: dict[LiveSink, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow-skinny", "sqlalchemy", "alembic", "sqlparse"),
    "wandb": ("wandb",),
    "prometheus": ("prometheus-client",),
}
"""Distributions that must be installed where the ranks run; each kind is an extra of its own name."""


class Measuring(Frozen):
    """The rules of measuring, the same for every cell of a study."""

    repeats: PositiveInt = Field(10, description="measurements of each cell, a launch each; the least, with a target")
    target_interval: float | None = Field(
        None, gt=0, lt=1, description="go on until the 95 % interval of a cell's median is within this share of it"
    )
    max_repeats: PositiveInt = Field(60, description="with a target, or --until-decided: where it is given up")
    warmup: int = Field(1, ge=0, description="passes (or training steps) before the measured ones")
    min_seconds: float = Field(1.0, ge=0, description="measure at least this long")
    min_passes: PositiveInt = Field(2, description="and at least so many passes (or training steps)")
    cell_timeout_seconds: PositiveFloat = 300.0
    group_timeout_seconds: PositiveFloat = Field(60.0, description="of one collective")
    budget_minutes: PositiveFloat | None = Field(None, description="wall time after which no launch is begun")
    budget_usd: PositiveFloat | None = Field(None, description="money after which no launch is begun; needs a price")
    memory: bool = Field(True, description="measure peak memory, in a pass of its own")
    profile: bool = Field(
        False, description="split the time into compute, communication and idle, in a pass of its own"
    )
    profiler: Profiler | None = Field(
        None, description="record one pass under this program, in a launch of its own; its files lie beside the record"
    )
    live: tuple[LiveSink, ...] = Field(
        (), description="where the first rank of a training measurement tells how it goes"
    )
    prometheus_port: int = Field(
        9410, ge=0, lt=65536, description="of the live endpoint, or the next free one after it; 0: any free one"
    )
    seed: int = Field(0, ge=0)
