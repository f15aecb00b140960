"""Life cycle of the ranks of one node: start, monitor, end, and clean up.

Only data written by the ranks is read (progress, parts, exit codes), never a log.
"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from configs.common.failure_kinds import NODE_LOST, OTHER_NODE, PEER_LOST, PROCESS_DIED, SUSPENDED
from configs.common.files.reading import read_json
from configs.common.system.forking import Forked
from configs.common.system.proc import is_alive
from configs.plans.job import Job, Progress
from configs.plans.paths import JobPaths
from configs.records.record import Status, read_part
from slurm.launcher import processes
from slurm.launcher.end_cause import JobVerdict
from slurm.launcher.job_files import measurement_under_way, read_progress
from slurm.launcher.node import GIVEN, JobNode
from slurm.launcher.node_registration import Rendezvous
from slurm.launcher.peer_monitor import Alone, PeerMonitor
from slurm.launcher.starting import exits_file, rank_environment, start_argv, start_process
from slurm.staging.version import code_version

STARTUP_LIMIT_SECONDS = 180.0
FINISH_LIMIT_SECONDS = 20.0  # after every rank has said that it finished
NODES_FINISH_LIMIT_SECONDS = 1.0  # of several nodes: torchrun's exit barrier is not waited for
NSYS_FINISH_LIMIT_SECONDS = 300.0  # nsys writes its report then
STACKS_SECONDS = 0.5  # for the ranks to put their stacks into their logs before they are ended
YOUNG_SECONDS = 10.0

_TREE_GRACE_SECONDS = 2.0
_HURRIED_GRACE_SECONDS = 0.2  # Slurm looks only seconds later again at a job that has not ended within one (slurmd)
_AGENT_SECONDS = 4.0  # torchrun notices a rank's end within 0.1 s and ends the others within 2 s
_PAUSE_SECONDS = 1.0  # between two looks of a launcher that was stopped meanwhile; they come five times a second
_SIGTERM_SECONDS = 0.3  # between a signal's arrival at the ranks and here, where the scheduler sends it to all


@dataclass
class RankSupervisor:
    """One torchrun and its ranks. `node` is None where no scheduler started this job; then it is the whole job."""

    job: Job
    paths: JobPaths
    node: JobNode | None = None
    cancelled: bool = False
    continued: bool = False
    """SIGCONT came since the last look."""
    parent: int = field(default_factory=os.getppid)
    meeting: Rendezvous = field(default_factory=lambda: Rendezvous(0))
    peer_monitor: PeerMonitor = field(default_factory=Alone)
    agent: "subprocess.Popen[bytes] | Forked | None" = None
    began: float = field(default_factory=time.monotonic)
    # Asked before the roll call: git may take longer than the other nodes wait for a sign of life.
    code: dict[str, str] = field(default_factory=code_version)
    oom_kills_before: int = field(default_factory=processes.oom_kills)
    _measuring: dict[int, tuple[tuple[str | None, float], float]] = field(default_factory=dict)
    """By rank: which measurement it began when by its clock, and when by ours that was first seen."""
    _looked_at: float | None = None
    _under_way: str | None = None
    """The measurement that some rank was making at the last look."""

    @property
    def node_rank(self) -> int:
        """Of this node among the job's."""
        return self.node.rank if self.node else 0

    @property
    def ranks(self) -> range:
        """This node's ranks."""
        first = self.node_rank * self.job.ranks_per_node
        return range(first, first + self.job.ranks_per_node)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Of the job's nodes, by rank, as the others reach them."""
        return () if self.node is None else self.node.addresses or self.node.names

    @property
    def agent_folder(self) -> Path:
        """Where torchrun keeps what it has to say."""
        return self.paths.folder / ("torchrun" if self.node is None else f"torchrun_{self.node_rank}")

    def run(self) -> JobVerdict:
        """Start the ranks, wait until they end or must be ended, and clean up."""
        job_json = self.paths.job.resolve()
        self.agent_folder.mkdir(exist_ok=True)
        launcher = os.getpid()
        environment = rank_environment(self.job, os.environ, launcher, self.meeting.interface)
        visible = environment.get("CUDA_VISIBLE_DEVICES")  # with that of the target's or the cell's `env`
        argv = start_argv(self.job, job_json, self.node_rank, self.meeting, self.agent_folder, visible, self.hosts)
        # DeepSpeed's launcher does not say how many ranks the node has.
        self.agent = start_process(argv, environment | self.code | {"LOCAL_WORLD_SIZE": str(self.job.ranks_per_node)})
        verdict = self.watch()
        left = self.end(self.grace_seconds(verdict))
        verdict = verdict or self.outcome()
        if left:
            verdict = verdict.with_message(f"(processes left: pids {left})")
        return self.agreed(verdict)

    def watch(self) -> JobVerdict | None:
        """Wait for torchrun to end (None) or for a reason to end it."""
        assert self.agent is not None
        finished_at: float | None = None
        while True:
            age = time.monotonic() - self.began
            ended = False
            with suppress(subprocess.TimeoutExpired):
                self.agent.wait(0.05 if age < YOUNG_SECONDS else 0.2)
                ended = True
            if self.cancelled and not ended:
                return self.cancellation()
            ranks = self.progress()
            if (pause := self.pause_seconds()) and (verdict := self.suspended(ranks, pause)):
                return verdict
            self._under_way = _measurement_of(ranks)
            if ended:
                return None
            news = self.peer_monitor.exchange(
                all(progress and progress.phase == "finished" for progress in ranks.values())
            )
            if news.finished:
                finished_at = finished_at or time.monotonic()
                if time.monotonic() - finished_at > self.finish_limit_seconds:
                    said = "the ranks finished, but torchrun did not exit" if self.job.cell.nodes == 1 else None
                    return JobVerdict(status=Status.COMPLETED, message=said)
            elif news.stop:
                return self.stopped(ranks)
            elif verdict := self.overdue(ranks, age):
                self.dump_stacks(ranks)
                return verdict

    @property
    def finish_limit_seconds(self) -> float:
        """How long torchrun is given after every rank of the job has finished."""
        if self.job.measuring_pass == "nsys":
            return NSYS_FINISH_LIMIT_SECONDS
        return FINISH_LIMIT_SECONDS if self.job.cell.nodes == 1 else NODES_FINISH_LIMIT_SECONDS

    def grace_seconds(self, verdict: JobVerdict | None) -> float:
        """From SIGTERM to SIGKILL for what is left. Whoever holds nodes of a cluster shall not hold them longer."""
        hurry = self.node is not None and verdict and verdict.status in (Status.COMPLETED, Status.CANCELLED)
        return _HURRIED_GRACE_SECONDS if hurry else _TREE_GRACE_SECONDS

    def progress(self) -> dict[int, Progress | None]:
        """What each rank of this node does now."""
        return {rank: read_progress(self.paths, rank) for rank in self.ranks}

    @property
    def orphaned(self) -> bool:
        """Whether the scheduler's daemon that started the launcher has ended.

        As a cancellation it arrives as SIGTERM (`end_with_parent`), but the launcher then has another parent. On a host
        without a scheduler the shell that started the launcher ends at once, which means nothing.
        """
        return GIVEN not in os.environ and os.getppid() != self.parent

    def cancellation(self) -> JobVerdict:
        """Return the verdict of a cancellation request, or of the end of the scheduler's daemon on this node."""
        if self.node is not None and self.orphaned:
            name = self.node.name
            message = f"{name}: the scheduler's daemon ended, which had started this job's part"
            return JobVerdict(
                status=Status.NODE_FAILED,
                kind=NODE_LOST,
                nodes=(name,),
                measurement=measurement_under_way(self.paths),
                message=message,
            )
        message = "cancelled on request"
        return JobVerdict(status=Status.CANCELLED, measurement=measurement_under_way(self.paths), message=message)

    def stopped(self, ranks: dict[int, Progress | None]) -> JobVerdict | None:
        """Return the verdict after the end of another node; None if this node's ranks report a cause."""
        assert self.agent is not None
        if any(progress and not _is_well(progress) for progress in ranks.values()):
            with suppress(subprocess.TimeoutExpired):
                self.agent.wait(_AGENT_SECONDS)
                return None
        self.dump_stacks(ranks)
        return JobVerdict(
            status=Status.FAILED,
            measurement=measurement_under_way(self.paths),
            kind=OTHER_NODE,
            message="ended because another node ended",
            silent_ranks=_in_measurement(ranks),
        )

    def pause_seconds(self) -> float:
        """For how long this launcher, and so its ranks, were stopped since the last look; 0 where they were not.

        A gap alone can be a file system that stalled, while the ranks went on; SIGCONT comes with every `scancel` too.
        """
        now, before = time.monotonic(), self._looked_at
        continued, self._looked_at, self.continued = self.continued, now, False
        gap = 0.0 if before is None else now - before
        return gap if continued and gap > _PAUSE_SECONDS else 0.0

    def suspended(self, ranks: dict[int, Progress | None], pause: float) -> JobVerdict | None:
        """Return the verdict on a measurement with a pause in it; None where there is none: no limit counts the pause.

        Slurm and PBS suspend a job for another one, and let it go on later. A rank that slept may have finished its
        measurement before this look, which came later than the rank's first instant.
        """
        paused = self._under_way or _measurement_of(ranks)
        if self.node is None or paused is None:
            self.began += pause
            self._measuring = {rank: (said, seen_at + pause) for rank, (said, seen_at) in self._measuring.items()}
            return None
        message = f"the job was suspended for {pause:.0f} s during the measurement, whose times would contain the pause"
        return JobVerdict(status=Status.PREEMPTED, kind=SUSPENDED, measurement=paused, message=message)

    def overdue(self, ranks: dict[int, Progress | None], age: float) -> JobVerdict | None:
        """The time limit that is exceeded: of the job, of a measurement, or of the start."""
        if age > self.job.timeout_seconds:
            limit = f"time-out of the job after {self.job.timeout_seconds:g} s"
            measurement = measurement_under_way(self.paths)
            return JobVerdict(status=Status.TIMEOUT, measurement=measurement, kind="JobTimeout", message=limit)
        limit_seconds = self.job.measuring.cell_timeout_seconds
        for progress in ranks.values():
            if progress and progress.phase == "measurement" and self.measuring_seconds(progress) > limit_seconds:
                limit = f"time-out of the cell after {limit_seconds:g} s"
                return JobVerdict(
                    status=Status.TIMEOUT, measurement=progress.measurement, kind="CellTimeout", message=limit
                )
        starting = [rank for rank, progress in ranks.items() if not progress or progress.phase == "starting"]
        if starting and age > STARTUP_LIMIT_SECONDS:
            limit = f"time-out of the start: ranks {starting} not ready after {STARTUP_LIMIT_SECONDS:g} s"
            return JobVerdict(status=Status.TIMEOUT, kind="StartTimeout", message=limit)
        return None

    def measuring_seconds(self, progress: Progress) -> float:
        """Seconds since a rank was first seen in its measurement: the clock that it goes by may be set meanwhile."""
        now = time.monotonic()
        said = (progress.measurement, progress.since)
        before, seen_at = self._measuring.get(progress.rank, (None, now))
        if before != said:
            self._measuring[progress.rank] = (said, now)
            return 0.0
        return now - seen_at

    def dump_stacks(self, ranks: dict[int, Progress | None]) -> None:
        """Let every rank put the stacks of its threads into its log."""
        for progress in ranks.values():
            if progress and is_alive(progress.pid, progress.pid_started):
                with suppress(ProcessLookupError):
                    os.kill(progress.pid, signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)

    def end(self, grace_seconds: float = _TREE_GRACE_SECONDS) -> list[int]:
        """End all that is left below this process. Returns pids that could not be ended."""
        assert self.agent is not None
        agent = self.agent

        def left() -> list[psutil.Process]:
            agent.poll()
            return processes.below_me(waited_for=agent.pid)

        survivors = processes.end_tree(left, grace_seconds=grace_seconds)
        agent.poll()
        return survivors

    def outcome(self) -> JobVerdict:
        """Return the verdict from the ranks' progress after torchrun exited by itself."""
        ranks = self.progress()
        if all(progress and progress.phase == "finished" for progress in ranks.values()):
            return JobVerdict(status=Status.COMPLETED)
        said = [progress for progress in ranks.values() if progress and progress.phase == "failed"]
        first = sorted(said, key=lambda progress: (progress.kind == PEER_LOST, progress.since))
        if first and first[0].kind != PEER_LOST:
            return self.blame(first[0])
        for rank, code in self.exit_codes().items():
            if code < 0 and code != -signal.SIGTERM:
                return self.killed(rank, ranks[rank], _signal_name(-code))
        if first:
            return self.blame(first[0], ranks)
        message = f"a rank exited without an error message, see {self.log.name}"
        measurement = measurement_under_way(self.paths)
        return JobVerdict(status=Status.FAILED, measurement=measurement, kind=PROCESS_DIED, message=message)

    @property
    def log(self) -> Path:
        """What the launcher says, and torchrun."""
        return self.paths.launcher_log if self.node is None else self.paths.node_log(self.node_rank)

    def agreed(self, verdict: JobVerdict) -> JobVerdict:
        """What the nodes agree on. A scheduler's SIGTERM comes to the ranks as well, and may come to them first."""
        if self.node is not None and verdict.status is not Status.COMPLETED and not self.cancelled:
            time.sleep(_SIGTERM_SECONDS)
        if self.cancelled and verdict.status is not Status.COMPLETED:
            verdict = self.cancellation()
        verdict = self.peer_monitor.confer(verdict, give_up=lambda: self.cancelled)
        return self.cancellation() if self.cancelled and verdict.status is not Status.COMPLETED else verdict

    def exit_codes(self) -> dict[int, int]:
        """Exit codes other than 0 of this node's ranks as torchrun's agent saw them; negative: a signal."""
        try:
            exits = read_json(exits_file(self.agent_folder))
        except (FileNotFoundError, ValueError):
            return {}
        return {exit["rank"]: exit["exit_code"] for exit in exits}

    def killed(self, rank: int, progress: Progress | None, name: str) -> JobVerdict:
        """Return the verdict of a rank killed by a signal, including the kernel's out-of-memory killer."""
        status, message = Status.FAILED, f"rank {rank} was killed by {name}"
        if name == "SIGKILL" and processes.oom_kills() > self.oom_kills_before:
            status, message = Status.OUT_OF_MEMORY, f"rank {rank} was killed by the kernel (out of memory)"
        measurement = progress.measurement if progress else None
        return JobVerdict(status=status, measurement=measurement, rank=rank, kind=name, message=message)

    def blame(self, progress: Progress, ranks: dict[int, Progress | None] | None = None) -> JobVerdict:
        """Return the verdict of a rank that reported its failure; its part, if written, has the status.

        If ranks lost a silent peer, the failure is attributed to the rank still in its measurement.
        """
        if progress.kind == "SIGKILL":  # the memory pass's child
            return self.killed(progress.rank, progress, progress.kind)
        status = Status.OUT_OF_MEMORY if progress.kind in ("MemoryError", "OutOfMemoryError") else Status.FAILED
        if progress.measurement:
            with suppress(OSError, ValueError):
                part = read_part(self.paths.part(progress.measurement, progress.rank))
                status = part.status if part.failure else status
        silent = _in_measurement(ranks or {})
        return JobVerdict(
            status=status,
            measurement=progress.measurement,
            rank=silent[0] if len(silent) == 1 else progress.rank,
            kind=progress.kind,
            message=f"rank {progress.rank}: {progress.message}",
            silent_ranks=silent,
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have none
        return f"signal {number}"


def _in_measurement(ranks: dict[int, Progress | None]) -> tuple[int, ...]:
    return tuple(rank for rank, progress in ranks.items() if progress and progress.phase == "measurement")


def _measurement_of(ranks: dict[int, Progress | None]) -> str | None:
    """The measurement that a rank of this node makes; None between two."""
    return next((said.measurement for said in ranks.values() if said and said.phase == "measurement"), None)


def _is_well(progress: Progress) -> bool:
    """Whether the rank works or has finished, as far as it said."""
    if progress.phase == "finished":
        return True
    return progress.phase != "failed" and is_alive(progress.pid, progress.pid_started)
