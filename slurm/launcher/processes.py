"""Processes of a launch as seen from outside the ranks: who they are, whether they live, how they end.

A launch's processes are
found in two ways: from inside, the launcher adopts every orphan below it (PR_SET_CHILD_SUBREAPER); from
outside, each carries the absolute path of its job folder in its command line.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from configs.common.system.proc import command_line, process_ids

# Every process of a launch runs one of these modules; `tail -f` on a log of the job must not be ended.
_MODULES = (
    b"slurm.launch",
    b"engine.agents.torchrun_agent",
    b"engine.agents.deepspeed_agent",
    b"engine.agents.script_agent",
    b"engine.worker",
)


def oom_kills() -> int:
    """How often the kernel ended a process of this one's control group for lack of memory, since the group was made.

    Where no group tells: any process since boot (proc(5), /proc/vmstat). Several jobs may share a machine. 0 where the
    kernel counts none.
    """
    for path in _memory_events():
        with suppress(OSError):
            fields = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in fields:
                return int(fields["oom_kill"])
    with suppress(OSError):  # sandboxes such as gVisor have no such file
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields.get("oom_kill", 0))
    return 0


def _memory_events() -> list[Path]:
    """Files of this process's memory control group that count kills (cgroups(7)): version 1, then 2."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for kind, option, file in (("cgroup", "memory", "memory.oom_control"), ("cgroup2", "", "memory.events")):
        group = next((path for _, controllers, path in groups if option in controllers.split(",")), None)
        for mount in mounts:
            # Fields 4 and 5 are the part of the file system that is mounted, and where; see proc(5).
            name, options = mount[mount.index("-") + 1], mount[-1].split(",")
            if group is not None and name == kind and (not option or option in options):
                found.append(Path(mount[4]) / group.removeprefix(mount[3]).lstrip("/") / file)
    return found


def below_me(waited_for: int | None = None) -> list[psutil.Process]:
    """All living descendants. Dead adopted children are reaped, except `waited_for`, which has a Popen."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
            elif process.pid != waited_for:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue
    return living


def of_job(folder: Path) -> list[psutil.Process]:
    """Living processes of one job, found by their command lines from anywhere on this machine.

    In the midst of execve(2) a process has no command line, so nobody is believed only after some looks.
    """
    for pause_seconds in (0.05, 0.05, 0.0):
        if found := _named(os.fsencode(folder) + b"/"):
            return found
        time.sleep(pause_seconds)
    return []


def _named(marker: bytes) -> list[psutil.Process]:
    found = []
    for pid in process_ids():
        try:
            command = command_line(pid)
            if marker in command and any(module in command for module in _MODULES):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def end_tree(
    find: Callable[[], Iterable[psutil.Process]], grace_seconds: float = 2.0, limit_seconds: float = 6.0
) -> list[int]:
    """SIGTERM to all that `find` gives, SIGKILL to those that are left after the grace, until none is left.

    `find` is asked again and again, so that children born meanwhile are seen. Returns the pids that
    outlived the limit (a process in uninterruptible sleep can). Time counts from the first signals: on a busy machine
    a look may take longer than all of it, and nobody is given up who was not asked, and then killed.
    """
    asked_at: float | None = None
    killed_at: float | None = None
    asked: set[int] = set()
    while alive := list(find()):
        now = time.monotonic()
        if killed_at is not None and now - killed_at > limit_seconds - grace_seconds:
            return [process.pid for process in alive]
        asked_at = now if asked_at is None else asked_at
        if killed_at is None and asked and now - asked_at >= grace_seconds:
            killed_at = now
        for process in alive:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if killed_at is not None:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
        asked.update(process.pid for process in alive)
        time.sleep(0.02)
    return []
