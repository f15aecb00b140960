"""Launches on this machine: sequential, each while its launcher holds the machine lock.

    run_on_this_machine(session, launches, retries, budget)

Concurrent launches would disturb each other's measurements.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable

from configs.plans.packing import Launch
from flows.outcomes import collect, leave_out, resolve_retries
from slurm.schedulers.local import cancel
from tasks.campaign.launches.jobs import write_job
from tasks.campaign.progress import ProgressRow
from tasks.campaign.records import Collected
from tasks.campaign.repeats import Budget
from tasks.campaign.retries import Retries
from tasks.campaign.session import Session
from tasks.submit import submit_launches
from tasks.wait import wait_for_launch


def run_on_this_machine(
    session: Session, launches: Iterable[tuple[Launch, ProgressRow]], retries: Retries, budget: Budget
) -> None:
    """Make the launches; what the budget no longer pays for gets a record that says so.

    The processes that launchers are forked from (`slurm.forking.parents`) are left to the next launches.
    """
    queue = deque(launches)
    while queue:
        launch, row = queue.popleft()
        ended_by = budget.spent()
        if ended_by is not None:
            leave_out(session, launch, row, ended_by)
            continue
        collected = _measurement(session, launch, row)
        budget.waited(row.waited_seconds)  # it pays for measuring
        outcome, again = resolve_retries(session, retries, collected, launch, row)
        if again is not None:
            queue.appendleft(again)
            time.sleep(outcome.failed_starts * 1.0)


def _measurement(session: Session, launch: Launch, row: ProgressRow) -> Collected:
    """One launch from submission to records."""
    job = write_job(launch, session.plan, session.run, session.cache)
    row.state, graph = "starting", session.graph
    try:
        _, submitted = submit_launches.after(*graph.before_submit())(row.title, [job.name], "local", session)
        graph.submitted([job.name], submitted)
        _, waited = wait_for_launch.after(submitted)(job.name, row, session)
        graph.waited([job.name], waited)
    except BaseException:
        # Whatever ends the run, be it in the midst of submitting: nothing of the launch goes on, what was
        # measured is kept, and the cause is told, not what follows from it.
        with contextlib.suppress(OSError):
            cancel(session.run.job(job.name).folder)
            collect(session, job.name, row)
        raise
    return collect(session, job.name, row)
