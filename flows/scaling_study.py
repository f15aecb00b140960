"""The study, from one file to one report.

    from flows.scaling_study import scaling_study
    result = scaling_study(Path("study.yaml"))

The stages are Prefect tasks. A cell that fails is a record, not a failed task; the flow fails when the
pipeline itself cannot go on. Whatever the Prefect API does meanwhile, files in the run folder are the
truth: a run that was interrupted goes on where it stopped when it is started again.
"""

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled

from configs.base import Frozen
from configs.job import Job, Visit
from configs.packing import Launch, pack_launches
from configs.paths import RunPaths
from configs.plan import Plan
from configs.record import MeasuringPass, Status
from configs.study import StudySpec, load_study
from flows.folders import cache_folder
from flows.prefect_settings import api_named_by_environment
from reports.render import preload
from slurm.local import cancel
from tasks.adopt import adopt_jobs, mark_collected
from tasks.api import await_api, end_lost_run, tag_run
from tasks.board import Board, Row, new_board
from tasks.cancellation import ApiWatcher, RunCancelled
from tasks.collect import collect_launch
from tasks.credentials import api_environment
from tasks.fetch import fetch_model
from tasks.ledger import missing_visits, places, read_ledger
from tasks.merge import Collected, failed_records
from tasks.provision import provision
from tasks.publish import begin_progress, publish
from tasks.render import render
from tasks.resolve import resolve_study
from tasks.runlock import run_lock
from tasks.session import Session
from tasks.slot import MachineSlot
from tasks.submit import submit_launch, write_job
from tasks.wait import wait_for_launch

_START_ATTEMPTS = 3
"""A launch that ends before its first cell is tried so often, with growing pauses."""

_API_SECONDS = 300.0
"""So long a run that has its report waits for an API that is away, to tell it."""


class StudyResult(Frozen):
    """What a run of a study came to."""

    folder: str
    report: str
    sentences: list[str]
    visits: int
    already_measured: int
    statuses: dict[str, int]


def _flow_run_name() -> str:
    """The study's name, from the parameter, which is a study or the path of its file."""
    study = flow_run.parameters.get("study")
    return study.study if isinstance(study, StudySpec) else Path(str(study)).stem


@flow(name="scaling study", flow_run_name=_flow_run_name, validate_parameters=False)
def scaling_study(
    study: StudySpec | Path,
    runs: Path = Path("runs"),
    only_failed: bool = False,
    accept_environment: bool = False,
    base: Path | None = None,
) -> StudyResult | State[Any]:
    """Measure what a study asks for and is not measured yet, and write its report.

    Args:
        study: the study, or the path of its YAML file.
        runs: folder under which the run folder, named like the study, lies.
        only_failed: measure only what was tried before and failed.
        accept_environment: go on although the run folder was begun in another environment.
        base: folder that relative paths in the study are relative to; by default that of its file.
    """
    if isinstance(study, str | Path):
        base = base or Path(study).parent
        study = load_study(Path(study))
    return measure_study(study, runs, base or Path.cwd(), only_failed, accept_environment)


def measure_study(
    study: StudySpec, runs: Path, base: Path, only_failed: bool, accept_environment: bool
) -> StudyResult | State[Any]:
    """What every flow of this project does with its study; to be called inside a flow run."""
    run = RunPaths((runs / study.study).absolute())
    identifier = flow_run.id
    with run_lock(run, identifier) as before, _signals_raise(), api_environment():
        if before is not None and end_lost_run(before):
            get_run_logger().info("flow run %s, which had gone without a word, is marked as crashed", before)
        run.jobs.mkdir(exist_ok=True)
        board = new_board()
        board.study = study.study
        watcher = ApiWatcher(identifier, board, begin_progress(study.study))
        with watcher, MachineSlot(watcher, identifier) as slot:
            slot.prepare(create=api_named_by_environment() is None)
            try:
                return _run(study, run, board, watcher, slot, only_failed, accept_environment, base)
            except RunCancelled:
                return Cancelled(message="cancelled through the API; what was measured is kept")
            finally:
                board.ended = True


def _run(
    study: StudySpec,
    run: RunPaths,
    board: Board,
    watcher: ApiWatcher,
    slot: MachineSlot,
    only_failed: bool,
    accept_environment: bool,
    base: Path,
) -> StudyResult:
    """The method section: resolve, provision, measure, report."""
    cache = cache_folder()
    board.stage = "resolving"
    models = [fetch_model(spec, position, cache, base) for position, spec in enumerate(study.models)]
    plan = resolve_study(study, models, run, base)
    tag_run(flow_run.id, plan)
    session = Session(run, plan, cache, board, watcher, slot)
    provision(session, accept_environment)
    _finish_leftovers(session)
    board.stage = "measuring"
    already = _measure(session, only_failed)
    board.stage = "reporting"
    summary = render(run)
    board.stage = "waiting for the Prefect API"
    if await_api(_API_SECONDS):
        _publish(study.study, run)
    return StudyResult(
        folder=str(run.folder),
        report=str(run.report),
        sentences=list(summary.sentences),
        visits=board.total,
        already_measured=already,
        statuses=dict(summary.statuses),
    )


def _finish_leftovers(session: Session) -> None:
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


def _measure(session: Session, only_failed: bool) -> int:
    """Visit all that is missing. Returns how many visits were measured before."""
    plan, board = session.plan, session.board
    ledger = read_ledger(session.run)
    board.notes += ledger.set_aside
    queue: deque[Launch] = deque()
    passes: tuple[MeasuringPass, ...] = ("timed", "memory")
    for measuring_pass in passes:
        visits = missing_visits(plan, ledger, measuring_pass, only_failed)
        queue.extend(pack_launches(visits, measuring_pass, plan.measuring.seed, plan.pack))
    board.total = len(places(plan))
    board.already = board.done = board.total - sum(len(launch.visits) for launch in queue)
    waiting = {id(launch): _row(launch, plan) for launch in queue}
    board.rows += waiting.values()
    deadline = time.monotonic() + (plan.measuring.budget_minutes or float("inf")) * 60
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
        if time.monotonic() > deadline:
            _give_up(session, launch, row, Status.OVER_BUDGET, "the study's budget of wall time is spent")
            continue
        with session.slot.held(row):
            collected = _visit(session, launch, row)
        deadline += row.waited_seconds  # the budget pays for measuring
        start_attempts = start_attempts + 1 if collected.start_failure else 0
        if start_attempts >= _START_ATTEMPTS:
            _give_up(session, launch, row, Status.FAILED, f"the launch does not start: {collected.start_failure}")
            start_attempts = 0
        elif collected.unvisited:
            # Whoever ended the launch has its record; the others go on without it.
            queue.appendleft(Launch(launch.measuring_pass, tuple(collected.unvisited)))
            time.sleep(start_attempts * 1.0)
    return board.already


def _visit(session: Session, launch: Launch, row: Row) -> Collected:
    """One launch from submission to records."""
    job = write_job(launch, session)
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
    job = write_job(launch, session)
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
        memory_pass=launch.measuring_pass == "memory",
    )


def _purpose(visit: Visit) -> str:
    return "correctness" if getattr(visit.cell.workload, "answers", False) else ""


def _publish(study: str, run: RunPaths) -> None:
    """Artifacts are a copy for the UI: the report stands without them."""
    try:
        publish(study, run)
    except Exception as error:
        get_run_logger().warning("artifacts were not published: %s", error)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does, so that its launches are ended too.

    Under a Prefect worker the engine has a handler of its own, which raises; it is left in place.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, None):
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
