"""The study, from one file to one report.

    from flows.scaling_study import scaling_study
    result = scaling_study(Path("study.yaml"))

Where the environment names no Prefect API, this uses the local server of `rankwise run`: one history for both.

The stages are Prefect tasks. A failed cell is a record, not a failed task; the flow fails only if the pipeline
cannot continue. The files in the run folder are authoritative, independent of the Prefect API: an interrupted run
resumes where it left off. Measuring needs no API: without one `flows.running` calls the flow as a plain function.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.states import Cancelled

from configs.common.base import Frozen
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel, UnusableModel
from configs.spec.study import ModelSpec, StudySpec, load_study
from configs.targets.target import LocalTarget
from flows.folders import cache_folder, rented_folder
from flows.measuring import finish_leftovers, measure_missing
from flows.server.settings import HEARTBEAT_SECONDS
from flows.with_local_api import flow_with_local_api
from tasks.analyze import analyze
from tasks.campaign.graph import RunGraph, StageEnd
from tasks.campaign.live_credentials import live_credentials
from tasks.campaign.progress import RunProgress, new_progress
from tasks.campaign.repeats import targets_to_rent
from tasks.campaign.run_lock import run_lock
from tasks.campaign.session import Session
from tasks.fetch import EarlierPlan, fetch_model
from tasks.planning.predictions import remember_run
from tasks.planning.script_inputs import replaced_notes
from tasks.planning.study_models import resolved_note, usable_models
from tasks.planning.study_plan import earlier_plan
from tasks.prefect_api.api import api_error_text, await_api, end_lost_groups, end_lost_run, tag_run, tags_of
from tasks.prefect_api.cancellation import ApiWatcher
from tasks.prefect_api.credentials import api_environment
from tasks.prefect_api.ended import RunCancelled, RunSuspended
from tasks.prefect_api.events import heartbeats
from tasks.prefect_api.flow_names import SCALING_STUDY
from tasks.prefect_api.groups import tries
from tasks.prefect_api.run_logs import hide_tracebacks_of_expected, hide_tracebacks_of_states
from tasks.prefect_api.stages import in_flow_run, run_logger, secrets_hidden
from tasks.preflight import preflight
from tasks.provision import provision
from tasks.publish import begin_jobs, begin_progress, publish
from tasks.render import render
from tasks.rent import check_given_back, give_back_nodes, rent_nodes, study_nodes
from tasks.resolve import CheckedPlan, resolve_study

hide_tracebacks_of_states()
hide_tracebacks_of_expected()


class RunSummary(Frozen):
    """What a run of a study came to."""

    folder: str
    report: str
    sentences: list[str]
    measurements: int
    already_measured: int
    statuses: dict[str, int]
    unusable: tuple[UnusableModel, ...] = ()
    """Models without a cell, because of their files."""


def _flow_run_name() -> str:
    """The study's name, from the parameter, which is a study or the path of its file."""
    study = flow_run.parameters.get("study")
    return study.study if isinstance(study, StudySpec) else name_in_file(Path(str(study)))


def name_in_file(path: Path, assignments: list[str] | None = None) -> str:
    """The name of the study in a file; the file's own, where it cannot be read or is wrong, which the run says."""
    try:
        return load_study(path, assignments).study
    except (ValueError, OSError):
        return path.stem


@flow_with_local_api(SCALING_STUDY, flow_run_name=_flow_run_name)
def scaling_study(
    study: StudySpec | Path,
    runs: Path = Path("runs"),
    only_failed: bool = False,
    accept_environment: bool = False,
    base: Path | None = None,
) -> RunSummary | State[Any]:
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
        with secrets_hidden():
            study = load_study(Path(study))
    # From Python, paths are often written as text.
    return measure_study(study, Path(runs), Path(base or Path.cwd()), only_failed, accept_environment)


