"""Launches that never measured, and groups that a scheduler refuses: each attempt is recorded, and others go on."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.common.execution import Layout
from configs.plans.job import Job, JobEnd, Launcher, Measurement, Submission
from configs.plans.packing import Launch
from configs.plans.paths import RunPaths
from configs.plans.plan import CellPoint, Plan, PlannedExperiment
from configs.records.record import Accounting, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from flows import cluster_launches
from flows.cli.live import summary_line
from flows.cli.results.inspect import status_rows
from flows.cluster_launches import SubmissionQueue
from flows.outcomes import account, give_up, resolve_retries, row_of, speed_of
from slurm.schedulers.waiting import note_waiting, read_waiting
from tasks.campaign.launches.jobs import write_job
from tasks.campaign.ledger import read_ledger
from tasks.campaign.progress import ProgressRow, RunProgress
from tasks.campaign.records import Collected, collect_job
from tasks.campaign.repeats import Budget
from tasks.campaign.retries import Retries
from tasks.campaign.session import Session
from tasks.prefect_api.stages import stage
from tasks.submit import Refusal
from tests.support.run_folders import report_runs

LIMIT = Refusal("sbatch: QOSMaxSubmitJobPerUserLimit", final=False, limited=True)
DENIED = Refusal("target.nodes 2 of c: sbatch: QOSMaxNodePerJobLimit", final=True)
NO_ALLOCATION = Refusal("target.allocation: job 7 has ended", final=True, status=Status.CANCELLED)
AWAY = Refusal("sbatch: Unable to contact slurm controller", final=False)


MOMENT = "2026-11-01T12:00:00+00:00"


def cells(*nodes: int) -> list[Cell]:
    return [
        Cell(workload=NoopWorkload(label=str(place), items=count), layout=Layout(dp=count), target="c", nodes=count)
        for place, count in enumerate(nodes)
    ]


def session_of(tmp_path: Path, asked: Sequence[Cell], **target: Any) -> Session:
    points = tuple(CellPoint(cell=cell.key, values={"label": "x"}, label="x") for cell in asked)
    plan = Plan(
        study="s",
        models=(),
        targets=(SlurmTarget.model_validate({"name": "c", "nodes": 2} | target),),
        measuring=Measuring(repeats=1, memory=False),
        pack=False,
        experiments=(PlannedExperiment(name="e", kind="sweep", model=None, points=points),),
        cells={cell.key: cell for cell in asked},
        repeats={cell.key: 1 for cell in asked},
    )
    run = RunPaths(tmp_path / "run")
    run.folder.mkdir()
    return Session(run, plan, tmp_path / "cache", RunProgress(), cast(Any, SimpleNamespace(check=lambda: None)))


def launch_of(cell: Cell, attempt: int = 1) -> Launch:
    return Launch("timed", (Measurement(cell=cell, repeat=0, attempt=attempt),))


def test_each_launch_that_is_lost_before_it_measures_is_an_attempt_with_its_job(tmp_path: Path) -> None:
    (cell,) = cells(1)
    session, retries = session_of(tmp_path, [cell], retries=1), Retries()
    launch, job_ids = launch_of(cell), []
    for number in (1, 2):
        job = write_job(launch, session.plan, session.run, session.cache)
        paths = session.run.job(job.name)
        end = JobEnd(status=Status.NODE_FAILED, return_code=None, nodes=("n1",), message="gone", finished_at=MOMENT)
        paths.end.write_text(end.model_dump_json())
        job_ids.append(str(100 + number))
        paths.accounting.write_text(Accounting(job_id=job_ids[-1], state="NODE_FAIL").model_dump_json())
        row = row_of(launch, session.plan)
        decision, again = resolve_retries(session, retries, collect_job(session.run, job.name), launch, row)
        if again is not None:
            launch = again[0]
            assert row.state == "node_failed" and session.run_progress.failed == 0
            assert retries.blamed(launch) == {"n1"}
    assert again is None and decision.given_up
    assert (session.run_progress.done, session.run_progress.failed) == (1, 1)
    (entries,) = read_ledger(session.run).entries.values()
    assert [(entry.attempt, entry.status) for entry in entries] == [(1, "node_failed"), (2, "node_failed")]
    assert [entry.record.accounting and entry.record.accounting.job_id for entry in entries] == job_ids
    assert all(entry.record.failure and "gone" in entry.record.failure.message for entry in entries)


class Scheduler:
    """Takes or refuses groups by a rule; `asked` are the numbers of nodes of each, in order."""

    def __init__(self, session: Session, rule: Any) -> None:
        self.asked: list[list[int]] = []
        self._session, self._rule = session, rule

    def __call__(self, what: str, names: Sequence[str], kind: str, session: Session) -> Refusal | None:

        jobs = [Job.model_validate_json(session.run.job(name).job.read_bytes()) for name in names]
        self.asked.append([job.cell.nodes for job in jobs])
        return cast("Refusal | None", self._rule(self.asked[-1]))


def filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: Sequence[int], rule: Any, **target: Any
) -> tuple[SubmissionQueue, Scheduler, Session]:
    asked = cells(*nodes)
    session = session_of(tmp_path, asked, **target)
    scheduler = Scheduler(session, rule)
    monkeypatch.setattr(cluster_launches, "submit_launches", stage("submit", "submit")(scheduler))
    rows = [(launch_of(cell), row_of(launch_of(cell), session.plan)) for cell in asked]
    queue = SubmissionQueue(session, rows, Retries(), Budget(session))
    queue._fill()
    return queue, scheduler, session


def statuses(session: Session) -> list[str]:
    return [entry.status for entries in read_ledger(session.run).entries.values() for entry in entries]


def test_what_can_never_run_is_recorded_and_the_others_are_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, scheduler, session = filled(
        tmp_path, monkeypatch, [2, 1, 2, 1], lambda nodes: DENIED if 2 in nodes else None
    )
    assert scheduler.asked == [[2, 2], [1, 1]]
    assert statuses(session) == ["failed", "failed"] and len(queue._active_jobs.jobs) == 2
    assert not queue._held.groups


def test_what_an_ended_allocation_did_not_begin_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, session = filled(tmp_path, monkeypatch, [1, 1], lambda nodes: NO_ALLOCATION)
    assert statuses(session) == ["cancelled", "cancelled"]


def test_a_limit_halves_a_group_holds_the_rest_and_lets_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, scheduler, session = filled(
        tmp_path, monkeypatch, [2, 2, 2, 1], lambda nodes: LIMIT if nodes.count(2) > 1 else None
    )
    assert scheduler.asked == [[2, 2, 2], [2, 2], [2], [1]]
    assert len(queue._active_jobs.jobs) == 2 and queue._held.due(10**9)
    waiting = [read_waiting(session.run.job(job.name)) for each in queue._held.groups for job, _ in each.jobs]
    assert [kept and kept.reason for kept in waiting] == [LIMIT.message] * 2
    queue._fill()
    assert scheduler.asked[4:] == [[2]], "when one was accepted the next is tried at once, one after the other"


def test_while_the_scheduler_is_away_it_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, scheduler, _ = filled(tmp_path, monkeypatch, [2, 1, 1], lambda nodes: AWAY)
    queue._fill()
    assert scheduler.asked == [[2]] and queue._open()


def test_what_is_refused_for_longer_than_the_target_allows_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, _, session = filled(tmp_path, monkeypatch, [2], lambda nodes: LIMIT, max_queue_minutes=1e-9)
    assert queue._held.groups
    queue._fill()
    assert not queue._held.groups and not queue._open()
    (entries,) = read_ledger(session.run).entries.values()
    failure = entries[0].record.failure
    assert entries[0].status == "cancelled" and failure is not None
    assert "max_queue_minutes" in failure.message and "QOSMaxSubmitJobPerUserLimit" in failure.message


def test_what_was_cancelled_did_not_fail(tmp_path: Path) -> None:
    """An interrupted measurement ended the summary with `1 failed`."""
    session = session_of(tmp_path, cells(1, 1, 2))
    progress, rows = session.run_progress, []
    progress.total = 3
    for cell, status in zip(
        session.plan.cells.values(), (Status.CANCELLED, Status.FAILED, Status.CANCELLED), strict=True
    ):
        rows.append(row_of(launch_of(cell), session.plan))
        give_up(session, launch_of(cell), rows[-1], status, "cancelled on request")
    progress.rows = rows
    assert (progress.done, progress.failed, progress.cancelled) == (3, 1, 2)
    assert "3 of 3 measurements, 1 failed, 0 running, 2 cancelled" in summary_line(progress)
    assert "3 of 3 measurements done, 1 failed, 2 cancelled" in progress.description


def test_status_says_why_jobs_wait_and_why_none_was_taken(tmp_path: Path) -> None:
    asked = cells(1, 2, 2)
    session = session_of(tmp_path, asked)
    jobs = [write_job(launch_of(cell), session.plan, session.run, session.cache) for cell in asked]
    held, refused, running = (session.run.job(job.name) for job in jobs)
    held.submission.write_text(Submission(job_id="7", submitted_at=MOMENT).model_dump_json())
    note_waiting(held, "PENDING", "JobHeldUser")
    note_waiting(refused, "", LIMIT.message)
    running.submission.write_text(Submission(job_id="8", submitted_at=MOMENT).model_dump_json())
    note_waiting(running, "PENDING", "Resources")  # once; it has begun since
    launcher = Launcher(pid=1, pid_started=1, host="n1", started_at=MOMENT)
    running.node_launcher(0).write_text(launcher.model_dump_json())
    rows = status_rows(session.run, session.plan, read_ledger(session.run))
    assert [(row["status"], row["job"], row["waits_for"]) for row in rows] == [
        ("queued", "7", "JobHeldUser"),
        ("waiting", None, LIMIT.message),
        ("waiting", "8", None),
    ]


@pytest.mark.parametrize(
    ("status", "state", "note"),
    [
        (Status.CANCELLED, "cancelled", "1 cell not measured"),
        (Status.COMPLETED, "ended", "1 cell continues in another launch"),
    ],
)
def test_a_launch_that_an_interrupt_ended_is_not_said_to_continue(status: Status, state: str, note: str) -> None:
    measurement = Measurement(cell=Cell(workload=NoopWorkload()), repeat=0, attempt=1)
    end = JobEnd(status=status, return_code=None, message="", finished_at="2026-01-01T00:00:00+00:00")
    row = ProgressRow("noop", 1, 1, 1)
    account(RunProgress(), row, Collected(unreached=[measurement], end=end))
    assert (row.state, row.note) == (state, note)


def test_a_launch_that_ended_says_how_fast_its_cells_were(tmp_path: Path) -> None:
    fast, slow = report_runs.generate(batch_size=8), report_runs.generate(batch_size=4)
    run = report_runs.write_plan(tmp_path, report_runs.plan_of([fast, slow], []))
    for cell, seconds in ((fast, 0.5), (slow, 2.0)):  # 8 prompts of 5 tokens
        report_runs.write_measurements(run, cell, [seconds, 2 * seconds], peak_mib=1)
    report_runs.write_record(run, slow, repeat=2, status=Status.OUT_OF_MEMORY)
    found = {place: entry.record for place, (entry,) in read_ledger(run).entries.items()}
    assert len(found) == 7
    assert speed_of(run, [*found.values()]) == "10 to 80 tokens/s"
    assert speed_of(run, [found[fast.key, "timed", 1]]) == "40 tokens/s"
    assert speed_of(run, [found[fast.key, "memory", 0], found[slow.key, "timed", 2]]) == ""
    run.record(fast.key, "timed", 1, 1).with_suffix(".npz").write_bytes(b"damaged")
    assert speed_of(run, [found[fast.key, "timed", repeat] for repeat in (0, 1)]) == "80 tokens/s"
