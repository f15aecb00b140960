"""Measurement loop of a study: its launches, and further repeats until the target interval is reached.

    finish_leftovers(session)                     # what an earlier run left going
    already = measure_missing(session, only_failed=False)

What is submitted, waited for and collected are Prefect tasks; this is the loop around them. Launches on
clusters are many at once (`flows.cluster_launches`), those on this machine one after the other (`flows.local_launches`)
and after them: to ask a scheduler again and again, or a cluster whose nodes are on this machine, would disturb them.
"""

import math
import threading
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import get_args

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.printable import plural
from configs.plans.job import Job
from configs.plans.packing import Launch, pack_launches
from configs.plans.plan import Plan
from configs.records.record import MeasuringPass, Status
from configs.targets.target import LocalTarget
from flows.cluster_launches import run_on_clusters
from flows.local_launches import run_on_this_machine
from flows.outcomes import collect, row_of
from reports.render import preload_reports
from slurm.forking.parents import end_parents
from tasks.adopt import adopt_jobs
from tasks.campaign.graph import RunGraph
from tasks.campaign.ledger import (
    Ledger,
    RepeatKey,
    missing_measurements,
    planned_repeats,
    set_aside_damaged,
    told_set_aside,
)
from tasks.campaign.progress import ProgressRow
from tasks.campaign.repeats import Budget, grow_repeats
from tasks.campaign.retries import Retries
from tasks.campaign.session import Session
from tasks.planning.study_cost import launches_cost
from tasks.prefect_api.events import Happened, tell
from tasks.prefect_api.groups import with_group
from tasks.wait import wait_for_launch

MAX_UNGROUPED = 12
"""Launches that a graph shows each by itself, as three stages; of more, those of a block are a group."""
MAX_GROUP = 24
"""Launches of one group."""

Made = tuple[Launch, ProgressRow]


def finish_leftovers(session: Session) -> None:
    """Adopt launches of an earlier run that still go on; merge what ended ones left.

    Those of this machine are waited for; those that a scheduler has go on beside what is measured next.
    """
    leftovers, adopted = adopt_jobs.after(*session.graph.before_submit())(session)
    session.graph = RunGraph(adopted)
    session.run_progress.notes += leftovers.notes
    for name in leftovers.running:
        job = read_model(session.run.job(name).job, Job, PLAN_BYTES)
        if not isinstance(job.target, LocalTarget):
            session.adopted.append(name)
            continue
        row = row_of(Launch(job.measuring_pass, job.measurements), session.plan)
        session.run_progress.rows.append(row)
        _, waited = wait_for_launch.after(adopted)(name, row, session)
        session.graph.waited([name], waited)
        collect(session, name, row)


def measure_missing(session: Session, only_failed: bool) -> int:
    """Measure all that is missing, and more of what is not yet known well enough.

    Returns how many measurements were measured before.
    """
    run_progress = session.run_progress
    tried: set[RepeatKey] = set()
    launches = _missing(session, only_failed, tried)
    retries = Retries()
    budget = Budget(session, partial(tell, Happened.BUDGET_NEAR, session.plan.study))
    while not only_failed and not launches and not session.adopted and grow_repeats(session, None):
        launches = _missing(session, only_failed, tried)  # an earlier run went on already
    run_progress.already = run_progress.done
    run_progress.expect(_expected_seconds(session, launches))
    _run_launches(session, launches, retries, budget)
    while not only_failed and grow_repeats(session, budget.spent()):
        _run_launches(session, _missing(session, only_failed, tried), retries, budget)
    return run_progress.already


def _expected_seconds(session: Session, launches: list[Launch]) -> float | None:
    """How long the launches are predicted to take; None where a cell of them has no prediction, or jobs run at once."""
    local = {target.name for target in session.plan.targets if isinstance(target, LocalTarget)}
    cost = launches_cost(session.plan, launches)
    elsewhere = any(launch.measurements[0].cell.target not in local for launch in launches)
    return None if elsewhere or session.adopted or cost.unknown or not launches else cost.seconds


