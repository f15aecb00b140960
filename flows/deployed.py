"""The flows as they are deployed: from the form in Prefect's UI, and by a schedule.

All are `flows.scaling_study` with parameters that a form can draw. The server checks types and bounds
only; the flow checks everything again and fails with the dotted field. `rankwise deploy-flows` registers
them from `prefect.yaml`; relative paths are relative to the folder in which the Prefect worker runs them.
"""

import re
from contextlib import nullcontext, suppress
from datetime import UTC
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed

from configs.common.base import expanded
from configs.common.files.project_files import shipped_studies
from configs.common.printable import plural
from configs.common.secrets import redacted
from configs.spec.form import StudyForm, study_of_form
from configs.spec.short_form import ShortStudy, name_in_short_form, study_of_short_form
from configs.spec.study import StudyError, StudySpec, load_study
from flows.expected import EXPECTED, sentence_of
from flows.folders import cache_folder
from flows.precheck import check_study
from flows.regressions import regressions_since_last
from flows.scaling_study import Handover, RunSummary, handed_over, measure_study, name_in_file
from tasks.campaign.launches.staging import TargetAway
from tasks.prefect_api.api import tag_run, tags_of
from tasks.prefect_api.credentials import api_environment
from tasks.prefect_api.events import Happened, tell
from tasks.prefect_api.flow_names import FORM_STUDY, SCHEDULED_SWEEP, SHORT_STUDY
from tasks.prefect_api.schedules import cancel_missed, own_scheduled_time, tell_scheduled
from tasks.prefect_api.stages import in_flow_run, run_logger, secrets_hidden
from tasks.prefect_api.targets import stored_targets

_EXAMPLE = StudyForm()
_SHORT_EXAMPLE = ShortStudy()


REFUSED_TAG = "refused"
"""Of a run whose study has an error in it: nothing of it was started."""
_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi"
    "|psi|omega"
)
_GENERATED_NAME = re.compile(rf"[a-z]+-[a-z]+|({_GREEK})\d*-[a-z-]+")
"""Names that Prefect and its UI make up for runs: `fervent-void`, `mu2-sanger-sector`."""


def run_name(study: str, given: str | None) -> str:
    """The study's name, or the one that somebody wrote into `Run name`."""
    return study if not given or _GENERATED_NAME.fullmatch(given) else given


def _form_name() -> str:
    study = _filled_in()
    return run_name(str(study.get("study", _EXAMPLE.study)) if isinstance(study, dict) else "study", flow_run.name)


def _short_name() -> str:
    return run_name(name_in_short_form(_filled_in()), flow_run.name)


def _filled_in() -> Any:
    """The form as plain data, as the API has it: a flow that is called from Python has an object. {}: left out."""
    study = flow_run.parameters.get("study")
    if isinstance(study, StudyForm | ShortStudy):
        return study.model_dump(mode="json")
    return {} if study is None else study


def _sweep_name() -> str:
    written, assignments = str(flow_run.parameters.get("study", "sweep")), flow_run.parameters.get("assignments")
    with suppress(StudyError):
        return run_name(name_in_file(_study_file(written), assignments), flow_run.name)
    return run_name(Path(written).stem, flow_run.name)


@flow(name=SHORT_STUDY, flow_run_name=_short_name, validate_parameters=False, on_running=[tell_scheduled])
def study_in_short(
    study: ShortStudy = _SHORT_EXAMPLE,
    runs: Path = Path("runs"),
    only_failed: bool = False,
    accept_environment: bool = False,
) -> RunSummary | State[Any]:
    """Measure one question about a model, or a study that is pasted as YAML, and write its report.

    Args:
        study: model, question, ranks, repeats and target; or a whole study file.
        runs: folder under which the run folder, named like the study, lies.
        only_failed: measure only what was tried before and failed.
        accept_environment: go on although the run folder was begun in another environment.
    """
    given: Any = study
    try:
        data = given if isinstance(given, dict) else given.model_dump(mode="json")
        spec = study_of_short_form(data, stored_targets())
        return _checked_and_measured(spec, expanded(runs), Path.cwd(), only_failed, accept_environment)
    except EXPECTED as error:
        return _failed(error)