class Handover:
    """What passes between a flow and the code of this process that calls it, beside parameters and result.

    No parameter of the flow: Prefect keeps parameters in its API, and a plan may hold thousands of cells. No result:
    Prefect loses it where its API cannot be told how the flow ended.

    Args:
        plan: of `check_study`, used instead of making it again.
        api_seconds: so long a run that has its report waits for an API that is away, to tell it.
        on_report: called with the result as soon as the report is written, before the API is told.
        agreed_to_rent: a person has seen what the nodes of rented targets cost.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        api_seconds: float = 300.0,
        on_report: Callable[[RunSummary], None] = lambda _: None,
        agreed_to_rent: bool = False,
    ) -> None:
        self.plan = plan
        self.agreed_to_rent = agreed_to_rent
        self.api_seconds = api_seconds
        self.on_report = on_report
        self.began = False
        self.published = False
        self.result: RunSummary | State[Any] | None = None
        self.error: BaseException | None = None


_HANDOVER: ContextVar[Handover | None] = ContextVar("handover", default=None)


@contextlib.contextmanager
def handed_over(handover: Handover) -> Iterator[None]:
    """Have the flow that is called in the block use and fill this."""
    token = _HANDOVER.set(handover)
    try:
        yield
    finally:
        _HANDOVER.reset(token)


def measure_study(
    study: StudySpec, runs: Path, base: Path, only_failed: bool, accept_environment: bool
) -> RunSummary | State[Any]:
    """What every flow of this project does with its study, inside a flow run or as a plain function."""
    handover = _HANDOVER.get() or Handover()
    handover.began = True
    try:
        with secrets_hidden(), heartbeats(HEARTBEAT_SECONDS):
            handover.result = _measured(study, runs, base, only_failed, accept_environment, handover)
    except BaseException as error:
        handover.error = error
        raise
    return handover.result


def _measured(
    study: StudySpec, runs: Path, base: Path, only_failed: bool, accept_environment: bool, handover: Handover
) -> RunSummary | State[Any]:
    run = RunPaths((runs / study.study).absolute())
    identifier = UUID(str(flow_run.id)) if in_flow_run() else None  # it is text, whatever Prefect annotates
    run_progress = new_progress()
    run_progress.study = study.study
    with run_lock(run, identifier) as before, _signals_raise(), contextlib.ExitStack() as told:
        run.jobs.mkdir(exist_ok=True)
        progress_artifact = jobs_artifact = None
        if identifier is not None:
            told.enter_context(api_environment())
            told.enter_context(secrets_hidden())  # while the values are known that were stored in the API
            if before is not None and end_lost_run(before):
                run_logger().info("flow run %s stopped responding and is marked as crashed", before)
            if tries() > 1:
                end_lost_groups(identifier)
            progress_artifact = begin_progress(run_progress)
            if any(not isinstance(target, LocalTarget) for target in study.targets):
                jobs_artifact = begin_jobs(study.study)
        watcher = ApiWatcher(identifier, run_progress, progress_artifact, jobs_artifact)
        with watcher:
            try:
                result = _run(study, run, run_progress, watcher, only_failed, accept_environment, base, handover)
                run_progress.outcome = "completed"
                return result
            except BaseException as error:
                run_progress.outcome = _outcome(error)
                if isinstance(error, RunSuspended):
                    raise Pause(state=error.state) from error
                if isinstance(error, RunCancelled):
                    return Cancelled(message="cancelled through the API; completed measurements are kept")
                raise
            finally:
                run_progress.ended = True


def _outcome(error: BaseException) -> str:
    """How a run ended that this ended, in one word."""
    if isinstance(error, RunSuspended | Pause):
        return "suspended"
    if isinstance(error, RunCancelled):
        return "cancelled"
    return "failed" if isinstance(error, Exception) else "interrupted"


def _run(
    study: StudySpec,
    run: RunPaths,
    run_progress: RunProgress,
    watcher: ApiWatcher,
    only_failed: bool,
    accept_environment: bool,
    base: Path,
    handover: Handover,
) -> RunSummary:
    """The method section: resolve, provision, test the nodes, measure, report."""
    cache = cache_folder()
    with study_nodes(study, run, run_progress, watcher, rented_folder(), handover.agreed_to_rent, cache) as rentals:
        if handover.plan is not None:  # of a plan that is checked only the fetch of its models can fail
            rentals.begin(targets_to_rent(handover.plan, run, only_failed))
        plan, resolved = _resolved(study, run, run_progress, base, cache, handover.plan, only_failed)
        session = Session(run, plan, cache, run_progress, watcher, rentals)
        already = _measured_there(session, resolved, only_failed, accept_environment)
        before_report = session.graph.before_analysis()
        if rentals.rentals:
            before_report = tuple(give_back_nodes.after(*before_report)(session, name)[1] for name in rentals.rentals)
    run_progress.stage = "reporting"
    analysis, analyzed = analyze.after(*before_report)(run)
    summary, rendered = render.after(analyzed)(run, analysis)
    remember_run(run, cache)
    run_progress.ended = True
    result = RunSummary(
        folder=str(run.folder),
        report=str(run.report),
        sentences=list(summary.sentences),
        measurements=run_progress.total,
        already_measured=already,
        statuses=dict(summary.statuses),
        unusable=plan.unusable,
    )
    handover.on_report(result)
    if in_flow_run():
        run_progress.stage = "report written; waiting for the Prefect API"
        handover.published = await_api(handover.api_seconds) is None and _publish(study.study, run, rendered)
    check_given_back(session)
    return result


def _resolved(
    study: StudySpec,
    run: RunPaths,
    run_progress: RunProgress,
    base: Path,
    cache: Path,
    checked: Plan | None,
    only_failed: bool,
) -> tuple[Plan, StageEnd]:
    """Fetch the models and make the plan."""
    run_progress.stage = "resolving"
    before = EarlierPlan(earlier_plan(run))
    fetched: list[StageEnd] = []

    def fetch(spec: ModelSpec, position: int) -> PlannedModel:
        model, done = fetch_model.after()(spec, position, cache, base, before)
        fetched.append(done)
        return model

    models, unusable = usable_models(study, fetch)
    specs = {spec.name: spec for spec in study.models}
    for note in filter(None, (resolved_note(specs[model.name], model) for model in models)):
        run_logger().info(note)
        run_progress.notes.append(f"{note}, pinned in plan.json")
    for note in replaced_notes(study, base):
        run_logger().info(note)
        run_progress.notes.append(note)
    plan, resolved = resolve_study.after(*fetched)(
        study, models, run, base, cache, CheckedPlan(checked), unusable, only_failed
    )
    if in_flow_run():
        tag_run(flow_run.id, tags_of(plan.models, plan.targets))
    return plan, resolved


def _measured_there(session: Session, resolved: StageEnd, only_failed: bool, accept_environment: bool) -> int:
    """Rent what is to be rented, prepare and test the machines, measure. Returns how much was measured before."""
    renting = session.rentals.begin(targets_to_rent(session.plan, session.run, only_failed))
    rented = [rent_nodes.after(resolved)(session, name)[1] for name in renting]
    _, provisioned = provision.after(resolved, *rented)(session, accept_environment, only_failed)
    session.graph = RunGraph(provisioned)
    finish_leftovers(session)
    _, tested = preflight.after(*session.graph.before_analysis())(session, only_failed)
    session.graph = RunGraph(tested)
    session.run_progress.stage = "measuring"
    with live_credentials(session.plan.measuring.live):
        return measure_missing(session, only_failed)


def _publish(study: str, run: RunPaths, rendered: StageEnd) -> bool:
    """Artifacts are a copy for the UI: the report stands without them. Returns whether they are there."""
    try:
        publish.after(rendered)(study, run)
    except Exception as error:
        run_logger().warning("artifacts not published: %s", api_error_text(error))
        return False
    return True


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
