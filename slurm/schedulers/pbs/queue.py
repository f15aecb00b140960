"""Shared polling of PBS for all jobs of a process: at most one qstat per interval.

    queue = shared_pbs_queue()                   # of the server that pbs.conf names; shared_pbs_queue("b"): of another

qstat shows jobs that ended, with their accounts, for as long as the server keeps a history (job_history_duration).
Without one qstat is asked without `-x`, and a job that ended is unknown, as is one that was deleted with its history.
It is gone when two looks in a row were answered without it, and the nodes' own ends say how it ended.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Lock

from configs.plans.paths import JobPaths
from slurm.schedulers.commands.accounting import Account
from slurm.schedulers.commands.calls import SchedulerAnswer
from slurm.schedulers.job_queue import JobQueue, Pace, Sight
from slurm.schedulers.pbs.calls import run_pbs
from slurm.schedulers.pbs.jobs import NEVER, PbsJob, read_jobs
from slurm.schedulers.pbs.submission import field_refused, qsub

_CALL_LIMIT_SECONDS = 30.0
_SHORT_CALL_SECONDS = 10.0
_AGREEING_LOOKS = 2


@dataclass
class PbsQueue(JobQueue):
    """The jobs of one PBS server that this process watches."""

    _pace: Pace = field(default_factory=Pace)
    _keeps_history: bool = True
    """Until the server says that it does not."""

    @property
    def qstat_calls(self) -> int:
        return self._pace.calls

    def submit(self, folders: Sequence[Path], name: str, run_folder: Path) -> list[str]:
        """One qsub for each job."""
        return [qsub(folder.resolve(), name, self.environment) for folder in folders]

    def account(self, job_id: str) -> Account | None:
        """What the last look at a job that ended says of it: PBS keeps both in one place."""
        with self._lock:
            watched = self._watched.get(job_id)
            return watched.account if watched else None

    def account_expected(self, job_id: str) -> bool:
        """Never: an end comes with its accounts, or without any."""
        return False

    def active_by_accounts(self, job_id: str) -> bool:
        """Never: there are no accounts apart from the server's."""
        return False

    def end(self, job_ids: Sequence[str]) -> bool:
        """Have PBS delete jobs. Returns whether the server was told: what it does not know needs no ending."""
        return not self.run(["qdel", *job_ids], _SHORT_CALL_SECONDS).failed

    def end_named(self, name: str) -> bool:
        """The same of whatever bears a name."""
        answer = self.run(["qselect", "-N", name], _SHORT_CALL_SECONDS)
        return not answer.failed and (not answer.text.split() or self.end(answer.text.split()))

    def find(self, name: str, since: datetime) -> set[str] | None:
        """Ids of jobs of a name, those that ended included; None: no answer."""
        answer = self._ended_included(["qselect", "-N", name], _SHORT_CALL_SECONDS)
        return None if answer.failed else set(answer.text.split())

    def show_logs(self, paths: JobPaths, job_id: str) -> None:
        """Nothing: the job's script writes into the folder itself."""

    def bring_logs(self, paths: JobPaths, job_id: str) -> None:
        """Nothing, as `show_logs`."""

    def pending_note(self, job_id: str, reason: str) -> str:
        """One line on a job that waits."""
        if reason.startswith("held"):
            return f"job {job_id} {reason}. `qrls {job_id}` lets it start"
        return f"job {job_id} pending" + (f": {reason}" if reason else "")

    def field_to_correct(self, reason: str) -> str | None:
        """The target's field that a job can never run for."""
        return field_refused(reason) if reason.startswith(NEVER) else None

    def waits_for_own_jobs(self, reason: str) -> bool:
        """Never: there are no arrays."""
        return False

    def run(self, command: Sequence[str], limit_seconds: float) -> SchedulerAnswer:
        """Run a program of PBS for this queue's server. Raises nothing."""
        return run_pbs(command, self.environment, limit_seconds, self.cluster)

    def _ended_included(self, command: Sequence[str], limit_seconds: float) -> SchedulerAnswer:
        """What a program says of jobs, with `-x` also of those that ended.

        A server without a history says nothing to `-x`, not even of jobs that run.
        """
        program, *arguments = command
        if self._keeps_history:
            answer = self.run([program, "-x", *arguments], limit_seconds)
            if answer.failed or answer.unknown_job or answer.text.strip():
                return answer
            self._keeps_history = not answer.keeps_nothing
        return self.run(command, limit_seconds)

    def _due(self, now: float) -> bool:
        return bool(self._active()) and now >= self._pace.next_at

    def _active(self) -> list[str]:
        """Jobs to ask for, those that are gone included since they may show up again."""
        with self._lock:
            jobs = self._watched.items()
            return [job_id for job_id, job in jobs if not (job.sight and job.sight.ended and not job.sight.gone)]

    def _refresh(self, began: float, forced: bool) -> None:
        job_ids = self._active()
        if not job_ids or not (forced or began >= self._pace.next_at):
            return
        asked_at = time.monotonic()
        answer = self._ended_included(["qstat", "-f", "-w", *job_ids], _CALL_LIMIT_SECONDS)
        seen = read_jobs(answer.text, began)
        failed = answer.failed or not (seen or answer.unknown_job)
        now = time.monotonic()
        self._pace.called(now - asked_at, failed, self._every(), now)
        if not failed:
            self._take(job_ids, seen, answer.unknown_job, began)

    def _take(self, job_ids: Sequence[str], seen: dict[str, PbsJob], some_unknown: bool, began: float) -> None:
        """Take over an answer. A job that it lacks is gone only where the server said that it knows one not."""
        with self._lock:
            for job_id in job_ids:
                job, told = self._watched.get(job_id), seen.get(job_id)
                if job is None:
                    continue
                if told is not None:
                    job.account = told.account if told.sight.ended else None
                    job.saw(told.sight)
                elif some_unknown and job.since <= began:
                    job.missed += 1
                    if job.missed >= _AGREEING_LOOKS:
                        before = job.sight or Sight()
                        job.saw(Sight(before.state, before.nodes, before.reason, gone=True, asked_at=began))


_queues: dict[tuple[str, str | None], PbsQueue] = {}
_queues_lock = Lock()


def shared_pbs_queue(server: str | None = None) -> PbsQueue:
    """This process's view of the server that pbs.conf names, or of another one."""
    name = os.environ.get("PBS_CONF_FILE", "")
    with _queues_lock:
        return _queues.setdefault((name, server), PbsQueue(cluster=server))