@flow(name=FORM_STUDY, flow_run_name=_form_name, validate_parameters=False, on_running=[tell_scheduled])
def study_from_the_form(
    study: StudyForm = _EXAMPLE,
    runs: Path = Path("runs"),
    only_failed: bool = False,
    accept_environment: bool = False,
) -> RunSummary | State[Any]:
    """Measure a study that is filled in as a form, and write its report.

    Args:
        study: models, workload, experiments, target and rules of measuring.
        runs: folder under which the run folder, named like the study, lies.
        only_failed: measure only what was tried before and failed.
        accept_environment: go on although the run folder was begun in another environment.
    """
    given: Any = study  # of the form, plain data: Prefect was told not to validate it
    try:
        spec = study_of_form(given if isinstance(given, dict) else given.model_dump(mode="json"))
        return _checked_and_measured(spec, expanded(runs), Path.cwd(), only_failed, accept_environment)
    except EXPECTED as error:
        return _failed(error)


@flow(name=SCHEDULED_SWEEP, flow_run_name=_sweep_name, validate_parameters=False, on_running=[tell_scheduled])
def scheduled_sweep(
    study: str = "quickstart",
    assignments: list[str] | None = None,
    runs: Path = Path("runs"),
    folder_per_run: bool = True,
) -> RunSummary | State[Any]:
    """Measure a study file again, on a schedule. Of several scheduled runs that are due the newest is made.

    Args:
        study: path of the study file, or the name of a shipped study.
        assignments: changes to it, as `dotted.key=value`.
        runs: folder under which the run folders lie.
        folder_per_run: on: measured anew each time, below a folder named by the scheduled time; off: the
            same run folder goes on, and only what is missing is measured.
    """
    superseded = cancel_missed(flow_run.id)
    if superseded is not None:
        return Cancelled(message=superseded)
    try:
        path = _study_file(study)
        spec = load_study(path, assignments or [])
        # No shell stands between a form and this: `~/runs` would be a folder named `~` in the working folder.
        below = all_runs = expanded(runs)
        if folder_per_run:
            # The scheduled time, not now: a run that is tried again goes on in its folder.
            time = own_scheduled_time(flow_run.id) or flow_run.scheduled_start_time
            below /= time.astimezone(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
        result = _checked_and_measured(spec, below, path.parent, False, False)
        if folder_per_run and isinstance(result, RunSummary):
            _tell_regressions(spec.study, all_runs, below / spec.study)
        return result
    except EXPECTED as error:
        return _failed(error)


def _tell_regressions(study: str, runs: Path, run: Path) -> None:
    """An event and a line of the log for each cell that became slower since the sweep before."""
    try:
        found = regressions_since_last(runs, run)
    except (ValueError, OSError) as error:
        run_logger().warning("not compared with the sweep before: %s", error)
        return
    for sentence in found:
        run_logger().warning("regression: %s", sentence)
    if found:
        more = f"; and {plural(len(found) - 1, 'more cell')}" if len(found) > 1 else ""
        tell(Happened.REGRESSION_FOUND, study, f"{study}: {found[0]}{more}", cells=len(found))


def _failed(error: Exception) -> State[Any]:
    """What a user can correct, or what may pass, as the state's message: for people, without a traceback."""
    if isinstance(error, StudyError) and not isinstance(error, TargetAway):
        tag_run(flow_run.id, {REFUSED_TAG})
    run_logger().debug("how the run came to fail:", exc_info=error)
    return Failed(message=redacted(sentence_of(error)))


def _checked_and_measured(
    spec: StudySpec, runs: Path, base: Path, only_failed: bool, accept_environment: bool
) -> RunSummary | State[Any]:
    """As `rankwise run` does: everything that can be wrong is said before anything is started."""
    tag_run(flow_run.id, tags_of(spec.models, spec.targets), {REFUSED_TAG})  # of an earlier try of this run
    # What is checked is what is measured: with the same cache, catalog and tools of schedulers.
    with api_environment() if in_flow_run() else nullcontext():
        with secrets_hidden():
            folder = runs / spec.study
            plan = check_study(spec, base.absolute(), cache_folder(), folder, clusters=True, only_failed=only_failed)
        with handed_over(Handover(plan)):
            return measure_study(spec, runs, base.absolute(), only_failed, accept_environment)


def _study_file(written: str) -> Path:
    """A path as written, or a shipped study. Raises StudyError."""
    shipped = shipped_studies()
    path = expanded(written)
    if path.is_file():
        return path
    if written in shipped:
        return shipped[written]
    raise StudyError(
        [f"study: no such file: {written} (working folder {Path.cwd()})\n  shipped: {', '.join(sorted(shipped))}"]
    )
