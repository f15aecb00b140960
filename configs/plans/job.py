"""A job: one submission to a scheduler, that is, one launch that measures cells.

`job.json` in the job folder and the files written there by the ranks are the only interface between the
orchestrator and the engine. Each rank rewrites its `Progress` in place, in a block allocated at the start of
the job, so it can be updated even on a full disk.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.records.record import FILE_NAME_PATTERN, MeasuringPass, Status, Timestamp
from configs.spec.cell import Cell
from configs.spec.engines import EngineEnvironment, OtherServer
from configs.spec.measuring import Measuring
from configs.targets.target import LocalTarget, Target

PROGRESS_BYTES = 4096


class Measurement(Frozen):
    """One repeat of one cell in one launch."""

    cell: Cell
    repeat: int = Field(ge=0)
    attempt: int = Field(ge=1)

    @property
    def name(self) -> str:
        """Unique in the run folder among measurements of one measuring pass."""
        return f"{self.cell.key}-r{self.repeat}-a{self.attempt}"

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a further attempt goes on where this one was lost."""
        return self.cell.workload.keeps_checkpoints


class Job(Frozen):
    """Everything that a launch needs to know. All measurements share one pack key."""

    schema_version: int = SCHEMA_VERSION
    name: str = Field(pattern=FILE_NAME_PATTERN)
    study: str
    measuring_pass: MeasuringPass
    measuring: Measuring
    target: Target = LocalTarget()
    measurements: tuple[Measurement, ...] = Field(min_length=1)
    ranks_per_node: PositiveInt
    timeout_seconds: PositiveFloat
    manifest: str | None = Field(None, description="path of the model's manifest.json")
    inputs: str = Field(description="folder of the prompts and texts, named by hash")
    cache: str = Field(description="folder where nodes may keep what can be made again")
    checkpoints: str | None = Field(
        None, description="folder of training checkpoints, which all attempts of a run share; none: in the job's own"
    )
    engines: dict[OtherServer, EngineEnvironment] = Field({}, description="where servers of others are installed")
    exclude: tuple[str, ...] = Field((), description="nodes of a cluster that the job must not get")

    @property
    def cell(self) -> Cell:
        """The first cell: it stands for what all measurements share."""
        return self.measurements[0].cell

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
    phase: Literal["starting", "ready", "measurement", "finished", "failed"]
    measurement: str | None = None
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
    submitted_at: Timestamp


class SrunProcess(Frozen):
    """Written when a job was started as a step of an allocation: srun's process, which lives as long as the step."""

    pid: int
    pid_started: int
    host: str


class HostPlacement(Frozen):
    """Written before anything of a job is carried to hosts: which ones it has, and its folder's name on them.

    The run's name there is that of where it lay then: a run folder that is moved meanwhile still finds its jobs.
    """

    hosts: tuple[str, ...] = Field(min_length=1, description="names, by node rank")
    run: str = Field(pattern=r"^[^/]+-[0-9a-f]{8}$", description="the run's folder, below `runs` on each of them")
    folder: str = Field(pattern=FILE_NAME_PATTERN, description="below `jobs` of the run's folder on each of them")


class QueueState(Frozen):
    """Written whenever a scheduler gives another reason why a job waits or is not taken, and when it is suspended."""

    state: str = Field(description="as the scheduler writes it: PENDING, SUSPENDED; none: it has not taken the job")
    reason: str
    since: str


class Launcher(Frozen):
    """Written by each node's launcher before it starts anything: whom to ask, and whom to end."""

    node_rank: int = 0
    pid: int
    pid_started: int
    host: str
    started_at: Timestamp
    lock_acquired_at: Timestamp | None = Field(
        None, description="since when it has the machine for itself; none: it waits"
    )
    restarts: int = Field(0, ge=0, description="how often the scheduler had started the job before")
    step_id: str | None = Field(None, description="of the job's step under Slurm; none: no step of its own")


class JobEnd(Frozen):
    """Written by the launcher when no process of the job is left on its node.

    Under a scheduler each node says so for itself, and the adapter makes one of them and of the scheduler's state.

    `status` is completed when the ranks ended by themselves without error; parts, not this, say what
    was measured.
    """

    status: Status
    return_code: int | None
    measurement: str | None = Field(None, description="the measurement that was going on")
    nodes: tuple[str, ...] = Field((), description="of a cluster, those to blame: a retry leaves them out")
    suspects: tuple[str, ...] = Field((), description="where none is to blame by name: where it was lost; left out too")
    rank: int | None = Field(None, description="the rank that failed first, where known")
    kind: str | None = None
    message: str | None = None
    finished_at: Timestamp
