"""The measuring of a study: launches one after the other, and further repeats while a target asks for them.

    finish_leftovers(session)                     # what an earlier run left going
    already = measure(session, only_failed=False)

What is submitted, waited for and collected are Prefect tasks; this is the loop around them.
"""

import contextlib
import threading
import time
from collections import deque
from typing import get_args

from configs.job import Job, Visit
from configs.packing import Launch, pack_launches
from configs.plan import Plan
from configs.record import MeasuringPass, Status
from reports.render import preload
from slurm.local import cancel
from tasks.adopt import adopt_jobs, mark_collected
from tasks.board import Board, Row
from tasks.collect import collect_launch
from tasks.jobs import write_job
from tasks.ledger import missing_visits, places, read_ledger
from tasks.merge import Collected, failed_records
from tasks.repeats import Budget, grow_repeats
from tasks.session import Session
from tasks.submit import submit_launch
from tasks.wait import wait_for_launch

_START_ATTEMPTS = 3
"""A launch that ends before its first cell is tried so often, with growing pauses."""


def finish_leftovers(session: Session) -> None:
    """Adopt launches of an earlier run that still go on; merge what ended ones left."""
    leftovers = adopt_jobs(session)
    session.board.notes += leftovers.notes
    for name in leftovers.running:
        job = Job.model_validate_json(session.run.job(name).job.read_bytes())
        row = _row(Launch(job.measuring_pass, job.visits), session.plan)
        session.board.rows.append(row)
        wait_for_launch(name, row, session)
        session.board.notes += collect_launch(name, session).set_aside
        mark_collected(session.run, name)


def measure(session: Session, only_failed: bool) -> int:
    """Visit all that is missing, and more of what is not yet known well enough.

    Returns how many visits were measured before.
    """
    board = session.board
    queue = _missing(session, only_failed)
    budget = Budget(session)
    while not only_failed and not queue and grow_repeats(session, None):
        queue = _missing(session, only_failed)  # an earlier run went on already
    board.already = board.done
    _work_off(session, queue, budget)
    while not only_failed and grow_repeats(session, budget.spent()):
        _work_off(session, _missing(session, only_failed), budget)
    return board.already


def _missing(session: Session, only_failed: bool) -> deque[Launch]:
    """The launches that the plan still lacks, in the order of their blocks."""
    plan, board = session.plan, session.board
    ledger = read_ledger(session.run)
    board.notes += ledger.set_aside
    queue: deque[Launch] = deque()
    for measuring_pass in get_args(MeasuringPass):
        visits = missing_visits(plan, ledger, measuring_pass, only_failed)
        queue.extend(pack_launches(visits, measuring_pass, plan.measuring.seed, plan.pack))
    board.total = len(places(plan))
    board.done = board.total - sum(len(launch.visits) for launch in queue)
    return queue


def _work_off(session: Session, queue: deque[Launch], budget: Budget) -> None:
    """Make the launches one after the other; what the budget no longer pays for gets a record that says so."""
    plan, board = session.plan, session.board
    waiting = {id(launch): _row(launch, plan) for launch in queue}
    board.rows += waiting.values()
    start_attempts = 0
    if queue:
        # While the first launch imports torch, and long over when its first cell begins.
        threading.Thread(target=preload, name="preload", daemon=True).start()
    while queue:
        launch = queue.popleft()
        row = waiting.pop(id(launch), None)
        if row is None:
            row = _row(launch, plan)
            board.rows.append(row)
        ended_by = budget.spent()
        if ended_by is not None:
            _leave_out(session, launch, row, ended_by)
            continue
        with session.slot.held(row):
            collected = _visit(session, launch, row)
        budget.waited(row.waited_seconds)  # it pays for measuring
        start_attempts = start_attempts + 1 if collected.start_failure else 0
        if start_attempts >= _START_ATTEMPTS:
            _give_up(session, launch, row, Status.FAILED, f"the launch does not start: {collected.start_failure}")
            start_attempts = 0
        elif collected.unvisited:
            # Whoever ended the launch has its record; the others go on without it.
            queue.appendleft(Launch(launch.measuring_pass, tuple(collected.unvisited)))
            time.sleep(start_attempts * 1.0)


def _leave_out(session: Session, launch: Launch, row: Row, ended_by: str) -> None:
    """What no budget is left for: repeats beyond the least number were never promised, they just end."""
    asked = [visit for visit in launch.visits if visit.repeat < session.plan.measuring.repeats]
    if asked:
        promised = Launch(launch.measuring_pass, tuple(asked))
        _give_up(session, promised, row, Status.OVER_BUDGET, f"the study's {ended_by} is spent")
    else:
        row.state = "left out"


def _visit(session: Session, launch: Launch, row: Row) -> Collected:
    """One launch from submission to records."""
    job = write_job(launch, session.plan, session.run, session.cache)
    row.state = "starting"
    try:
        submit_launch(job.name, session)
        wait_for_launch(job.name, row, session)
    except BaseException:
        # Whatever ends the run, be it in the midst of submitting: nothing of the launch goes on, what was
        # measured is kept, and the cause is told, not what follows from it.
        with contextlib.suppress(OSError):
            cancel(session.run.job(job.name).folder)
            _collect(session, job.name, row)
        raise
    return _collect(session, job.name, row)


def _collect(session: Session, name: str, row: Row) -> Collected:
    """Records from what a launch left, and its row on the board."""
    collected = collect_launch(name, session)
    mark_collected(session.run, name)
    _account(session.board, row, collected)
    return collected


def _account(board: Board, row: Row, collected: Collected) -> None:
    """Bring a launch's outcome to the board."""
    failures = [record for record in collected.records if record.status is not Status.COMPLETED]
    row.done, row.failed = len(collected.records), len(failures)
    row.state = failures[0].status.value if failures else ("completed" if collected.records else "ended")
    if failures and failures[0].failure:
        row.note = f"{failures[0].failure.message}  log {failures[0].failure.log}"
    if collected.unvisited:
        row.note = f"{row.note}  {len(collected.unvisited)} cells go on in another launch".strip()
    board.done += len(collected.records)
    board.failed += len(failures)
    board.notes += collected.set_aside


def _give_up(session: Session, launch: Launch, row: Row, status: Status, message: str) -> None:
    """Records for visits that will not be made in this run."""
    job = write_job(launch, session.plan, session.run, session.cache)
    records = failed_records(session.run, job.name, list(launch.visits), status, message)
    mark_collected(session.run, job.name)
    _account(session.board, row, Collected(records=records))


def _row(launch: Launch, plan: Plan) -> Row:
    cell = launch.visits[0].cell
    names = {model.identity: model.name for model in plan.models}
    parts = [names.get(cell.model or "", cell.workload.kind), cell.dtype, str(cell.layout)]
    if cell.engine != "rankwise":
        parts.append(cell.engine)
    if len(launch.visits) == 1:
        parts.append(_purpose(launch.visits[0]))
    return Row(
        label="  ".join(part for part in parts if part),
        visits=len(launch.visits),
        block=launch.block + 1,
        blocks=max(plan.repeats.values()),
        measuring_pass=launch.measuring_pass,
    )


def _purpose(visit: Visit) -> str:
    return "correctness" if getattr(visit.cell.workload, "answers", False) else ""
