"""Processes of one node: a rank's place, its progress, its bond to its parent; and torchrun's agent.

A rank must not outlive its parent, and must be able to say what became of it even on a full disk.
torchrun tells of its ranks in prose only, unless a rank lived long enough to write an error file; a rank
that was killed did not. So the launcher starts torchrun through this module, which hands over the exit
codes that torchrun's agent saw as JSON. Heavy imports wait until they are needed: a rank ties itself to
its parent in its first milliseconds.

    python -m engine.processes EXITS_JSON [arguments of torchrun]
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LAUNCHER_VARIABLE = "RANKWISE_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (proc(5), /proc/<pid>/stat field 22)."""
    return int(_stat_fields(pid)[19])


def _stat_fields(pid: int) -> list[str]:
    # Field 2 is the name in parentheses and may hold spaces and parentheses; field 3 follows the last one.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent ends (prctl(2), PR_SET_PDEATHSIG).

    A parent that ended before the call is noticed too: `parent` must still be the parent where given, else
    the parent must be a child of the launcher that the environment names.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not _parent_lives(parent):
        os._exit(1)


def _parent_lives(parent: int | None) -> bool:
    if parent is not None:
        return os.getppid() == parent
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return True
    try:
        return int(_stat_fields(os.getppid())[1]) == int(launcher)
    except OSError:
        return False


def place_from_environment() -> "Place":
    """Read torchrun's variables; without them this is the only rank. Pins nothing yet."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    allowed = sorted(os.sched_getaffinity(0))
    return Place(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        allowed=allowed,
        cores=allowed,
    )


def redirect_output(log: Path) -> None:
    """Send this process's output to its log; SIGUSR1 and a crash put all stacks there."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def pin(place: "Place", cores_per_rank: int) -> None:
    """Give the rank its own cores, or all of them where there are too few for that."""
    first = place.local_rank * cores_per_rank
    if place.local_world_size * cores_per_rank <= len(place.allowed):
        place.cores = place.allowed[first : first + cores_per_rank]
        os.sched_setaffinity(0, place.cores)
    place.threads = int((os.environ.get("OMP_NUM_THREADS") or str(cores_per_rank)).split(",")[0])


def leave(code: int) -> None:
    """End at once: everything that matters is on disk, and teardown in libraries is slow and can abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def main(arguments: list[str]) -> int:
    """Run torchrun; where ranks failed, leave a list of {rank, pid, exit_code} and return 1."""
    exits = Path(arguments[0])
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments[1:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        seen = [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode}
            for rank, failure in sorted(error.failures.items())
        ]
        write_exits(exits, seen)
        return 1
    return 0


def write_exits(path: Path, failed: list[dict[str, int]]) -> None:
    """Leave {rank, pid, exit_code} of the ranks that failed, for the launcher."""
    print(f"ranks failed: {failed}", file=sys.stderr)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(failed))
    unfinished.replace(path)


@dataclass
class Place:
    """Which rank this is, and which cores it has. `allowed` are the cores of the whole job."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    allowed: list[int]
    cores: list[int]
    threads: int = 1

    @property
    def cores_shared(self) -> bool:
        """Whether there were too few cores to give each rank its own."""
        return self.local_world_size > 1 and self.cores == self.allowed


class ProgressFile:
    """This rank's progress, overwritten in place in a block that was allocated when the job began.

    The block is there already when the disk is full, so that even then the rank can say so.
    """

    def __init__(self, path: Path, rank: int) -> None:
        from configs.job import PROGRESS_BYTES

        self._rank = rank
        self._size_bytes = PROGRESS_BYTES
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.say("starting")
        os.fsync(self._descriptor)

    def say(
        self,
        phase: Literal["starting", "ready", "visit", "finished", "failed"],
        visit: str | None = None,
        kind: str | None = None,
        message: str | None = None,
    ) -> None:
        """Tell the launcher what this process does from now on."""
        from configs.job import Progress

        pid = os.getpid()
        progress = Progress(
            rank=self._rank,
            pid=pid,
            pid_started=start_ticks(pid),
            phase=phase,
            visit=visit,
            since=time.time(),
            kind=kind,
            message=message,
        )
        data = progress.model_dump_json().encode()
        assert len(data) < self._size_bytes, "a progress message must fit the block that was allocated for it"
        os.pwrite(self._descriptor, data.ljust(self._size_bytes), 0)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
