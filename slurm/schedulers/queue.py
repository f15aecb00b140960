"""Shared polling of Slurm for all jobs of a process: at most one squeue and one sacct per interval.

    queue = shared_queue()                       # of the cluster that SLURM_CONF names
    queue.watch("123_4", every_seconds=5.0)
    queue.sight("123_4")                         # from the latest look; a new one is taken meanwhile, if it is time

Polling runs in a thread, and callers get the last known states without waiting. squeue is queried for all states, so
it reports the end of a job for as long as slurmctld keeps it (MinJobAge). sacct is queried for ended jobs without
accounting. A call that fails or takes more than a second doubles the interval before the next of its kind, up to one
minute (exponential back-off); meanwhile the last known states are kept.
"""

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slurm.launcher.node import host_names
from slurm.schedulers.accounting import Account, read_accounts, sacct_command
from slurm.schedulers.states import standing

LONGEST_PAUSE_SECONDS = 60.0
SLOW_SECONDS = 1.0
_CALL_LIMIT_SECONDS = 30.0
_SACCT_LIMIT_SECONDS = 15.0
_IDENTITY = "%i|%T|%N|%r"  # the reason last: what it may hold is the cluster's choice
_SINGLE_JOB_GONE = "Invalid job id"
_USERS_DEFAULTS = ("SQUEUE_", "SACCT_")  # filters and formats that somebody set for himself
_NO_ACCOUNTS_AFTER = 2  # failures of sacct in a row

SlurmProgram = Literal["squeue", "sacct"]


@dataclass(frozen=True)
class Sight:
    """A job as squeue shows it; `gone` where it no longer does."""

    state: str = ""
    nodes: tuple[str, ...] = ()
    reason: str = ""
    gone: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.gone or standing(self.state).place == "ended"


@dataclass
class _Watched:
    """A job that somebody asks for, and what is known of it."""

    since: float
    every_seconds: float
    sight: Sight | None = None
    ended_at: float | None = None
    account: Account | None = None
    account_wanted: bool = False


@dataclass
class _Pace:
    """When a program may be called again, and how often it was."""

    calls: int = 0
    failures: int = 0
    next_at: float = 0.0
    pause: float = 0.0

    def called(self, took: float, failed: bool, every: float, now: float) -> None:
        """Settle the pause after a call: the interval, or twice the last pause after a bad one."""
        self.calls += 1
        self.failures += failed
        bad = failed or took > SLOW_SECONDS
        self.pause = min(LONGEST_PAUSE_SECONDS, max(every, 2 * self.pause)) if bad else every
        self.next_at = now + self.pause


