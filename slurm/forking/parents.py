"""The processes from which this process's launches on its machine are forked (`slurm.forking.fork_parent`).

    start_parent(job, job_json)           # import ahead of the first launch, where there is something else to wait for
    pid = launch(job, job_json)      # the launcher, in a process of its own, as if it were started by itself
    end_parents()                    # when no more launches are to be made

A parent serves launches of one block only: each repeat of a cell comes from a parent of its own, with its own imports,
address space and hash seed, so repeats stay independent samples. It also serves one environment only, since libraries
read theirs when they are imported: a launch with other variables, cores or kind of work gets another parent.

submitit's local executor starts a parent. It is a bystander: it has no part in what the parent forks.
"""

import atexit
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import CommandFunction

from configs.common.files.reading import MIB, read_tail
from configs.common.system.forking import binds_threads
from configs.plans.job import Job
from slurm.forking.fork_parent import socket_in
from slurm.launcher.starting import is_private, rank_environment

START_LIMIT_SECONDS = 60.0
_ANSWER_SECONDS = 180.0
"""What an import may take on a busy machine or a slow file system."""
_MAX_PARENTS = 4
_FROM_PARENT = ("timed", "profile", "perf")
"""Passes whose ranks are forked from a parent. In the memory pass each node's agent imports what a rank has, and no
more, since modules of the launcher would count as memory of the rank; in the nsys pass each rank begins afresh."""
_NEVER_MINUTES = 60 * 24 * 365
_POLL_SECONDS = 0.02
_LOG_CHARACTERS = 2000
_END_SECONDS = 2.0

_lock = threading.Lock()
_parents: "dict[tuple[object, ...], ForkParent]" = {}
_ending: list[Any] = []  # jobs of submitit, which must be asked for the exit code or leave a zombie
_block: tuple[object, ...] | None = None


class ParentLost(OSError):
    """A parent has ended, or does not answer."""


