"""Launcher on the nodes of a job: start the ranks with torchrun, monitor them, end them, and record the outcome.

Without a scheduler, the launcher runs in its own session, so neither Ctrl-C at a terminal nor the death of the
submitter affects it; on several hosts, one launcher on each waits until all are free. Under Slurm or PBS, one launcher
runs on each node (a task of srun or pbsdsh), receives the scheduler's signals, and ends with its parent process. The
launchers of a job first register with the head node (`slurm.launcher.node_registration`). All processes started by a
launcher die with it.

    python -m slurm.launch JOB_JSON

Exit code 0: the job has ended, with any outcome, or is a requeued or superseded one, which is not run; 3: its folder
cannot be used on this node.
"""

import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import PLAN_BYTES, read_json, read_model
from configs.common.system.ports import free_port
from configs.common.system.proc import become_subreaper, end_with_parent, start_ticks
from configs.plans.job import Job, Launcher, Submission
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.targets.resources import ClusterTarget
from slurm.launcher import processes
from slurm.launcher.end_cause import JobVerdict, NotStartedError
from slurm.launcher.job_files import remove_scripts, reserve_end, write_end
from slurm.launcher.machine_lock import LOCK_POLL_SECONDS, launch_lock
from slurm.launcher.node import (
    GIVEN,
    JobNode,
    given_node,
    node_name,
    node_of,
    pbs_node,
    rank_under,
    restarts,
    under_pbs,
    under_slurm,
)
from slurm.launcher.node_registration import Rendezvous, call_roll, digest_of
from slurm.launcher.peer_monitor import limits_of
from slurm.launcher.ranks import RankSupervisor

NOT_SEEN = 3
"""Exit code where the job folder is not to be seen or written on this node."""

RELEASE_SECONDS = 1800.0
"""So long a host that was taken for a job waits for the other hosts: the run that takes them may have died."""


def isolate(log: Path, scheduled: bool) -> None:
    """Leave the submitter's output and signal mask, and without a scheduler its session; adopt orphans."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if scheduled:
        end_with_parent(signal.SIGTERM)
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
    become_subreaper()


def scheduled_rank(paths: JobPaths) -> int | None:
    """Which node of a cluster's job this is; None for a job of this machine alone, wherever it runs."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return rank_under(read_json(paths.job, PLAN_BYTES)["target"]["kind"], os.environ)
    return None


def write_launcher(paths: JobPaths, node_rank: int | None, lock_acquired_at: str | None = None) -> None:
    """Say who runs this job, before anything is started; and again when the machine is its own."""
    pid = os.getpid()
    launcher = Launcher(
        node_rank=node_rank or 0,
        pid=pid,
        pid_started=start_ticks(pid),
        host=socket.gethostname() if node_rank is None else node_name(os.environ),
        started_at=utc_now(),
        lock_acquired_at=lock_acquired_at,
        restarts=0 if node_rank is None else restarts(os.environ),
        step_id=None if node_rank is None else os.environ.get("SLURM_STEP_ID"),
    )
    path = paths.launcher if node_rank is None else paths.node_launcher(node_rank)
    write_atomically(path, launcher.model_dump_json())


def is_second_time(paths: JobPaths, node_rank: int) -> bool:
    """Whether a scheduler runs a job of ours again that had begun before: it would overwrite what the first time left.

    A bundle's job, which nobody submitted from here, goes on where it stopped instead. PBS does not count.
    """
    if under_pbs(os.environ):
        return paths.node_launcher(node_rank).exists()
    if not paths.submitting.exists() or not (now := restarts(os.environ)):
        return False
    for path in paths.folder.glob("launcher_*.json"):
        with suppress(OSError, ValueError):
            if read_model(path, Launcher).restarts < now:
                return True
    return False


