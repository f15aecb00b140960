"""What a workload is given, and what it gives back.

A workload is a plain function `(visit, context) -> Outcome`, listed in `engine.worker.WORKLOADS`. It
never writes a record: the worker does, when the function returns or raises.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.job import Job, Visit
from configs.model import Manifest
from configs.paths import JobPaths
from configs.record import Figure

Samples = dict[str, np.ndarray]


@dataclass
class Context:
    """One rank's surroundings during a launch.

    `kept` lives as long as the launch: the model that was loaded once, the tokenised prompts.
    `barrier` returns when all ranks have called it; on one rank it returns at once.
    """

    job: Job
    paths: JobPaths
    rank: int
    world_size: int
    device: torch.device
    manifest: Manifest | None
    barrier: Callable[[], None]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_pass(self) -> bool:
        """Whether this launch looks for peak memory: run the work once, time nothing."""
        return self.job.measuring_pass == "memory"

    @property
    def inputs(self) -> Path:
        return Path(self.job.inputs)


@dataclass
class Outcome:
    """Figures (units in their names) and one-dimensional columns of raw samples of one rank."""

    figures: dict[str, Figure] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)


Workload = Callable[[Visit, Context], Outcome]
