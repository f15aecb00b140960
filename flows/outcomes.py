"""What a launch came to: its row on the board, its records, and records for what will not be made in this run."""

from configs.job import Job, Visit
from configs.packing import Launch
from configs.plan import Plan
from configs.record import Status
from tasks.adopt import mark_collected
from tasks.board import Board, Row
from tasks.collect import collect_launch
from tasks.jobs import write_job
from tasks.merge import Collected, failed_records
from tasks.session import Session


def row_of(launch: Launch, plan: Plan) -> Row:
    """How a launch is shown."""
    cell = launch.visits[0].cell
    names = {model.identity: model.name for model in plan.models}
    parts = [names.get(cell.model or "", cell.workload.kind), cell.dtype, cell.place]
    if cell.engine != "rankwise":
        parts.append(cell.engine)
    if len(plan.targets) > 1:
        parts.append(cell.target)
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


def collect(session: Session, name: str, row: Row) -> Collected:
    """Records from what a launch left, and its row on the board."""
    collected = collect_launch(name, session)
    mark_collected(session.run, name)
    account(session.board, row, collected)
    return collected


def account(board: Board, row: Row, collected: Collected) -> None:
    """Bring a launch's outcome to the board."""
    failures = [record for record in collected.records if record.status is not Status.COMPLETED]
    row.done, row.failed = len(collected.records), len(failures)
    row.state = failures[0].status.value if failures else ("completed" if collected.records else "ended")
    row.note = ""
    if failures and failures[0].failure:
        row.note = f"{failures[0].failure.message}  log {failures[0].failure.log}"
    if collected.unvisited:
        row.note = f"{row.note}  {len(collected.unvisited)} cells go on in another launch".strip()
    board.done += len(collected.records)
    board.failed += len(failures)
    board.notes += collected.set_aside


def give_up(session: Session, launch: Launch, row: Row, status: Status, message: str) -> None:
    """Records for visits that will not be made in this run."""
    job = write_job(launch, session.plan, session.run, session.cache)
    give_up_job(session, job, row, status, message)


def give_up_job(session: Session, job: Job, row: Row, status: Status, message: str) -> None:
    """The same for a job that was written and never began."""
    records = failed_records(session.run, job.name, list(job.visits), status, message)
    mark_collected(session.run, job.name)
    account(session.board, row, Collected(records=records))


def leave_out(session: Session, launch: Launch, row: Row, ended_by: str) -> None:
    """What no budget is left for: repeats beyond the least number were never promised, they just end."""
    asked = [visit for visit in launch.visits if visit.repeat < session.plan.measuring.repeats]
    if asked:
        promised = Launch(launch.measuring_pass, tuple(asked))
        give_up(session, promised, row, Status.OVER_BUDGET, f"the study's {ended_by} is spent")
    else:
        row.state = "left out"
