"""The measuring of a study: its launches, and further repeats while a target interval asks for them.

    finish_leftovers(session)                     # what an earlier run left going
    already = measure(session, only_failed=False)

What is submitted, waited for and collected are Prefect tasks; this is the loop around them. Launches on
clusters are many at once (`flows.in_flight`), those on this machine one after the other (`flows.one_by_one`) and
after them: to ask a scheduler again and again, or a cluster whose nodes are on this machine, would disturb them.
"""

import threading
from typing import get_args

from configs.job import Job, Visit
from configs.packing import Launch, pack_launches
from configs.record import MeasuringPass
from flows.in_flight import work_off_there
from flows.one_by_one import work_off_here
from flows.outcomes import collect, row_of
from reports.render import preload
from tasks.adopt import adopt_jobs
from tasks.ledger import missing_visits, places, read_ledger
from tasks.repeats import Budget, grow_repeats
from tasks.retries import Retries
from tasks.session import Session
from tasks.wait import wait_for_launch


def finish_leftovers(session: Session) -> None:
    """Adopt launches of an earlier run that still go on; merge what ended ones left.

    Those of this machine are waited for; those that a scheduler has go on beside what is measured next.
    """
    leftovers = adopt_jobs(session)
    session.board.notes += leftovers.notes
    for name in leftovers.running:
        job = Job.model_validate_json(session.run.job(name).job.read_bytes())
        if job.target.kind != "local":
            session.adopted.append(name)
            continue
        row = row_of(Launch(job.measuring_pass, job.visits), session.plan)
        session.board.rows.append(row)
        wait_for_launch(name, row, session)
        collect(session, name, row)


def measure(session: Session, only_failed: bool) -> int:
    """Visit all that is missing, and more of what is not yet known well enough.

    Returns how many visits were measured before.
    """
    board = session.board
    launches = _missing(session, only_failed)
    retries, budget = Retries(), Budget(session)
    while not only_failed and not launches and not session.adopted and grow_repeats(session, None):
        launches = _missing(session, only_failed)  # an earlier run went on already
    board.already = board.done
    _work_off(session, launches, retries, budget)
    while not only_failed and grow_repeats(session, budget.spent()):
        _work_off(session, _missing(session, only_failed), retries, budget)
    return board.already


def _missing(session: Session, only_failed: bool) -> list[Launch]:
    """The launches that the plan still lacks and no adopted job makes, in the order of their blocks."""
    plan, board = session.plan, session.board
    ledger = read_ledger(session.run)
    board.notes += ledger.set_aside
    adopted = [Job.model_validate_json(session.run.job(name).job.read_bytes()) for name in session.adopted]
    under_way = {(job.measuring_pass, visit.cell.key, visit.repeat) for job in adopted for visit in job.visits}
    launches: list[Launch] = []
    for measuring_pass in get_args(MeasuringPass):

        def is_made(visit: Visit, measuring_pass: MeasuringPass = measuring_pass) -> bool:
            return (measuring_pass, visit.cell.key, visit.repeat) in under_way

        visits = [visit for visit in missing_visits(plan, ledger, measuring_pass, only_failed) if not is_made(visit)]
        launches += pack_launches(visits, measuring_pass, plan.measuring.seed, plan.pack)
    board.total = len(places(plan))
    board.done = board.total - sum(len(launch.visits) for launch in launches) - len(under_way)
    return launches


def _work_off(session: Session, launches: list[Launch], retries: Retries, budget: Budget) -> None:
    """Make the launches, those on clusters first; all of them are on the board from the beginning."""
    if launches or session.adopted:
        # While the first launch imports torch, and long over when its first cell begins.
        threading.Thread(target=preload, name="preload", daemon=True).start()
    rows = [(launch, row_of(launch, session.plan)) for launch in launches]
    session.board.rows += [row for _, row in rows]
    kinds = {target.name: target.kind for target in session.plan.targets}
    there = [(launch, row) for launch, row in rows if kinds[launch.visits[0].cell.target] != "local"]
    work_off_there(session, there, retries, budget)
    here = [(launch, row) for launch, row in rows if kinds[launch.visits[0].cell.target] == "local"]
    work_off_here(session, here, retries, budget)
