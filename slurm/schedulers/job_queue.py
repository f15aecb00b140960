"""Shared polling of a batch scheduler for all jobs of a process; what is known of them, for whoever asks.

    queue.watch("123_4", every_seconds=5.0)
    queue.sight("123_4")                         # from the latest look; a new one is taken meanwhile, if it is time

Polling runs in a thread, and callers get the last known states without waiting. A call that fails or takes more than
a second doubles the interval before the next of its kind, up to one minute (exponential back-off). States are written
in Slurm's words (`slurm.schedulers.commands.states`), into which other schedulers' are translated.
"""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from configs.plans.paths import JobPaths
from slurm.schedulers.commands.accounting import Account
from slurm.schedulers.commands.states import standing

LONGEST_PAUSE_SECONDS = 60.0
SLOW_SECONDS = 1.0


@dataclass(frozen=True)
class Sight:
    """A job as the scheduler shows it; `gone` where it denies it, with what was seen of it last."""

    state: str = ""
    nodes: tuple[str, ...] = ()
    reason: str = ""
    gone: bool = False
    asked_at: float = field(default=0.0, compare=False)
    """When the look began, by the monotonic clock."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.gone or standing(self.state).place == "ended"


@dataclass
class Watched:
    """A job that somebody asks for, and what is known of it."""

    since: float
    every_seconds: float
    sight: Sight | None = None
    missed: int = 0
    """Looks in a row that did not show it."""
    ended_at: float | None = None
    account: Account | None = None
    account_wanted: bool = False
    active_by_accounts: bool = False
    """sacct says that it waits or runs."""
    details_asked: bool = False
    """scontrol was asked for its end in the place of sacct."""

    def saw(self, sight: Sight) -> None:
        """Take over what was seen."""
        self.sight, self.missed = sight, 0
        if not sight.ended:
            self.ended_at = None
        elif self.ended_at is None:
            self.ended_at, self.account_wanted = time.monotonic(), self.account is None


@dataclass
class Pace:
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
class JobQueue(ABC):
    """The jobs of one cluster that this process watches. Every method may be called from any thread."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cluster: str | None = None
    """Another than the one that the user's environment names."""
    _watched: dict[str, Watched] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looking: threading.Lock = field(default_factory=threading.Lock)

    @abstractmethod
    def submit(self, folders: Sequence[Path], name: str, run_folder: Path) -> list[str]:
        """Submit the jobs of these folders, which are of one shape. Returns their ids. Raises Refused, Unavailable."""

    @abstractmethod
    def account(self, job_id: str) -> Account | None:
        """What the accounts say of a watched job that ended; None before they do."""

    @abstractmethod
    def account_expected(self, job_id: str) -> bool:
        """Whether `account` may yet say more of a job that ended."""

    @abstractmethod
    def active_by_accounts(self, job_id: str) -> bool:
        """Whether the accounts, when they were last asked, said that the job waits or runs."""

    @abstractmethod
    def end(self, job_ids: Sequence[str]) -> bool:
        """Have jobs ended. Returns whether the scheduler was told: what it does not know needs no ending."""

    @abstractmethod
    def end_named(self, name: str) -> bool:
        """The same of whatever bears a name."""

    @abstractmethod
    def find(self, name: str, since: datetime) -> set[str] | None:
        """Ids of jobs of a name, submitted after a moment of local time; None where the scheduler does not answer."""

    @abstractmethod
    def show_logs(self, paths: JobPaths, job_id: str) -> None:
        """Let the folder of a job that was submitted show what the scheduler's programs say of it."""

    @abstractmethod
    def bring_logs(self, paths: JobPaths, job_id: str) -> None:
        """Keep in the folder of a job that ended what the scheduler's programs said of it."""

    @abstractmethod
    def pending_note(self, job_id: str, reason: str) -> str:
        """One line on a job that waits."""

    @abstractmethod
    def field_to_correct(self, reason: str) -> str | None:
        """The target's field to blame where a job waits for a reason that will not pass; None where it may."""

    @abstractmethod
    def waits_for_own_jobs(self, reason: str) -> bool:
        """Whether a job waits for others of its array."""

    @abstractmethod
    def _due(self, now: float) -> bool:
        """Whether it is time for a look, and somebody waits for one."""

    @abstractmethod
    def _refresh(self, began: float, forced: bool) -> None:
        """Take a look, each part where it is its time; `forced`: at the jobs at any time."""

    def watch(self, job_id: str, every_seconds: float) -> None:
        """Have the job looked at from now on, at least this far apart."""
        with self._lock:
            self._watched.setdefault(job_id, Watched(time.monotonic(), every_seconds))

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

    def any_running(self) -> bool:
        """Whether a watched job ran when last looked at."""
        with self._lock:
            sights = [job.sight for job in self._watched.values() if job.sight and not job.sight.ended]
        return any(standing(sight.state).place == "running" for sight in sights)

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

        thread = threading.Thread(target=look, name="job-queue", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a login node's limit of threads: whoever asks waits for the look
            look()

    def _every(self) -> float:
        with self._lock:
            return min((job.every_seconds for job in self._watched.values()), default=5.0)
