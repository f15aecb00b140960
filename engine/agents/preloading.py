"""Import what the ranks of a job need in the process from which they are forked, and let their launcher start them.

    preload(job_json)                     # modules and nothing else: no model, no device, no thread, no process group
    ranks = prepare_ranks(2, job_json)    # processes that wait; none where forking is not possible
    popen = RankStarter(ranks)            # torchrun's or DeepSpeed's `subprocess.Popen`

A rank is forked before its launcher (torchrun's agent or DeepSpeed's) has made anything of its own, such as the store
with its threads, and begins when the launcher starts it.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.system.forking import Forked, binds_threads, fork, run_module, unfit_to_fork
from engine.rank.processes import die_with_parent

_WORKER = "engine.worker"


def preload(job_json: Path) -> None:
    """Import what every rank of this job needs. Raises ImportError and OSError.

    In the memory pass only what a rank has before its first measurement anyway: what is imported later counts as the
    cell's.
    """
    from configs.plans.job import Job
    from engine.worker import WORKLOADS

    job = read_model(job_json, Job, PLAN_BYTES)
    names = ["numpy", "torch", "engine.rank.host_usage", "engine.context", WORKLOADS[job.cell.workload.kind]]
    if job.measuring_pass != "memory" and job.cell.model is not None:
        # torch imports it, for most of a second, when a compiled operator is called for the first time.
        names += ["torch._dynamo"]
    for name in names:
        importlib.import_module(name)


def prepare_ranks(count: int, job_json: Path) -> "list[WaitingRank]":
    """Processes that become this node's ranks; none where they must begin afresh, which the log says."""
    from configs.plans.job import Job

    if read_model(job_json, Job, PLAN_BYTES).measuring_pass == "nsys":
        return []  # each puts nsys in its own place, which starts a fresh one
    unfit: str | None = "OpenMP is told to bind threads"
    if not binds_threads(os.environ):
        try:
            preload(job_json)
            unfit = unfit_to_fork()
        except Exception as error:  # a rank says so better, to its own log
            unfit = f"{type(error).__name__}: {error}"
    if unfit is not None:
        print(f"each rank imports for itself: {unfit}", file=sys.stderr)
        return []
    return [WaitingRank() for _ in range(count)]


class WaitingRank:
    """A forked process that waits for its arguments and environment, and ends with the process that forked it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()

        def wait() -> int:
            die_with_parent(parent)
            os.setsid()
            ours.close()
            theirs.sendall(b"\n")
            with theirs, theirs.makefile("rb") as lines:
                line = lines.readline()
            if not line:
                return 1
            told = json.loads(line)
            return run_module(_WORKER, told["arguments"], told["environment"])

        self.process: Forked = fork(wait)
        theirs.close()
        self._connection = ours

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """Start the rank. Raises OSError where it has ended meanwhile."""
        with self._connection as connection:
            if not connection.recv(1):  # a session of its own is made, which is signalled as a group
                raise ChildProcessError(f"the process that was to become a rank, pid {self.process.pid}, has ended")
            message = {"arguments": list(arguments), "environment": dict(environment)}
            connection.sendall(json.dumps(message).encode() + b"\n")
        return self.process

    def dismiss(self) -> None:
        """End it, if it never began."""
        with suppress(OSError):
            self._connection.close()
        self.process.kill()
        self.process.wait()


class RankStarter:
    """Stands for `subprocess.Popen` in a launcher of ranks: the processes that wait first, then new ones.

    started: the processes by rank.
    """

    def __init__(self, waiting: Sequence[WaitingRank]) -> None:
        self._waiting = list(waiting)
        self.started: dict[int, Forked | subprocess.Popen[bytes]] = {}

    def __call__(
        self, args: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> "Forked | subprocess.Popen[bytes]":
        """Start a rank by the command `python [options] -m engine.worker arguments`."""
        arguments = list(args)
        process: Forked | subprocess.Popen[bytes]
        if self._waiting and arguments[0] == sys.executable and _WORKER in arguments:
            process = self._waiting.pop(0).begin(arguments[arguments.index(_WORKER) + 1 :], env)
        else:
            process = subprocess.Popen(arguments, env=dict(env), **options)
        self.started[int(env["RANK"])] = process
        return process

    def dismiss(self) -> None:
        """End the processes that nobody wanted."""
        while self._waiting:
            self._waiting.pop().dismiss()
