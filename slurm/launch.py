"""Node side of a job: starts the ranks through torchrun, watches them, ends them, and says how it ended.

The launcher is the one process that always knows when a job is over. Without a scheduler it stands in a session of its
own, so that neither Ctrl-C at a terminal nor the death of the submitter touches it. Under Slurm one runs on each node
(`srun --ntasks-per-node=1`), stays where the scheduler's signals reach it, and ends with the process that started it;
the launchers of a job find each other first (`slurm.rollcall`). Whatever a launcher starts dies with it.

    python -m slurm.launch JOB_JSON

It exits with 0 when the job was seen to its end, however that was, and with 3 where its folder cannot be used here.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from configs.base import utc_now, write_atomically
from configs.job import Job, Launcher
from configs.paths import JobPaths
from configs.record import Status
from slurm import processes
from slurm.adapter import reserve_end, write_end
from slurm.node import Node, node_of, under_slurm
from slurm.ranks import Launch
from slurm.rollcall import Meeting, call_roll, digest_of, free_port
from slurm.turn import machine_turn
from slurm.verdict import NotStartedError, Verdict

NOT_SEEN = 3
"""Exit code where the job folder is not to be seen or written on this node."""


def isolate(log: Path, scheduled: bool) -> None:
    """Leave the submitter's output and signal mask, and without a scheduler its session; adopt orphans."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if scheduled:
        processes.end_with_parent()
        # Slurm and submitit send them before a time limit, to everything; ranks take SIGUSR1 for themselves.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    else:
        with suppress(PermissionError):  # a session's leader already
            os.setsid()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes.become_subreaper()


def scheduled_rank(paths: JobPaths) -> int | None:
    """Which node of a Slurm job this is; None for a job that no scheduler started, wherever it runs."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(paths.job.read_bytes())["target"]["kind"] == "slurm" and under_slurm(os.environ):
            return int(os.environ["SLURM_NODEID"])
    return None


def write_launcher(paths: JobPaths, node_rank: int | None, turn_at: str | None = None) -> None:
    """Say who runs this job, before anything is started; and again when the machine is its own."""
    pid = os.getpid()
    ticks = processes.start_ticks(pid)
    assert ticks is not None, "/proc must know this process"
    launcher = Launcher(
        node_rank=node_rank or 0,
        pid=pid,
        pid_started=ticks,
        host=socket.gethostname(),
        started_at=utc_now(),
        turn_at=turn_at,
    )
    path = paths.launcher if node_rank is None else paths.node_launcher(node_rank)
    write_atomically(path, launcher.model_dump_json())


def launch(paths: JobPaths, node_rank: int | None) -> tuple[Verdict, int | None]:
    """Run the job in this folder, or its part on this node. Returns how it ended and torchrun's exit code."""
    job = Job.model_validate_json(paths.job.read_bytes()).located(paths.folder)
    running = Launch(job, paths)

    def cancel(*_: object) -> None:
        running.cancelled = True

    signal.signal(signal.SIGTERM, cancel)
    signal.signal(signal.SIGINT, cancel)
    reserve_end(paths, node_rank)
    write_launcher(paths, node_rank)
    if node_rank is None:
        verdict = _in_turn(running)
    else:
        verdict = _with_other_nodes(running, node_of(os.environ))
    return verdict, running.agent.returncode if running.agent else None


def _in_turn(running: Launch) -> Verdict:
    """Without a scheduler: all of the job, when this machine is free."""
    if running.job.cell.nodes != 1:
        raise ValueError(
            f"{running.paths.job}: cell.nodes is {running.job.cell.nodes}; several nodes need a target of kind slurm, "
            "and Slurm to start this"
        )
    with machine_turn(give_up=lambda: running.cancelled) as mine:
        if not mine:
            message = "cancelled on request, before its turn on this machine"
            return Verdict(status=Status.CANCELLED, message=message)
        write_launcher(running.paths, None, turn_at=utc_now())
        running.meeting = Meeting(free_port())
        running.began = time.monotonic()
        return running.run()


def _with_other_nodes(running: Launch, node: Node) -> Verdict:
    """Under Slurm, which gives nodes to one job at a time or knows why not."""
    job = running.job
    if node.count != job.cell.nodes:
        raise ValueError(f"Slurm gave {node.count} nodes ({', '.join(node.names)}) to a job of {job.cell.nodes}")
    running.node = node
    digest = digest_of(running.paths.job)
    running.meeting, running.team = call_roll(node, job.name, digest, give_up=lambda: running.cancelled)
    running.began = time.monotonic()
    try:
        return running.run()
    except Exception as error:
        processes.end_tree(processes.below_me)
        running.team.confer(_launcher_failed(error), give_up=lambda: True)
        raise


def _launcher_failed(error: Exception) -> Verdict:
    if isinstance(error, NotStartedError):
        return error.verdict
    return Verdict(status=Status.FAILED, kind=type(error).__name__, message=f"the launcher failed: {error}")


def main(arguments: list[str]) -> int:
    """Run one job, or one node's part of it. Returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m slurm.launch JOB_JSON", file=sys.stderr)
        return 2
    paths = JobPaths(Path(arguments[0]).resolve().parent)
    node_rank = scheduled_rank(paths)
    try:
        isolate(paths.launcher_log if node_rank is None else paths.node_log(node_rank), node_rank is not None)
    except OSError as error:
        print(f"{paths.folder} cannot be used on {socket.gethostname()}: {error.strerror}", file=sys.stderr)
        return NOT_SEEN
    return_code = None
    try:
        verdict, return_code = launch(paths, node_rank)
    except Exception as error:
        if not isinstance(error, NotStartedError):
            with suppress(OSError):
                traceback.print_exc()
        processes.end_tree(processes.below_me)
        verdict = _launcher_failed(error)
    write_end(paths, verdict.as_end(return_code), node_rank)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
