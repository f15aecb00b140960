"""A rank's process: its place, its cores, its progress file, and its bond to its parent.

A rank must not outlive its parent, and must be able to record its end even on a full disk. Heavy imports wait until
they are needed: a rank ties itself to its parent in its first milliseconds.
"""

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.common.system.proc import end_with_parent, parent_of, start_ticks

LAUNCHER_VARIABLE = "RANKWISE_LAUNCHER_PID"


def die_with_parent(parent: int | None = None) -> None:
    """Request SIGKILL from the kernel when the parent ends (prctl(2), PR_SET_PDEATHSIG).

    A parent that ended before the call is detected too: `parent`, if given, must still be the parent; otherwise the
    parent must be a child of the launcher named in the environment.
    """
    end_with_parent(signal.SIGKILL, parent)
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if parent is None and launcher is not None:
        try:
            orphaned = parent_of(os.getppid()) != int(launcher)
        except OSError:
            orphaned = True
        if orphaned:
            os._exit(1)


def place_from_environment() -> "RankPlace":
    """Read torchrun's variables; without them this is the only rank. Does not pin cores."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    allowed = sorted(os.sched_getaffinity(0))
    return RankPlace(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        allowed=allowed,
        cores=allowed,
    )


def redirect_output(log: Path) -> None:
    """Redirect this process's output to its log; SIGUSR1 and a crash write all stacks there."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def leave(code: int) -> None:
    """Exit immediately: all data is on disk, and library teardown is slow and can abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


@dataclass
class RankPlace:
    """This rank's number and cores. `allowed` are the cores of the whole job on this node.

    cores_shared: whether there are too few cores for separate ones per rank. numa_node: that of the rank's GPU, whose
    cores it has; numa_memory: whether the kernel prefers that node's memory. own_device_only: whether the rank sees its
    own GPU alone, as index 0.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    allowed: list[int]
    cores: list[int]
    threads: int = 1
    cores_shared: bool = False
    numa_node: int | None = None
    numa_memory: bool = False
    own_device_only: bool = False

    @property
    def device_index(self) -> int:
        """Number of the rank's GPU among those that its process sees."""
        return 0 if self.own_device_only else self.local_rank

    @property
    def binding(self) -> dict[str, int | bool]:
        """Figures of a rank that is bound to the NUMA node of its GPU; none of another."""
        if self.numa_node is None:
            return {}
        return {"numa_node": self.numa_node, "numa_memory": self.numa_memory, "bound_cores": len(self.cores)}


class ProgressFile:
    """This rank's progress, overwritten in place in a block allocated at the start of the job.

    The block exists even when the disk is full, so that the rank can report that.
    """

    def __init__(self, path: Path, rank: int) -> None:
        from configs.plans.job import PROGRESS_BYTES

        self._rank = rank
        self._size_bytes = PROGRESS_BYTES
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.say("starting")
        os.fsync(self._descriptor)

    def say(
        self,
        phase: Literal["starting", "ready", "measurement", "finished", "failed"],
        measurement: str | None = None,
        kind: str | None = None,
        message: str | None = None,
    ) -> None:
        """Report this process's current state to the launcher."""
        from configs.plans.job import Progress

        pid = os.getpid()
        progress = Progress(
            rank=self._rank,
            pid=pid,
            pid_started=start_ticks(pid),
            phase=phase,
            measurement=measurement,
            since=time.time(),
            kind=kind,
            message=message,
        )
        data = progress.model_dump_json().encode()
        assert len(data) < self._size_bytes, "a progress message must fit the block that was allocated for it"
        os.pwrite(self._descriptor, data.ljust(self._size_bytes), 0)