def is_superseded(paths: JobPaths) -> bool:
    """Whether a scheduler took this job late: it was given up already, or submitted again, as another job of its own.

    A bundle's job, which nobody submitted from here, never is.
    """
    if not paths.submitting.exists():
        return False
    if paths.end.exists():
        return True
    task = "_".join(os.environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    own = (os.environ.get("SLURM_JOB_ID"), task)
    with suppress(OSError, ValueError):
        return under_slurm(os.environ) and read_model(paths.submission, Submission).job_id not in own
    return False


def launch(paths: JobPaths, node_rank: int | None) -> tuple[JobVerdict, int | None]:
    """Run the job in this folder, or its part on this node. Returns how it ended and torchrun's exit code."""
    job = read_model(paths.job, Job, PLAN_BYTES).located(paths.folder)
    running = RankSupervisor(job, paths)

    def cancel(*_: object) -> None:
        running.cancelled = True

    def went_on(*_: object) -> None:
        running.continued = True

    signal.signal(signal.SIGCONT, went_on)
    signal.signal(signal.SIGTERM, cancel)
    signal.signal(signal.SIGINT, cancel)
    reserve_end(paths, node_rank)
    write_launcher(paths, node_rank)
    given = given_node(os.environ)
    if node_rank is None:
        verdict = _holding_lock(running)
    elif given is not None:
        verdict = _in_turn(running, given)
    else:
        node = pbs_node(os.environ) if job.target.kind == "pbs" else node_of(os.environ)
        verdict = _with_other_nodes(running, node)
    return verdict, running.agent.returncode if running.agent else None


def _holding_lock(running: RankSupervisor) -> JobVerdict:
    """Without a scheduler: all of the job, when this machine is free."""
    if running.job.cell.nodes != 1:
        raise ValueError(
            f"{running.paths.job}: cell.nodes: got {running.job.cell.nodes}. Multiple nodes require a target "
            "of a cluster and a launch by its scheduler"
        )
    with launch_lock(give_up=lambda: running.cancelled) as mine:
        if not mine:
            message = "cancelled on request, while waiting for the machine lock"
            return JobVerdict(status=Status.CANCELLED, message=message)
        write_launcher(running.paths, None, lock_acquired_at=utc_now())
        running.meeting = Rendezvous(free_port())
        running.began = time.monotonic()
        return running.run()


def _in_turn(running: RankSupervisor, node: JobNode) -> JobVerdict:
    """On a host that nobody allots: this node's part, when this machine and those of all others are free."""
    with launch_lock(give_up=lambda: running.cancelled) as mine:
        if not mine:
            return JobVerdict(
                status=Status.CANCELLED, message="cancelled on request, while waiting for the machine lock"
            )
        write_launcher(running.paths, node.rank, lock_acquired_at=utc_now())
        deadline = time.monotonic() + RELEASE_SECONDS
        while node.count > 1 and not running.paths.go.exists():
            if running.cancelled:
                return JobVerdict(
                    status=Status.CANCELLED, message="cancelled on request, while waiting for other hosts"
                )
            if time.monotonic() > deadline:
                message = (
                    f"{node.name}: the other hosts of the job were not free within {RELEASE_SECONDS / 60:g} minutes"
                )
                return JobVerdict(status=Status.LOST, kind="NotReleased", message=message)
            time.sleep(LOCK_POLL_SECONDS)
        return _with_other_nodes(running, node)


def _with_other_nodes(running: RankSupervisor, node: JobNode) -> JobVerdict:
    """On nodes that are this job's: a scheduler gave them, or the lock of each is held."""
    job = running.job
    if node.count != job.cell.nodes:
        raise ValueError(
            f"nodes: got {node.count} from {_scheduler(job)} ({', '.join(node.names)}), expected {job.cell.nodes}"
        )
    running.node = node
    digest = digest_of(running.paths.job)
    try:
        running.meeting, running.peer_monitor = call_roll(
            node, job.name, digest, give_up=lambda: running.cancelled, limits=limits_of(job.target)
        )
    except NotStartedError as error:
        raise (NotStartedError(running.cancellation()) if running.orphaned else error) from None
    running.began = time.monotonic()
    try:
        return running.run()
    except Exception as error:
        processes.end_tree(processes.below_me)
        running.peer_monitor.confer(_launcher_failed(error), give_up=lambda: True)
        raise


def _scheduler(job: Job) -> str:
    assert isinstance(job.target, ClusterTarget), "another target has no scheduler"
    return job.target.scheduler


def _launcher_failed(error: Exception) -> JobVerdict:
    if isinstance(error, NotStartedError):
        return error.verdict
    return JobVerdict(status=Status.FAILED, kind=type(error).__name__, message=f"the launcher failed: {error}")


def main(arguments: list[str]) -> int:
    """Run one job, or one node's part of it. Returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m slurm.launch JOB_JSON", file=sys.stderr)
        return 2
    paths = JobPaths(Path(arguments[0]).resolve().parent)
    node_rank = scheduled_rank(paths)
    try:
        scheduled = node_rank is not None and GIVEN not in os.environ
        isolate(paths.launcher_log if node_rank is None else paths.node_log(node_rank), scheduled)
    except OSError as error:
        print(f"{paths.folder}: not usable on {socket.gethostname()}: {error.strerror}", file=sys.stderr)
        return NOT_SEEN
    if node_rank is not None and is_second_time(paths, node_rank):
        with suppress(OSError):
            paths.requeued.touch()
        print(f"{paths.folder}: requeued, and not run again", file=sys.stderr)
        return 0
    if scheduled and is_superseded(paths):
        print(f"{paths.folder}: given up or submitted again meanwhile, and not run", file=sys.stderr)
        return 0
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
    if scheduled and not processes.below_me():
        # Nobody may collect a bundle for days. Of other jobs whoever collects them removes it, before anything else is
        # measured on this machine: it may take a while.
        remove_scripts(paths, node_rank)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
