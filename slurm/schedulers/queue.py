"""Shared polling of Slurm for all jobs of a process: at most one squeue and one sacct per interval.

    queue = shared_queue()                       # of the cluster that SLURM_CONF names; shared_queue("b"): of another
    queue.watch("123_4", every_seconds=5.0)
    queue.sight("123_4")                         # from the latest look; a new one is taken meanwhile, if it is time

Polling runs in a thread, and callers get the last known states without waiting. squeue is queried for all states, so
it reports the end of a job for as long as slurmctld keeps it (MinJobAge). sacct is queried for ended jobs without
accounting. A call that fails or takes more than a second doubles the interval before the next of its kind, up to one
minute (exponential back-off); meanwhile the last known states are kept.

That squeue does not show a job says little: it has answered nothing, successfully, while jobs ran. An answer without a
line of ours counts as a failure. A job that two looks did not show is asked for by `scontrol show job` and sacct; it
is gone only when slurmctld denies it by itself, and what sacct says of its end, or of its being there, is believed.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from slurm.launcher.node import host_names
from slurm.schedulers.accounting import Account, read_accounts, sacct_command
from slurm.schedulers.calls import Answer, run_slurm
from slurm.schedulers.details import details_command, read_details
from slurm.schedulers.states import standing

LONGEST_PAUSE_SECONDS = 60.0
SLOW_SECONDS = 1.0
_CALL_LIMIT_SECONDS = 30.0
_SACCT_LIMIT_SECONDS = 15.0
_IDENTITY = "%i|%T|%N|%r"  # the reason last: what it may hold is the cluster's choice
_NO_ACCOUNTS_AFTER = 2  # failures of sacct in a row
AGREEING_LOOKS = 2
"""So many looks in a row that do not show a job, before slurmctld is asked for it by itself."""
_ASKED_AT_ONCE = 8  # jobs for which scontrol is called in one look

SlurmProgram = Literal["squeue", "sacct"]


@dataclass(frozen=True)
class Sight:
    """A job as squeue shows it; `gone` where slurmctld denies it, with what was seen of it last."""

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
class _Watched:
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
    cluster: str | None = None
    """Another than the one that SLURM_CONF names."""
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

    def account_expected(self, job_id: str) -> bool:
        """Whether `account` may yet say more of a job that ended: by sacct, else by scontrol, which is asked once."""
        with self._lock:
            job = self._watched.get(job_id)
            if job is None:
                return False
            asked = job.details_asked or not self._wants_details(job)
            return self.keeps_accounts or job.account is not None or not asked

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

    def any_running(self) -> bool:
        """Whether a watched job ran when last looked at."""
        with self._lock:
            sights = [job.sight for job in self._watched.values() if job.sight and not job.sight.ended]
        return any(standing(sight.state).place == "running" for sight in sights)

    def active_by_accounts(self, job_id: str) -> bool:
        """Whether sacct, when it was last asked, said that the job waits or runs."""
        with self._lock:
            watched = self._watched.get(job_id)
            return watched is not None and watched.active_by_accounts

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
        """Jobs to ask squeue for, those that are gone included since they may show up again; and jobs for sacct."""
        with self._lock:
            jobs = self._watched.items()
            active = [job_id for job_id, job in jobs if not (job.sight and job.sight.ended and not job.sight.gone)]
            wanting = [job_id for job_id, job in jobs if job.account_wanted]
        return active, wanting

    def _every(self) -> float:
        with self._lock:
            return min((job.every_seconds for job in self._watched.values()), default=5.0)

    def _refresh(self, began: float, forced: bool) -> None:
        """One squeue and one sacct, each where it is its time and somebody asks; `forced`: squeue at any time."""
        active, _ = self._asked()
        if active and (forced or began >= self._paces["squeue"].next_at):
            self._ask_squeue(active, began)
            self._ask_scontrol()
        _, wanting = self._asked()
        if wanting and time.monotonic() >= self._paces["sacct"].next_at:
            self._ask_sacct(wanting)

    def _ask_squeue(self, job_ids: Sequence[str], began: float) -> None:
        answer = self._call("squeue", squeue_command(job_ids), _CALL_LIMIT_SECONDS)
        if answer.failed:
            return
        seen = read_squeue(answer.text, began)
        with self._lock:
            for job_id in job_ids:
                job = self._watched.get(job_id)
                if job is None or (job_id not in seen and job.since > began):
                    continue  # it came while squeue was on its way
                if job_id in seen:
                    job.saw(seen[job_id])
                else:
                    job.missed += 1

    def _ask_scontrol(self) -> None:
        """Ask slurmctld for each job that squeue has not shown, and for ends that nobody keeps accounts of."""
        with self._lock:
            wanting = [job_id for job_id, job in self._watched.items() if self._wants_details(job)]
        for job_or_array in _of_arrays(wanting)[:_ASKED_AT_ONCE]:
            began = time.monotonic()
            answer = self.run(details_command(job_or_array), _CALL_LIMIT_SECONDS)
            shown = read_details(answer.text)
            unanswered = answer.failed or not (shown or answer.unknown_job)
            with self._lock:
                self._asked_details(wanting, job_or_array)
                if unanswered:
                    return  # the next look asks again
                for job_id in wanting:
                    job = self._watched.get(job_id)
                    if job is None or job_id.partition("_")[0] != job_or_array:
                        continue
                    details, before = shown.get(job_id), job.sight or Sight()
                    if details is None:
                        gone = Sight(before.state, before.nodes, before.reason, gone=True, asked_at=began)
                        job.account_wanted = True
                        job.saw(gone)
                    else:
                        job.saw(Sight(details.state, details.nodes, details.reason, asked_at=began))
                        if standing(details.state).place == "ended" and not self.keeps_accounts:
                            job.account, job.account_wanted = Account(details.accounting), False

    def _asked_details(self, job_ids: Sequence[str], job_or_array: str) -> None:
        """Note that scontrol was asked in the place of sacct. Called with the lock held, as what it said is read."""
        for job_id in job_ids:
            job = self._watched.get(job_id)
            if job is not None and job.sight and job.sight.ended and job_id.partition("_")[0] == job_or_array:
                job.details_asked = True

    def _wants_details(self, job: _Watched) -> bool:
        if job.sight and job.sight.ended:
            return not self.keeps_accounts and job.account_wanted and not job.sight.gone
        return job.missed >= AGREEING_LOOKS

    def _ask_sacct(self, job_ids: Sequence[str]) -> None:
        answer = self._call("sacct", sacct_command(_of_arrays(job_ids)), _SACCT_LIMIT_SECONDS)
        self._sacct_failures = self._sacct_failures + 1 if answer.failed else 0
        if answer.keeps_nothing:
            self._sacct_failures = _NO_ACCOUNTS_AFTER
        if answer.failed:
            self._ask_scontrol()
            return
        try:
            accounts = read_accounts(answer.text)
        except ValueError:
            return
        with self._lock:
            for job_id in job_ids:
                account, job = accounts.get(job_id), self._watched.get(job_id)
                if job is None or account is None:
                    continue
                job.active_by_accounts = standing(account.accounting.state).place in ("waiting", "running")
                if not job.active_by_accounts:
                    job.account, job.account_wanted = account, False

    def run(self, command: Sequence[str], limit_seconds: float) -> Answer:
        """Run a program of Slurm on this queue's cluster. Raises nothing."""
        return run_slurm(command, self.environment, limit_seconds, self.cluster)

    def _call(self, program: SlurmProgram, command: list[str], limit_seconds: float) -> Answer:
        """What a program of Slurm says. Settles when it may be called next; squeue that says nothing has failed."""
        began = time.monotonic()
        answer = self.run(command, limit_seconds)
        now = time.monotonic()
        empty = program == "squeue" and not answer.unknown_job and not read_squeue(answer.text)
        self._paces[program].called(now - began, answer.failed or empty, self._every(), now)
        return answer


