"""Arguments and results of a workload: `Context` and `RankResult`.

A workload is a plain function `(measurement, context) -> RankResult`, listed in `engine.worker`. It
never writes a record: the worker does, when the function returns or raises.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import PROFILING_PASSES, Figure, MeasuringPass
from engine.parallel.communicator import Communicators, open_communicators
from engine.parallel.grid import Grid

Samples = dict[str, np.ndarray]


def _alone() -> Communicators:
    return open_communicators(Grid(1, 1, 1, 0), torch.device("cpu"), None, 60.0)


@dataclass
class Context:
    """One rank's surroundings during a launch.

    `kept` lives as long as the launch: the loaded model, the tokenised prompts. `barrier` returns when all ranks have
    called it; on one rank it returns at once. `closing` ends what a workload started for the whole launch. `region` is
    the context of a profiling pass around the recorded work. `job_cores` are those of the whole job on this node, of
    which this rank is bound to its own; empty where nothing was bound.
    """

    job: Job
    paths: JobPaths
    rank: int
    world_size: int
    device: torch.device
    manifest: ModelManifest | None
    barrier: Callable[[], None]
    communicators: Communicators = field(default_factory=_alone)
    kept: dict[str, Any] = field(default_factory=dict)
    closing: ExitStack = field(default_factory=ExitStack)
    region: Callable[[], AbstractContextManager[None]] = nullcontext
    job_cores: Sequence[int] = ()

    @property
    def grid(self) -> Grid:
        """This rank's coordinates in the layout shared by the launch's cells."""
        return Grid.of(self.job.cell.layout, self.rank)

    @property
    def measuring_pass(self) -> MeasuringPass:
        """The measuring pass of this launch."""
        return self.job.measuring_pass

    def profiled(self) -> AbstractContextManager[None]:
        """Return a context around the work to profile; a no-op in other passes."""
        return self.region()

    @property
    def profiling(self) -> bool:
        """Whether this launch records one pass of the work, after warm-up, without timing."""
        return self.job.measuring_pass in PROFILING_PASSES

    @property
    def memory_pass(self) -> bool:
        """Whether this launch measures peak memory: the work runs once, without timing."""
        return self.job.measuring_pass == "memory"

    @property
    def local_rank(self) -> int:
        """This rank's index in its node."""
        return self.rank % self.job.ranks_per_node

    @property
    def inputs(self) -> Path:
        return Path(self.job.inputs)


@dataclass
class RankResult:
    """Figures (units in their names) and one-dimensional columns of raw samples of one rank."""

    figures: dict[str, Figure] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)


WorkloadFunction = Callable[[Measurement, Context], RankResult]
