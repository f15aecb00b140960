"""Node side of a job: starts the ranks through torchrun, watches them, ends them, and says how it ended.

The launcher is the one process that always knows when a job is over. It stands in a session of its own,
so that neither Ctrl-C at a terminal nor the death of the submitter touches it; whatever it starts dies
with it. It reads only files that ranks write as data (progress, parts, exit codes), never a log.

    python -m slurm.launch JOB_JSON
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import configs
from configs.base import utc_now, write_atomically
from configs.job import Job, JobEnd, Launcher, Progress
from configs.paths import JobPaths
from configs.record import Status, read_part
from slurm import processes
from slurm.adapter import read_progress, reserve_end, visit_under_way, write_end
from slurm.turn import machine_turn

STARTUP_LIMIT_SECONDS = 180.0
FINISH_LIMIT_SECONDS = 20.0  # after every rank has said that it finished
NSYS_FINISH_LIMIT_SECONDS = 300.0  # nsys writes its report then
STACKS_SECONDS = 0.5  # for the ranks to put their stacks into their logs before they are ended
YOUNG_SECONDS = 10.0

_LOOPBACK = "127.0.0.1"
_MESSAGE_CHARACTERS = 600
_PEER_LOST = "PeerLost"
_DROPPED_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "PREFECT_", "SUBMITIT_", "HUGGING_FACE_HUB_")
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")


def torchrun_argv(job: Job, job_json: Path, node_rank: int, head_host: str, port: int) -> list[str]:
    """The command that starts this node's ranks: torchrun, without restarts, meeting at a fixed address.

    Started through `engine.processes`, which keeps the ranks' exit codes; all its arguments but the first
    are torchrun's own.
    """
    folder = _torchrun_folder(job_json.parent)
    argv = [sys.executable, "-m", "engine.processes", str(folder / "exits.json")]
    argv += ["--nnodes", str(job.cell.nodes), "--nproc-per-node", str(job.ranks_per_node)]
    argv += ["--node-rank", str(node_rank), "--rdzv-backend", "static", "--rdzv-id", job.name]
    argv += ["--master-addr", head_host, "--master-port", str(port), "--max-restarts", "0"]
    # Without an address of its own torchrun asks the resolver for this machine's name, which can take seconds.
    argv += ["--local-addr", head_host] if job.cell.nodes == 1 else []
    argv += ["--shutdown-timeout", "2", "--log-dir", str(folder)]
    return [*argv, "-m", "engine.worker", str(job_json)]


def _torchrun_folder(folder: Path) -> Path:
    return folder / "torchrun"


def is_private(name: str) -> bool:
    """Whether a variable must not reach the ranks: secrets, and what belongs to the orchestrator."""
    return name.startswith(_DROPPED_PREFIXES) or any(part.endswith(_SECRET_WORDS) for part in name.upper().split("_"))


def rank_environment(job: Job, inherited: Mapping[str, str], launcher_pid: int) -> dict[str, str]:
    """Environment of torchrun and the ranks. What the cell says in `env` has the last word."""
    environment = {name: value for name, value in inherited.items() if not is_private(name)}
    threads = str(job.cell.cores_per_rank)
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    environment |= {
        "PYTHONFAULTHANDLER": "1",
        "PYTHONSAFEPATH": "1",  # a folder named like one of ours in the user's working directory must not be imported
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RANKWISE_LAUNCHER_PID": str(launcher_pid),
    }
    if job.cell.nodes == 1:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if job.measuring_pass == "memory":
        # glibc otherwise raises its threshold as blocks are freed, and the peak depends on history (mallopt(3)).
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    return environment | job.cell.env


def code_version() -> dict[str, str]:
    """Commit of the code that runs and whether it was changed since; empty where git cannot say."""
    root = Path(configs.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return {}
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"RANKWISE_COMMIT": commit.stdout.strip(), "RANKWISE_DIRTY": "1" if changed.stdout.strip() else "0"}


def free_port() -> int:
    """A loopback port that nobody listens on, below the range from which the kernel gives outgoing ones.

    torchrun binds it only after it has imported torch, so a port of the ephemeral range could be gone by then.
    """
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, port))
            except OSError:
                continue
            return port


def oom_kills() -> int:
    """How often the kernel ended a process for lack of memory since boot (proc(5), /proc/vmstat)."""
    fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(fields.get("oom_kill", 0))


@dataclass
class Verdict:
    """How the job ended, as far as the launcher can know."""

    status: Status
    visit: str | None = None
    rank: int | None = None
    kind: str | None = None
    message: str | None = None


@dataclass
class Launch:
    """One torchrun and its ranks, from start to end."""

    job: Job
    paths: JobPaths
    cancelled: bool = False
    agent: "subprocess.Popen[bytes] | None" = None
    began: float = field(default_factory=time.monotonic)
    oom_kills_before: int = field(default_factory=oom_kills)

    def run(self) -> Verdict:
        """Start the ranks, stay until they ended or must end, and leave nothing behind."""
        job_json = self.paths.job.resolve()
        _torchrun_folder(self.paths.folder).mkdir(exist_ok=True)
        launcher = os.getpid()
        self.agent = subprocess.Popen(
            torchrun_argv(self.job, job_json, 0, _LOOPBACK, free_port()),
            env=rank_environment(self.job, os.environ, launcher) | code_version(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with(launcher),
        )
        verdict = self.watch()
        left = self.end()
        verdict = verdict or self.outcome()
        if left:
            verdict.message = f"{verdict.message or ''} (could not be ended: pids {left})".strip()
        return verdict

    def watch(self) -> Verdict | None:
        """Wait for torchrun to end (None) or for a reason to end it."""
        assert self.agent is not None
        under_nsys = self.job.measuring_pass == "nsys"
        finish_limit_seconds = NSYS_FINISH_LIMIT_SECONDS if under_nsys else FINISH_LIMIT_SECONDS
        while True:
            age = time.monotonic() - self.began
            with suppress(subprocess.TimeoutExpired):
                self.agent.wait(0.05 if age < YOUNG_SECONDS else 0.2)
                return None
            if self.cancelled:
                return Verdict(Status.CANCELLED, visit_under_way(self.paths), message="cancelled on request")
            ranks = self.progress()
            if ranks and all(progress and progress.phase == "finished" for progress in ranks):
                last = max(progress.since for progress in ranks if progress)
                if time.time() - last > finish_limit_seconds:
                    return Verdict(Status.COMPLETED, message="the ranks finished but torchrun did not end")
            elif verdict := self.overdue(ranks, age):
                self.dump_stacks(ranks)
                return verdict

    def progress(self) -> list[Progress | None]:
        """What each rank of this node does now, by rank."""
        return [read_progress(self.paths, rank) for rank in range(self.job.ranks_per_node)]

    def overdue(self, ranks: list[Progress | None], age: float) -> Verdict | None:
        """The time limit that is exceeded: of the job, of a visit, or of the start."""
        if age > self.job.timeout_seconds:
            limit = f"the job's limit of {self.job.timeout_seconds:g} s was reached"
            return Verdict(Status.TIMEOUT, visit_under_way(self.paths), kind="JobTimeout", message=limit)
        limit_seconds = self.job.measuring.cell_timeout_seconds
        for progress in ranks:
            if progress and progress.phase == "visit" and time.time() - progress.since > limit_seconds:
                limit = f"the cell's limit of {limit_seconds:g} s was reached"
                return Verdict(Status.TIMEOUT, progress.visit, kind="CellTimeout", message=limit)
        starting = [rank for rank, progress in enumerate(ranks) if not progress or progress.phase == "starting"]
        if starting and age > STARTUP_LIMIT_SECONDS:
            limit = f"ranks {starting} were not ready after {STARTUP_LIMIT_SECONDS:g} s"
            return Verdict(Status.TIMEOUT, kind="StartTimeout", message=limit)
        return None

    def dump_stacks(self, ranks: list[Progress | None]) -> None:
        """Let every rank put the stacks of its threads into its log."""
        for progress in ranks:
            if progress and processes.is_alive(progress.pid, progress.pid_started):
                with suppress(ProcessLookupError):
                    os.kill(progress.pid, signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)

    def end(self) -> list[int]:
        """End all that is left below this process. Returns pids that could not be ended."""
        assert self.agent is not None
        agent = self.agent

        def left() -> list[psutil.Process]:
            agent.poll()
            return processes.below_me(waited_for=agent.pid)

        survivors = processes.end_tree(left)
        agent.poll()
        return survivors

    def outcome(self) -> Verdict:
        """What the ranks say of themselves, after torchrun ended without being told to."""
        ranks = self.progress()
        if all(progress and progress.phase == "finished" for progress in ranks):
            return Verdict(Status.COMPLETED)
        said = [progress for progress in ranks if progress and progress.phase == "failed"]
        first = sorted(said, key=lambda progress: (progress.kind == _PEER_LOST, progress.since))
        if first and first[0].kind != _PEER_LOST:
            return self.blame(first[0])
        for rank, code in self.exit_codes().items():
            if code < 0 and code != -signal.SIGTERM:
                return self.killed(rank, ranks[rank], signal.Signals(-code).name)
        if first:
            return self.blame(first[0], ranks)
        message = f"a rank ended without a word, see {self.paths.launcher_log.name}"
        return Verdict(Status.FAILED, visit_under_way(self.paths), kind="ProcessDied", message=message)

    def exit_codes(self) -> dict[int, int]:
        """Exit codes other than 0 of this node's ranks as torchrun's agent saw them; negative: a signal."""
        try:
            exits = json.loads((_torchrun_folder(self.paths.folder) / "exits.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return {exit["rank"]: exit["exit_code"] for exit in exits}

    def killed(self, rank: int, progress: Progress | None, name: str) -> Verdict:
        """A rank was ended by a signal: by the kernel for lack of memory, or by somebody."""
        visit = progress.visit if progress else None
        if name == "SIGKILL" and oom_kills() > self.oom_kills_before:
            message = f"rank {rank} was ended by the kernel, which had no memory left"
            return Verdict(Status.OUT_OF_MEMORY, visit, rank, name, message)
        return Verdict(Status.FAILED, visit, rank, name, f"rank {rank} was ended by {name}")

    def blame(self, progress: Progress, ranks: list[Progress | None] | None = None) -> Verdict:
        """A rank said why it failed; its part, where it could be written, says the status.

        Where ranks lost a peer that said nothing, the one that still was in its visit is to blame.
        """
        if progress.kind == "SIGKILL":  # the memory pass's child
            return self.killed(progress.rank, progress, progress.kind)
        status = Status.OUT_OF_MEMORY if progress.kind in ("MemoryError", "OutOfMemoryError") else Status.FAILED
        if progress.visit:
            with suppress(OSError, ValueError):
                part = read_part(self.paths.part(progress.visit, progress.rank))
                status = part.status if part.failure else status
        silent = [rank for rank, other in enumerate(ranks or []) if other and other.phase == "visit"]
        rank = silent[0] if len(silent) == 1 else progress.rank
        return Verdict(status, progress.visit, rank, progress.kind, f"rank {progress.rank}: {progress.message}")


def isolate(log: Path) -> None:
    """Leave the submitter's session, output and signal mask; adopt orphans."""
    with suppress(PermissionError):  # a session's leader already
        os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes.become_subreaper()