def squeue_command(job_ids: Sequence[str]) -> list[str]:
    """The call for these jobs in whatever state, tasks of arrays each in a line."""
    options = ["--noheader", "--array", "--states=all", f"--format={_IDENTITY}"]
    return ["squeue", *options, f"--jobs={','.join(_of_arrays(job_ids))}"]


def named_command(name: str) -> list[str]:
    """The call for jobs of a name in whatever state."""
    return ["squeue", "--noheader", "--array", "--states=all", f"--format={_IDENTITY}", f"--name={name}"]


def read_squeue(output: str, asked_at: float = 0.0) -> dict[str, Sight]:
    """Job id -> what squeue shows, of lines in our format; other lines are passed over."""
    seen = {}
    for line in output.splitlines():
        fields = line.split("|", 3)
        if len(fields) == 4 and fields[1].strip():
            job_id, state, nodes, reason = (each.strip() for each in fields)
            with suppress(ValueError):  # a list of hosts that is none
                seen[job_id] = Sight(state, host_names(nodes) if nodes else (), reason, asked_at=asked_at)
    return seen


def _of_arrays(job_ids: Sequence[str]) -> list[str]:
    """Ids without the tasks of arrays, each once: 123 for 123_1 and 123_2."""
    return sorted({job_id.partition("_")[0] for job_id in job_ids}, key=lambda name: (len(name), name))


_queues: dict[tuple[str, str | None], Queue] = {}
_queues_lock = threading.Lock()


def shared_queue(cluster: str | None = None) -> Queue:
    """This process's view of the cluster that SLURM_CONF names, or of another one by its name."""
    name = os.environ.get("SLURM_CONF", "")
    with _queues_lock:
        return _queues.setdefault((name, cluster), Queue(cluster=cluster))
