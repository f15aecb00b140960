"""A job: one submission to a scheduler, which is one launch that visits cells.

`job.json` in the job folder and the files that the ranks leave there are the only seam between the
orchestrator and the engine. `Progress` is rewritten in place by each rank, in a block that was
allocated when the job began, so that even a full disk cannot silence it.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from configs.base import SCHEMA_VERSION, Frozen
from configs.cell import Cell
from configs.record import MeasuringPass, Status
from configs.target import LocalTarget, Target
from configs.training import TrainWorkload

PROGRESS_BYTES = 4096
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

    repeats: PositiveInt = Field(10, description="visits of each cell, a launch each; the least, with a target")
    target_interval: float | None = Field(
        None, gt=0, lt=1, description="go on until the 95 % interval of a cell's median is within this share of it"
    )
    most_repeats: PositiveInt = Field(60, description="with a target: where a cell is given up")
    warmup: int = Field(1, ge=0, description="passes (or training steps) before the measured ones")
    least_seconds: float = Field(1.0, ge=0, description="measure at least this long")
    least_passes: PositiveInt = Field(2, description="and at least so many passes (or training steps)")
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
    live: tuple[LiveSink, ...] = Field((), description="where the first rank of a training visit tells how it goes")
    prometheus_port: int = Field(
        9410, ge=0, lt=65536, description="of the live endpoint, or the next free one after it; 0: any free one"
    )
    seed: int = Field(0, ge=0)


class Visit(Frozen):
    """One repeat of one cell in one launch."""

    cell: Cell
    repeat: int = Field(ge=0)
    attempt: int = Field(ge=1)

    @property
    def name(self) -> str:
        """Unique in the run folder among visits of one measuring pass."""
        return f"{self.cell.key}-r{self.repeat}-a{self.attempt}"

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a further attempt goes on where this one was lost."""
        return isinstance(self.cell.workload, TrainWorkload) and self.cell.workload.checkpoint_every is not None


class Job(Frozen):
    """Everything that a launch needs to know. All visits share one pack key."""

    schema_version: int = SCHEMA_VERSION
    name: str
    study: str
    measuring_pass: MeasuringPass
    measuring: Measuring
    target: Target = LocalTarget()
    visits: tuple[Visit, ...]
    ranks_per_node: PositiveInt
    timeout_seconds: PositiveFloat
    manifest: str | None = Field(None, description="path of the model's manifest.json")
    inputs: str = Field(description="folder of the prompts and texts, named by hash")
    cache: str = Field(description="folder where nodes may keep what can be made again")
    checkpoints: str | None = Field(
        None, description="folder of training checkpoints, which all attempts of a run share; none: in the job's own"
    )
    exclude: tuple[str, ...] = Field((), description="nodes of a cluster that the job must not get")

    @property
    def cell(self) -> Cell:
        """The first cell: it stands for what all visits share."""
        return self.visits[0].cell

    @property
    def shape(self) -> tuple[object, ...]:
        """What must be equal in all jobs of one array: what is asked of the scheduler, but for the time."""
        return (self.target.name, self.cell.nodes, self.ranks_per_node, self.cell.cores_per_rank, self.exclude)

    def located(self, folder: Path) -> "Job":
        """With absolute paths: a manifest's job names its files relative to its own folder, wherever that lies."""

        def absolute(path: str) -> str:
            return path if Path(path).is_absolute() else os.path.normpath(folder.absolute() / path)

        return self.model_copy(
            update={
                "inputs": absolute(self.inputs),
                "cache": absolute(self.cache),
                "checkpoints": absolute(self.checkpoints) if self.checkpoints else self.checkpoints,
                "manifest": absolute(self.manifest) if self.manifest else self.manifest,
            }
        )


class Progress(Frozen):
    """What a rank is doing now."""

    rank: int
    pid: int
    pid_started: int = Field(description="start time of the process in clock ticks, /proc/<pid>/stat field 22")
    phase: Literal["starting", "ready", "visit", "finished", "failed"]
    visit: str | None = None
    since: float = Field(description="seconds since the epoch when this phase began")
    kind: str | None = Field(None, description="class of the exception, where phase is failed")
    message: str | None = Field(None, max_length=1500)


class Submitting(Frozen):
    """Written before a scheduler is asked: under what name a job is found if the submitter dies meanwhile."""

    name: str
    index: int | None = Field(None, description="place in an array of jobs of that name; none: it is no array")


class Submission(Frozen):
    """Written when a scheduler took the job: by what name to ask for it from any process."""

    job_id: str = Field(description="as the scheduler writes it: 123, or 123_4 for a task of an array")
    submitted_at: str


class Launcher(Frozen):
    """Written by each node's launcher before it starts anything: whom to ask, and whom to end."""

    node_rank: int = 0
    pid: int
    pid_started: int
    host: str
    started_at: str
    turn_at: str | None = Field(None, description="since when it has the machine for itself; none: it waits")


class JobEnd(Frozen):
    """Written by the launcher when no process of the job is left on its node.

    Under a scheduler each node says so for itself, and the adapter makes one of them and of the scheduler's state.

    `status` is completed when the ranks ended by themselves without error; parts, not this, say what
    was measured.
    """

    status: Status
    return_code: int | None
    visit: str | None = Field(None, description="the visit that was going on")
    nodes: tuple[str, ...] = Field((), description="of a cluster, those to blame: a retry leaves them out")
    rank: int | None = Field(None, description="the rank that failed first, where known")
    kind: str | None = None
    message: str | None = None
    finished_at: str