def write_launcher(paths: JobPaths, turn_at: str | None = None) -> None:
    """Say who runs this job, before anything is started; and again when the machine is its own."""
    pid = os.getpid()
    ticks = processes.start_ticks(pid)
    assert ticks is not None, "/proc must know this process"
    host = socket.gethostname()
    launcher = Launcher(pid=pid, pid_started=ticks, host=host, started_at=utc_now(), turn_at=turn_at)
    write_atomically(paths.launcher, launcher.model_dump_json())


def launch(paths: JobPaths) -> tuple[Verdict, int | None]:
    """Run the job in this folder. Returns how it ended and torchrun's exit code."""
    job = Job.model_validate_json(paths.job.read_bytes())
    if job.cell.nodes != 1:
        raise ValueError(f"{paths.job}: cell.nodes is {job.cell.nodes}; this version starts jobs of 1 node")
    running = Launch(job, paths)

    def cancel(*_: object) -> None:
        running.cancelled = True

    signal.signal(signal.SIGTERM, cancel)
    signal.signal(signal.SIGINT, cancel)
    reserve_end(paths)
    write_launcher(paths)
    with machine_turn(give_up=lambda: running.cancelled) as mine:
        if not mine:
            return Verdict(Status.CANCELLED, message="cancelled on request, before its turn on this machine"), None
        write_launcher(paths, turn_at=utc_now())
        running.began = time.monotonic()
        verdict = running.run()
    return verdict, running.agent.returncode if running.agent else None


def main(arguments: list[str]) -> int:
    """Run one job. Returns 0 when it was seen to its end, however that was."""
    if len(arguments) != 1:
        print("usage: python -m slurm.launch JOB_JSON", file=sys.stderr)
        return 2
    paths = JobPaths(Path(arguments[0]).resolve().parent)
    isolate(paths.launcher_log)
    return_code = None
    try:
        verdict, return_code = launch(paths)
    except Exception as error:
        with suppress(OSError):
            traceback.print_exc()
        processes.end_tree(processes.below_me)
        verdict = Verdict(Status.FAILED, kind=type(error).__name__, message=f"the launcher failed: {error}")
    end = JobEnd(
        status=verdict.status,
        return_code=return_code,
        visit=verdict.visit,
        rank=verdict.rank,
        kind=verdict.kind,
        message=verdict.message[:_MESSAGE_CHARACTERS] if verdict.message else None,
        finished_at=utc_now(),
    )
    write_end(paths, end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
