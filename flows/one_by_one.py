"""Launches on this machine: one after the other, each while the run holds the machine's slot.

    work_off_here(session, launches, retries, budget)

Two launches side by side would disturb each other's measurements.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable

from configs.packing import Launch
from flows.outcomes import collect, give_up, leave_out, row_of
from slurm.local import cancel
from tasks.board import Row
from tasks.jobs import write_job
from tasks.merge import Collected
from tasks.repeats import Budget
from tasks.retries import Retries
from tasks.session import Session
from tasks.submit import submit_launches
from tasks.wait import wait_for_launch


def work_off_here(session: Session, launches: Iterable[tuple[Launch, Row]], retries: Retries, budget: Budget) -> None:
    """Make the launches; what the budget no longer pays for gets a record that says so."""
    queue = deque(launches)
    while queue:
        launch, row = queue.popleft()
        ended_by = budget.spent()
        if ended_by is not None:
            leave_out(session, launch, row, ended_by)
            continue
        with session.slot.held(row):
            collected = _visit(session, launch, row)
        budget.waited(row.waited_seconds)  # it pays for measuring
        outcome = retries.after(collected, launch.measuring_pass, session.target(launch.visits[0].cell.target))
        # A visit that is tried again was counted as made, and failed; it is neither yet.
        tried_again = len(outcome.again) + len(outcome.given_up) - len(collected.unvisited)
        session.board.done -= tried_again
        session.board.failed -= tried_again
        if outcome.given_up:
            given_up = Launch(launch.measuring_pass, outcome.given_up)
            give_up(session, given_up, row, outcome.status, outcome.message)
        if outcome.again:
            # Whoever ended the launch has its record; the others go on without it, and training from its checkpoint.
            again = Launch(launch.measuring_pass, outcome.again)
            queue.appendleft((again, row_of(again, session.plan)))
            session.board.rows.append(queue[0][1])
            time.sleep(outcome.failed_starts * 1.0)


def _visit(session: Session, launch: Launch, row: Row) -> Collected:
    """One launch from submission to records."""
    job = write_job(launch, session.plan, session.run, session.cache)
    row.state = "starting"
    try:
        submit_launches(job.name, [job.name], "local", session)
        wait_for_launch(job.name, row, session)
    except BaseException:
        # Whatever ends the run, be it in the midst of submitting: nothing of the launch goes on, what was
        # measured is kept, and the cause is told, not what follows from it.
        with contextlib.suppress(OSError):
            cancel(session.run.job(job.name).folder)
            collect(session, job.name, row)
        raise
    return collect(session, job.name, row)
