"""Record the outcome of a launch: progress row, records, and failure records for missing measurements."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import plural, plural_noun, significant
from configs.plans.job import Job, Measurement
from configs.plans.packing import Launch
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Record, Status
from configs.records.samples import DamagedSamplesError
from configs.targets.target import LocalTarget
from configs.workloads import descriptor_of
from reports.reading.read import decisive_reading
from tasks.campaign.launches.jobs import write_job
from tasks.campaign.launches.leftovers import mark_collected
from tasks.campaign.ledger import told_set_aside
from tasks.campaign.progress import ProgressRow, RunProgress
from tasks.campaign.records import Collected, failed_records
from tasks.campaign.retries import Retries, RetryDecision
from tasks.campaign.session import Session
from tasks.collect import collect_launch

_MAX_READ = 32
"""Records whose rates are read when a launch ends: each takes some milliseconds, in which nothing is measured."""


def row_of(launch: Launch, plan: Plan) -> ProgressRow:
    """How a launch is shown."""
    cell = launch.measurements[0].cell
    names = {model.identity: model.name for model in plan.models}
    parts = [names.get(cell.model or "", cell.workload.kind), cell.dtype, cell.place]
    if cell.engine != "rankwise":
        parts.append(cell.engine)
    if len(plan.targets) > 1:
        parts.append(cell.target)
    if len(launch.measurements) == 1:
        parts.append(_purpose(launch.measurements[0]))
    return ProgressRow(
        label="  ".join(part for part in parts if part),
        work=several(sorted({measurement.cell.workload.summary for measurement in launch.measurements})),
        measurements=len(launch.measurements),
        block=launch.block + 1,
        blocks=max(plan.repeats.values()),
        measuring_pass=launch.measuring_pass,
        attempt=max(measurement.attempt for measurement in launch.measurements),
    )


def several(names: Sequence[str]) -> str:
    """Names for a title."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _purpose(measurement: Measurement) -> str:
    return "correctness" if measurement.cell.workload.keeps_answers else ""


def collect(session: Session, name: str, row: ProgressRow) -> Collected:
    """Records from what a launch left, and its row on the progress."""
    in_turn = isinstance(read_model(session.run.job(name).job, Job, PLAN_BYTES).target, LocalTarget)
    collected, done = collect_launch.after(*session.graph.before_collect(name))(row.title, name, session)
    session.graph.collected(done, in_turn)
    mark_collected(session.run, name)
    row.speed = speed_of(session.run, collected.records)
    account(session.run_progress, row, collected)
    return collected


def speed_of(run: RunPaths, records: Sequence[Record]) -> str:
    """`48.1 tokens/s`, of several cells `48.1 to 412 tokens/s`; empty where none has a rate that is compared."""
    timed = [
        record
        for record in records
        if record.status is Status.COMPLETED
        and record.measuring_pass == "timed"
        and descriptor_of(record.cell.workload).compared
        and not record.cell.workload.keeps_answers
    ]
    units, rates = set(), []
    for record in timed if len(timed) <= _MAX_READ else ():
        path = run.record(record.key, record.measuring_pass, record.repeat, record.attempt)
        with suppress(OSError, DamagedSamplesError):  # the report says what of it cannot be read
            reading = decisive_reading(record, path, path.name, defaultdict(list))
            if reading.rates is not None and reading.rates.throughput:
                rates.append(reading.rates.throughput)
                units.add(descriptor_of(record.cell.workload).unit)
    if len(units) != 1:
        return ""
    shown = list(dict.fromkeys(significant(value) for value in (min(rates), max(rates))))
    return f"{' to '.join(shown)} {plural_noun(units.pop())}/s"


def account(run_progress: RunProgress, row: ProgressRow, collected: Collected) -> None:
    """Bring a launch's outcome to the progress."""
    failures = [record for record in collected.records if record.status is not Status.COMPLETED]
    row.done, row.failed = len(collected.records), len(failures)
    cancelled_launch = collected.end is not None and collected.end.status is Status.CANCELLED
    left = "cancelled" if cancelled_launch else "ended"
    row.state = failures[0].status.value if failures else ("completed" if collected.records else left)
    row.note = ""
    if failures and failures[0].failure:
        row.note = f"{failures[0].failure.message}  log {failures[0].failure.log}"
    if collected.unreached:
        count = len(collected.unreached)
        goes_on = f"{'continues' if count == 1 else 'continue'} in another launch"
        row.note = f"{row.note}  {plural(count, 'cell')} {'not measured' if cancelled_launch else goes_on}".strip()
    run_progress.done += len(collected.records)
    cancelled = sum(record.status is Status.CANCELLED for record in failures)
    run_progress.failed += len(failures) - cancelled
    run_progress.cancelled += cancelled
    run_progress.notes += told_set_aside(collected.set_aside)


def give_up(session: Session, launch: Launch, row: ProgressRow, status: Status, message: str) -> None:
    """Records for measurements that will not be made in this run."""
    job = write_job(launch, session.placed_plan, session.run, session.cache)
    give_up_job(session, job, row, status, message)


def give_up_job(session: Session, job: Job, row: ProgressRow, status: Status, message: str) -> None:
    """The same for a job that was written and never began."""
    records = failed_records(session.run, job.name, list(job.measurements), status, message)
    mark_collected(session.run, job.name)
    account(session.run_progress, row, Collected(records=records))


def leave_out(session: Session, launch: Launch, row: ProgressRow, ended_by: str) -> None:
    """What no budget is left for: repeats beyond the least number were never promised, they just end."""
    asked = [measurement for measurement in launch.measurements if measurement.repeat < session.plan.measuring.repeats]
    if asked:
        promised = Launch(launch.measuring_pass, tuple(asked))
        give_up(session, promised, row, Status.OVER_BUDGET, f"the study's {ended_by} is exhausted")
    else:
        row.state = "left out"


def _record_failed_start(session: Session, collected: Collected, outcome: RetryDecision, row: ProgressRow) -> None:
    """Records of a launch that ended before its first measurement: an attempt too, of the job that the scheduler had.

    Those that are tried again count as neither made nor failed yet.
    """
    records = failed_records(session.run, collected.job, collected.unreached, outcome.status, outcome.message)
    given_up = {measurement.name for measurement in outcome.given_up}
    final = [
        record for record, measurement in zip(records, collected.unreached, strict=True) if measurement.name in given_up
    ]
    if final:
        account(session.run_progress, row, Collected(records=final))
    else:
        row.state, row.note = outcome.status.value, outcome.message


def resolve_retries(
    session: Session, retries: Retries, collected: Collected, launch: Launch, row: ProgressRow
) -> tuple[RetryDecision, tuple[Launch, ProgressRow] | None]:
    """Decide what becomes of measurements that a launch left without figures, and record those that are given up.

    Returns the decision, and the launch to make again with its row on the progress; None where there is none.
    """
    run_progress = session.run_progress
    outcome = retries.after(collected, launch.measuring_pass, session.target(launch.measurements[0].cell.target))
    if collected.start_failure:
        _record_failed_start(session, collected, outcome, row)
    # A measurement that is tried again was counted as made, and failed; it is neither yet.
    tried_again = len(outcome.again) + len(outcome.given_up) - len(collected.unreached)
    run_progress.done -= tried_again
    run_progress.failed -= tried_again
    if not outcome.again:
        return outcome, None
    # Whatever ended the launch has its record; the others go on without it, and training from its checkpoint.
    again = Launch(launch.measuring_pass, outcome.again)
    run_progress.rows.append(row_of(again, session.plan))
    return outcome, (again, run_progress.rows[-1])
