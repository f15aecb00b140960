"""Shared polling of Slurm for all jobs of a process: at most one squeue and one sacct per interval.

    queue = shared_queue()                       # of the cluster that SLURM_CONF names; shared_queue("b"): of another
    queue.watch("123_4", every_seconds=5.0)
    queue.sight("123_4")                         # from the latest look; a new one is taken meanwhile, if it is time

How polling is paced: `slurm.schedulers.job_queue`. squeue is queried for all states, so it reports the end of a job
for as long as slurmctld keeps it (MinJobAge). sacct is queried for ended jobs without accounting.

That squeue does not show a job says little: it has answered nothing, successfully, while jobs ran. An answer without a
line of ours counts as a failure. A job that two looks did not show is asked for by `scontrol show job` and sacct; it
is gone only when slurmctld denies it by itself, and what sacct says of its end, or of its being there, is believed.
"""

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from configs.plans.paths import JobPaths
from slurm.launcher.node import host_names
from slurm.schedulers.commands import pending
from slurm.schedulers.commands.accounting import Account, read_accounts, sacct_command, sacct_named_command
from slurm.schedulers.commands.calls import SchedulerAnswer, run_slurm
from slurm.schedulers.commands.details import details_command, read_details
from slurm.schedulers.commands.states import standing
from slurm.schedulers.commands.submission import sbatch
from slurm.schedulers.job_files import job_in
from slurm.schedulers.job_queue import JobQueue, Pace, Sight, Watched

_CALL_LIMIT_SECONDS = 30.0
_SACCT_LIMIT_SECONDS = 15.0
_SHORT_CALL_SECONDS = 10.0
_IDENTITY = "%i|%T|%N|%r"  # the reason last: what it may hold is the cluster's choice
_NO_ACCOUNTS_AFTER = 2  # failures of sacct in a row
AGREEING_LOOKS = 2
"""So many looks in a row that do not show a job, before slurmctld is asked for it by itself."""
_ASKED_AT_ONCE = 8  # jobs for which scontrol is called in one look

SlurmProgram = Literal["squeue", "sacct"]


@dataclass
class Queue(JobQueue):
    """The jobs of one cluster under Slurm that this process watches."""

    _paces: dict[SlurmProgram, Pace] = field(default_factory=lambda: {"squeue": Pace(), "sacct": Pace()})
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

    def account(self, job_id: str) -> Account | None:
        """What the accounts say of a watched job that ended; None before they do. Has sacct asked for it."""
        with self._lock:
            watched = self._watched.get(job_id)
            if watched is None:
                return None
            watched.account_wanted = watched.account is None
        self._look_if_due()
        return watched.account

    def active_by_accounts(self, job_id: str) -> bool:
        """Whether sacct, when it was last asked, said that the job waits or runs."""
        with self._lock:
            watched = self._watched.get(job_id)
            return watched is not None and watched.active_by_accounts

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

    def _wants_details(self, job: Watched) -> bool:
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

    def submit(self, folders: Sequence[Path], name: str, run_folder: Path) -> list[str]:
        """One sbatch, of an array where there are several."""
        seen_by_nodes = [folder.resolve() for folder in folders]
        return sbatch(seen_by_nodes, name, str(run_folder), self._work(JobPaths(folders[0])))

    def end(self, job_ids: Sequence[str]) -> bool:
        """Have Slurm cancel jobs. Returns whether scancel succeeded: what slurmctld does not know needs no ending."""
        return not self.run(["scancel", *job_ids], _SHORT_CALL_SECONDS).failed

    def end_named(self, name: str) -> bool:
        """The same of whatever bears a name."""
        return self.end([f"--name={name}"])

    def find(self, name: str, since: datetime) -> set[str] | None:
        """Ids of jobs of a name, by squeue, else by sacct: slurmctld may have forgotten them. None: no answer."""
        shown = self.run(named_command(name), _SHORT_CALL_SECONDS)
        ids = set(read_squeue(shown.text))
        if not ids:
            answer = self.run(sacct_named_command(name, since), _SHORT_CALL_SECONDS)
            with suppress(ValueError):
                ids = set(read_accounts(answer.text))
        return None if shown.failed and not ids else ids

    def show_logs(self, paths: JobPaths, job_id: str) -> None:
        """Links to what Slurm's programs say on each node; every node has a task of submitit's."""
        for node_rank in range(job_in(paths.folder).cell.nodes):
            link = paths.scheduler_log(node_rank)
            with suppress(FileExistsError):
                link.symlink_to(Path("..", "..", self._work(paths).name, f"{job_id}_{node_rank}_log.out"))

    def bring_logs(self, paths: JobPaths, job_id: str) -> None:
        """Put what Slurm's programs said in the place of the links to it; submitit's pickles have served."""
        work = self._work(paths)
        with suppress(OSError):
            for node_rank in range(job_in(paths.folder).cell.nodes):
                log = work / f"{job_id}_{node_rank}_log.out"
                if log.exists():
                    log.replace(paths.scheduler_log(node_rank))
                (work / f"{job_id}_{node_rank}_result.pkl").unlink(missing_ok=True)
            (work / f"{job_id}_submitted.pkl").unlink(missing_ok=True)

    def _work(self, paths: JobPaths) -> Path:
        """Folder for submitit's files, as the nodes see it. They bear ids of jobs, which each cluster counts itself."""
        return paths.folder.resolve().parents[1] / (f"submitit-{self.cluster}" if self.cluster else "submitit")

    def pending_note(self, job_id: str, reason: str) -> str:
        """One line on a job that waits."""
        return pending.pending_note(job_id, reason, self.cluster)

    def field_to_correct(self, reason: str) -> str | None:
        """The target's field to blame for a reason that will not pass."""
        return pending.field_to_correct(reason)

    def waits_for_own_jobs(self, reason: str) -> bool:
        """Whether a job waits for others of its array."""
        return pending.waits_for_own_jobs(reason)

    def run(self, command: Sequence[str], limit_seconds: float) -> SchedulerAnswer:
        """Run a program of Slurm on this queue's cluster. Raises nothing."""
        return run_slurm(command, self.environment, limit_seconds, self.cluster)

    def _call(self, program: SlurmProgram, command: list[str], limit_seconds: float) -> SchedulerAnswer:
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
    # Without --all it shows jobs of hidden partitions only by their ids.
    options = ["--all", "--noheader", "--array", "--states=all", f"--format={_IDENTITY}"]
    return ["squeue", *options, f"--name={name}"]


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