@dataclass
class Queue:
    """The jobs of one cluster that this process watches. Every method may be called from any thread."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _paces: dict[SlurmProgram, _Pace] = field(default_factory=lambda: {"squeue": _Pace(), "sacct": _Pace()})
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _sacct_failures: int = 0

    @property
    def squeue_calls(self) -> int:
        return self._paces["squeue"].calls

    @property
    def sacct_calls(self) -> int:
        return self._paces["sacct"].calls

    @property
    def keeps_accounts(self) -> bool:
        """Whether it is worth to wait for sacct: it has not failed again and again."""
        return self._sacct_failures < _NO_ACCOUNTS_AFTER

    def watch(self, job_id: str, every_seconds: float) -> None:
        """Have the job looked at from now on, at least this far apart."""
        with self._lock:
            self._watched.setdefault(job_id, _Watched(time.monotonic(), every_seconds))

    def forget(self, job_id: str) -> None:
        """No longer look at a job."""
        with self._lock:
            self._watched.pop(job_id, None)

    def sight(self, job_id: str) -> Sight | None:
        """What was last seen of a watched job; None before the first look at it. Takes a look if it is time."""
        self._look_if_due()
        return self.seen(job_id)

    def seen(self, job_id: str) -> Sight | None:
        """What was last seen of a job; takes no look."""
        with self._lock:
            watched = self._watched.get(job_id)
            return watched.sight if watched else None

    def account(self, job_id: str) -> Account | None:
        """What the accounts say of a watched job that ended; None before they do. Has sacct asked for it."""
        with self._lock:
            watched = self._watched.get(job_id)
            if watched is None:
                return None
            watched.account_wanted = watched.account is None
        self._look_if_due()
        return watched.account

    def seconds_since_end(self, job_id: str) -> float:
        """How long it is known that the job ended; 0 while it is not."""
        with self._lock:
            watched = self._watched.get(job_id)
            ended_at = watched.ended_at if watched else None
        return 0.0 if ended_at is None else time.monotonic() - ended_at

    def look(self) -> None:
        """Take a look now and wait for it, whatever the interval: for whoever ends a job. One look at a time."""
        with self._looking:
            self._refresh(time.monotonic(), forced=True)

    def _look_if_due(self) -> None:
        now = time.monotonic()
        if not self._due(now) or not self._looking.acquire(blocking=False):
            return

        def look() -> None:
            try:
                self._refresh(now, forced=False)
            finally:
                self._looking.release()

        threading.Thread(target=look, name="slurm-queue", daemon=True).start()

    def _due(self, now: float) -> bool:
        active, wanting = self._asked()
        squeue, sacct = self._paces["squeue"], self._paces["sacct"]
        return bool(active and now >= squeue.next_at) or bool(wanting and now >= sacct.next_at)

    def _asked(self) -> tuple[list[str], list[str]]:
        """Jobs to ask squeue for, and jobs to ask sacct for."""
        with self._lock:
            active = [job_id for job_id, job in self._watched.items() if not (job.sight and job.sight.ended)]
            wanting = [job_id for job_id, job in self._watched.items() if job.account_wanted]
        return active, wanting

    def _every(self) -> float:
        with self._lock:
            return min((job.every_seconds for job in self._watched.values()), default=5.0)

    def _refresh(self, began: float, forced: bool) -> None:
        """One squeue and one sacct, each where it is its time and somebody asks; `forced`: squeue at any time."""
        active, _ = self._asked()
        if active and (forced or began >= self._paces["squeue"].next_at):
            self._ask_squeue(active, began)
        _, wanting = self._asked()
        if wanting and time.monotonic() >= self._paces["sacct"].next_at:
            self._ask_sacct(wanting)

    def _ask_squeue(self, job_ids: Sequence[str], began: float) -> None:
        output = self._call("squeue", squeue_command(job_ids), _CALL_LIMIT_SECONDS)
        if output is None:
            return
        seen = read_squeue(output)
        now = time.monotonic()
        with self._lock:
            for job_id in job_ids:
                job = self._watched.get(job_id)
                if job is None or (job_id not in seen and job.since > began):
                    continue  # it came while squeue was on its way
                job.sight = seen.get(job_id) or _gone(job.sight)
                if job.sight.ended and job.ended_at is None:
                    job.ended_at, job.account_wanted = now, True

    def _ask_sacct(self, job_ids: Sequence[str]) -> None:
        output = self._call("sacct", sacct_command(_of_arrays(job_ids)), _SACCT_LIMIT_SECONDS)
        self._sacct_failures = 0 if output is not None else self._sacct_failures + 1
        if output is None:
            return
        try:
            accounts = read_accounts(output)
        except ValueError:
            return
        with self._lock:
            for job_id in job_ids:
                account, job = accounts.get(job_id), self._watched.get(job_id)
                if job and account and standing(account.accounting.state).place == "ended":
                    job.account, job.account_wanted = account, False

    def _call(self, program: SlurmProgram, command: list[str], limit_seconds: float) -> str | None:
        """What a program of Slurm says; None where it failed. Settles when it may be called next."""
        began = time.monotonic()
        output = run_slurm(command, self.environment, limit_seconds)
        now = time.monotonic()
        self._paces[program].called(now - began, output is None, self._every(), now)
        return output


def _gone(before: Sight | None) -> Sight:
    """A job that squeue no longer shows: how it ended is in what was last seen, if that was an end."""
    return Sight(nodes=before.nodes if before else (), gone=True)


def squeue_command(job_ids: Sequence[str]) -> list[str]:
    """The call for these jobs in whatever state, tasks of arrays each in a line."""
    options = ["--noheader", "--array", "--states=all", f"--format={_IDENTITY}"]
    return ["squeue", *options, f"--jobs={','.join(_of_arrays(job_ids))}"]


def named_command(name: str) -> list[str]:
    """The call for jobs of a name in whatever state."""
    return ["squeue", "--noheader", "--array", "--states=all", f"--format={_IDENTITY}", f"--name={name}"]


def read_squeue(output: str) -> dict[str, Sight]:
    """Job id -> what squeue shows, of lines in our format."""
    seen = {}
    for line in output.splitlines():
        fields = line.split("|", 3)
        if len(fields) == 4:
            job_id, state, nodes, reason = fields
            seen[job_id.strip()] = Sight(state, host_names(nodes) if nodes.strip() else (), reason.strip())
    return seen


def run_slurm(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> str | None:
    """What a program of Slurm says on its standard output; None where it failed, is missing or does not end.

    squeue fails where it is asked for one job alone that slurmctld has forgotten: that is an empty answer.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            env={name: value for name, value in environment.items() if not name.startswith(_USERS_DEFAULTS)}
            | {"SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout
    return "" if _SINGLE_JOB_GONE in done.stderr else None


def _of_arrays(job_ids: Sequence[str]) -> list[str]:
    """Ids without the tasks of arrays, each once: 123 for 123_1 and 123_2."""
    return sorted({job_id.partition("_")[0] for job_id in job_ids}, key=lambda name: (len(name), name))


_queues: dict[str, Queue] = {}
_queues_lock = threading.Lock()


def shared_queue() -> Queue:
    """This process's view of the cluster that SLURM_CONF names."""
    name = os.environ.get("SLURM_CONF", "")
    with _queues_lock:
        return _queues.setdefault(name, Queue())