class ForkParent:
    """One parent and the socket to it; closing that ends it. Raises ParentLost."""

    def __init__(self, environment: Mapping[str, str], preload: Path | None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rankwise-"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                with socket_in(self._folder) as path:
                    listener.bind(path)
                listener.listen(1)
                self._job = _submit(self._folder)
                self._connection = self._accept(listener)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        try:
            self._ask({"environment": dict(environment)})
            self.unfit: str | None = self._ask({"preload": preload and str(preload)})["unfit"]
        except BaseException:
            self.end()
            raise

    def launch(self, job_json: Path) -> int:
        """Fork a launcher. Returns its pid."""
        answer = self._ask({"launch": str(job_json)})
        if "error" in answer:
            raise OSError(f"{sys.executable} cannot be forked: {answer['error']}")
        pid = int(answer["pid"])
        self._send({"start": pid})
        return pid

    def end(self) -> None:
        """Let it end; launchers that it has forked go on. Does not wait for that."""
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)  # it does so itself where this process is killed
        _ending.append(self._job)

    def _accept(self, listener: socket.socket) -> socket.socket:
        deadline = time.monotonic() + START_LIMIT_SECONDS
        listener.settimeout(_POLL_SECONDS)
        while True:
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                late = not self._job.done()
                if late and time.monotonic() < deadline:
                    continue
                within = f" within {START_LIMIT_SECONDS:g} s" if late else ""
                raise ParentLost(
                    f"{sys.executable} -m slurm.forking.fork_parent did not start{within}: {self._said()}"
                ) from None
            connection.settimeout(_ANSWER_SECONDS)
            return connection

    def _send(self, request: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except (ConnectionError, TimeoutError) as error:
            raise self._lost(error) from error

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._send(request)
        received = b""
        try:
            while not received.endswith(b"\n"):
                piece = self._connection.recv(65536)
                if not piece:
                    raise ParentLost(f"slurm.forking.fork_parent has ended: {self._said()}")
                received += piece
        except (ConnectionError, TimeoutError) as error:
            raise self._lost(error) from error
        answer: dict[str, Any] = json.loads(received)
        return answer

    def _lost(self, error: OSError) -> ParentLost:
        late = isinstance(error, TimeoutError)
        how = f"did not answer within {self._connection.gettimeout():g} s" if late else f"does not answer ({error})"
        return ParentLost(f"slurm.forking.fork_parent {how}: {self._said() or 'it wrote nothing'}")

    def _said(self) -> str:
        logs = sorted(self._folder.glob("*.log*"))
        return " ".join(" ".join(read_tail(log, MIB).split()) for log in logs)[-_LOG_CHARACTERS:]


def _submit(folder: Path) -> Any:
    """Start a parent through submitit, detached from this process's terminal and output."""
    executor = submitit.LocalExecutor(folder=folder)
    # `trap` keeps the shell alive as the controller's parent, by whose pid submitit names the job's files;
    # a signal that a shell ignores is ignored by what it starts.
    executor.update_parameters(
        timeout_min=_NEVER_MINUTES,
        setup=[
            "trap '' INT HUP QUIT TSTP",
            "trap : TERM",
            "export PYTHONSAFEPATH=1",
            *_unset_private(),
            f"exec </dev/null >>{shlex.quote(str(folder / 'controller.log'))} 2>&1",
        ],
    )
    command = [sys.executable, "-m", "slurm.forking.fork_parent", str(folder)]
    return executor.submit(CommandFunction(command, verbose=False))


def _unset_private() -> list[str]:
    """A line of shell that keeps secrets from the parent; submitit passes the whole environment on."""
    names = [
        name
        for name, value in os.environ.items()
        if is_private(name, value) and not name.startswith("SUBMITIT_") and name.isascii() and name.isidentifier()
    ]
    return [f"unset {' '.join(sorted(names))}"] if names else []


@dataclass(frozen=True)
class _Wanted:
    """What a launch needs of its parent."""

    block: tuple[object, ...]
    key: tuple[object, ...]
    environment: dict[str, str]


def _wanted(job: Job) -> _Wanted:
    environment = rank_environment(job, os.environ, launcher_pid=0)
    block = (job.measuring_pass, job.measurements[0].repeat)
    place = (os.getcwd(), tuple(sorted(os.sched_getaffinity(0))))
    return _Wanted(block, (*block, job.cell.workload.kind, place, tuple(sorted(environment.items()))), environment)


def launch(job: Job, job_json: Path) -> int:
    """Fork a launcher for this job from a parent that may serve it. Returns its pid. Raises OSError."""
    wanted = _wanted(job)
    with _lock:
        _forget_other_blocks(wanted.block)
        if wanted.key in _parents:
            try:
                return _parents[wanted.key].launch(job_json)
            except ParentLost:
                _parents.pop(wanted.key).end()
        return _add_parent(wanted, job, job_json).launch(job_json)


def start_parent(job: Job, job_json: Path) -> None:
    """Start the parent that will serve a launch of this kind, and return when it has imported. Raises OSError.

    job_json: read by the parent while it imports, and not needed later.
    """
    wanted = _wanted(job)
    with _lock:
        _forget_other_blocks(wanted.block)
        if wanted.key not in _parents:
            _add_parent(wanted, job, job_json)


def _add_parent(wanted: _Wanted, job: Job, job_json: Path) -> ForkParent:
    while len(_parents) >= _MAX_PARENTS:
        _parents.pop(next(iter(_parents))).end()
    preloads = job.measuring_pass in _FROM_PARENT and not binds_threads(wanted.environment)
    parent = _start(wanted.environment, job_json if preloads else None)
    _parents[wanted.key] = parent
    return parent


def _start(environment: Mapping[str, str], preload: Path | None) -> ForkParent:
    """A parent with the ranks' modules; where those make it unfit to fork, one for launchers alone."""
    parent = ForkParent(environment, preload)
    if parent.unfit is not None:
        parent.end()
        parent = ForkParent(environment, None)
    return parent


def _forget_other_blocks(block: tuple[object, ...]) -> None:
    global _block
    if block != _block:
        _end_all()
        _block = block
    _ending[:] = [job for job in _ending if not job.done()]


def end_parents() -> None:
    """End all parents of this process, and wait a moment for that; launches that go on are left alone."""
    with _lock:
        _end_all()
        deadline = time.monotonic() + _END_SECONDS
        while _ending and time.monotonic() < deadline:
            _ending[:] = [job for job in _ending if not job.done()]
            time.sleep(_POLL_SECONDS)


def _end_all() -> None:
    while _parents:
        _parents.popitem()[1].end()


@atexit.register
def _end_parents_at_exit() -> None:
    with suppress(KeyboardInterrupt):  # a second Ctrl-C: parents end with this process
        end_parents()
