"""Active jobs: submitted or adopted from an earlier run, and not yet collected. Does not import Prefect."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from configs.common.printable import plural
from configs.plans.job import Job
from configs.plans.packing import Launch
from configs.targets.resources import ClusterTarget
from slurm.schedulers.adapter import adapter_for
from slurm.schedulers.refusals import JobState, Unavailable
from tasks.campaign.launches.leftovers import mark_collected
from tasks.campaign.progress import ProgressRow
from tasks.campaign.records import collect_job
from tasks.campaign.session import Session


@dataclass
class Flown:
    """One job in the queue or running. `array`: which submission it is of; `running_since`: by the monotonic clock.

    A suspended job began later by as much: neither its time limit nor a budget counts the pause.
    """

    job: Job
    row: ProgressRow
    array: int
    running_since: float | None = None
    looked_at: float | None = None

    def saw(self, state: JobState, now: float) -> None:
        """Note that the job was looked at."""
        since_look, self.looked_at = 0.0 if self.looked_at is None else now - self.looked_at, now
        if self.running_since is None:
            self.running_since = now if state in ("running", "suspended") else None
        elif state == "suspended":
            self.running_since += since_look

    @property
    def launch(self) -> Launch:
        """What the job was made of."""
        return Launch(self.job.measuring_pass, self.job.measurements)

    @property
    def node_seconds(self) -> float:
        """Time that it has run for so far, times its nodes."""
        return 0.0 if self.running_since is None else (time.monotonic() - self.running_since) * self.job.cell.nodes


class ActiveJobs:
    """All of them, by name. A plain class: Prefect would walk through a dataclass that a task is given."""

    def __init__(self) -> None:
        self.jobs: dict[str, Flown] = {}
        self._arrays = 0

    def add(self, jobs: Sequence[tuple[Job, ProgressRow]]) -> None:
        """Count jobs that were handed over together, or one that was found."""
        self._arrays += 1
        for job, row in jobs:
            self.jobs[job.name] = Flown(job, row, self._arrays)

    def queued(self, target: str) -> int:
        """Jobs of a target that are in its queue, running ones included."""
        return sum(1 for flown in self.jobs.values() if flown.job.target.name == target)

    def may_run(self) -> int:
        """The most jobs, of all targets, that can run side by side of what was submitted so far.

        Each array runs at most its target's `max_running` at once, but two arrays know nothing of each other.
        """
        left = Counter((flown.array, _max_running(flown)) for flown in self.jobs.values())
        return sum(min(count, most or count) for (_, most), count in left.items())

    def cancel(self, names: Sequence[str], session: Session) -> None:
        """End these jobs; return when nothing of them is left in the queue.

        Raises Unavailable naming each scheduler that does not answer, when all have been asked.
        """
        adapters: dict[str, list[str]] = {}
        for name in names:
            adapters.setdefault(self.jobs[name].job.target.adapter, []).append(name)
        problems = []
        for adapter, those in adapters.items():
            try:
                adapter_for(adapter).cancel_many([session.run.job(name).folder for name in those])
            except Unavailable as error:
                problems.append(str(error))
        if problems:
            raise Unavailable("; ".join(problems))

    def abandon(self, session: Session) -> None:
        """End everything and merge what it left, whatever goes wrong on the way.

        No Prefect task here: the run ends, and its API may be what went away. What is not merged, the next run finds.
        """
        for flown in self.jobs.values():
            flown.row.state, flown.row.note = "cancelled", ""
        try:
            self.cancel(list(self.jobs), session)
        except OSError as error:
            session.run_progress.left_behind = (
                f"{plural(len(self.jobs), 'job')} may still run or have files to bring. The next run adopts or ends "
                f"{'it' if len(self.jobs) == 1 else 'them'}: {error}"
            )
        for name, flown in self.jobs.items():
            with contextlib.suppress(OSError, ValueError):
                flown.row.done = len(collect_job(session.run, name).records)
                mark_collected(session.run, name)


def _max_running(flown: Flown) -> int | None:
    target = flown.job.target
    return target.max_running if isinstance(target, ClusterTarget) else None