def _missing(session: Session, only_failed: bool, tried: set[RepeatKey]) -> list[Launch]:
    """The launches that the plan still lacks and no adopted job makes, in the order of their blocks.

    tried: what this run has measured so far, which grows by what is returned. What failed of it has been retried as
    often as it is to be: further repeats of other cells are no reason to measure it again.
    """
    plan, run_progress = session.plan, session.run_progress
    ledger = set_aside_damaged(session.run)
    run_progress.notes += told_set_aside(ledger.set_aside)
    if (beyond := _beyond_the_plan(plan, ledger)) not in (None, *run_progress.notes):
        run_progress.notes.append(str(beyond))
    adopted = [read_model(session.run.job(name).job, Job, PLAN_BYTES) for name in session.adopted]
    under_way: set[RepeatKey] = {
        (measurement.cell.key, job.measuring_pass, measurement.repeat)
        for job in adopted
        for measurement in job.measurements
    }
    left_out = under_way | {place for place in tried if ledger.decisive(place) is not None}
    launches: list[Launch] = []
    for measuring_pass in get_args(MeasuringPass):
        measurements = [
            measurement
            for measurement in missing_measurements(plan, ledger, measuring_pass, only_failed)
            if (measurement.cell.key, measuring_pass, measurement.repeat) not in left_out
        ]
        tried |= {(measurement.cell.key, measuring_pass, measurement.repeat) for measurement in measurements}
        launches += pack_launches(measurements, measuring_pass, plan.measuring.seed, plan.pack)
    tried |= under_way
    planned = planned_repeats(plan)
    # What --only-failed leaves for a later run is not completed, nor a part of this one.
    later = {place for place in planned if only_failed and ledger.decisive(place) is None} - under_way
    if later:
        run_progress.notes.append(
            f"{plural(len(later), 'measurement')} never tried, left out by --only-failed. What was tried before "
            "a script or other fields of the study were edited is no part of it now. Without the option all is measured"
        )
    run_progress.total = len(planned) - len(later)
    run_progress.done = run_progress.total - sum(len(launch.measurements) for launch in launches) - len(under_way)
    return launches


def _beyond_the_plan(plan: Plan, ledger: Ledger) -> str | None:
    """Say that repeats are not used, as the study asks for fewer now; None: there are none, or intervals decide."""
    if plan.measuring.target_interval is not None:
        return None
    beyond = [
        repeat
        for (key, measuring_pass, repeat), entries in ledger.entries.items()
        if measuring_pass == "timed"
        and repeat >= plan.repeats.get(key, repeat + 1)
        and any(entry.status is Status.COMPLETED for entry in entries)
    ]
    if not beyond:
        return None
    left_out = "is left out" if len(beyond) == 1 else "are left out"
    return (
        f"{plural(len(beyond), 'completed repeat')} beyond those that the study asks for {left_out} of the report. "
        f"To include {'it' if len(beyond) == 1 else 'them'}, set measuring.repeats to {max(beyond) + 1}"
    )


def _run_launches(session: Session, launches: list[Launch], retries: Retries, budget: Budget) -> None:
    """Make the launches, those on clusters first; all of them are on the progress from the beginning."""
    if launches or session.adopted:
        # While the first launch imports torch, and long over when its first cell begins.
        threading.Thread(target=preload_reports, name="preload", daemon=True).start()
    rows = [(launch, row_of(launch, session.plan)) for launch in launches]
    session.run_progress.rows += [row for _, row in rows]
    local = {target.name for target in session.plan.targets if isinstance(target, LocalTarget)}
    there = [(launch, row) for launch, row in rows if launch.measurements[0].cell.target not in local]
    here = [(launch, row) for launch, row in rows if launch.measurements[0].cell.target in local]
    if len(there) > MAX_UNGROUPED:
        # All in one: jobs of several blocks are in the queue at a time.
        with_group(
            session,
            f"{len(there)} launches on clusters",
            lambda: run_on_clusters(session, there, retries, budget),
        )
    else:
        run_on_clusters(session, there, retries, budget)
    try:
        if len(here) <= MAX_UNGROUPED:
            run_on_this_machine(session, here, retries, budget)
            return
        for title, group in in_groups(here):
            with_group(session, title, partial(run_on_this_machine, session, group, retries, budget))
    finally:
        end_parents()  # once: the parts of a block share one, which takes a second to start


def in_groups(rows: list[Made]) -> Iterator[tuple[str, list[Made]]]:
    """Launches in their order, by blocks and passes; of a long one parts of alike size, with a title for each."""
    for _, together in groupby(rows, key=lambda made: (made[0].measuring_pass, made[0].block)):
        block = list(together)
        row, parts = block[0][1], math.ceil(len(block) / MAX_GROUP)
        size = math.ceil(len(block) / parts)
        for part in range(parts):
            more = f", part {part + 1} of {parts}" if parts > 1 else ""
            yield f"{row.block_title}{more}", block[part * size : (part + 1) * size]
