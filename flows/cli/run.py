"""`rankwise run`, `validate` and `--dry-run`: start the flow from the command line and print readable errors."""

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console

from configs.common.base import WrongArgument
from configs.common.printable import plural, printable
from configs.common.secrets import shown_url
from configs.plans.packing import Launch
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel, UnusableModel, read_plan
from configs.records.record import MeasuringPass
from configs.spec.study import StudyError, StudySpec, load_study
from configs.targets.resources import ClusterTarget
from configs.targets.target import Target
from flows.cli.console import lasting_console, plain_console
from flows.cli.errors import ALL_COMPLETED, MAX_MESSAGE_CHARACTERS, OTHER_ERROR, SOME_UNMEASURED, left_text
from flows.cli.offers import agreed_to_rent, expected_costs
from flows.server.local import HEALTHY_SECONDS, ApiLease, LocalServerError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

    from flows.scaling_study import RunSummary

_SERVER_SECONDS = 15.0
"""Seconds that a run waits for the local Prefect server before it measures without one, and `publish` for any API.

One that creates its database has HEALTHY_SECONDS: else nobody's first run would be recorded on a slow machine.
"""
_PUBLISH_RETRIES = 5


def run_study(
    path: Path,
    assignments: list[str],
    runs: Path,
    only_failed: bool,
    accept_environment: bool,
    calibrate: bool = True,
    yes: bool = False,
) -> int:
    """Run a study and return the exit code.

    calibrate: calibrate this machine first if it never was. yes: rent nodes without asking.
    """
    from flows.cli.doctor.calibrate import ensure_calibration
    from flows.cli.live import RunDisplay
    from flows.folders import cache_folder
    from tasks.campaign.launches.preparing import prepare_first
    from tasks.campaign.progress import new_progress
    from tasks.campaign.repeats import targets_to_rent

    new_progress()  # that of an earlier run of this process would be shown until the flow begins
    study, plan = _checked(path, assignments, runs, clusters=True, only_failed=only_failed)
    report = _short(RunPaths((runs / study.study).absolute()).report)
    console = lasting_console(f"the run goes on, Ctrl-C ends it. Its report: {report}")
    # Layouts and forecasts rest on what was measured of this machine.
    outdated = calibrate and ensure_calibration(plan, console.print)
    logging.raiseExceptions = False  # Prefect's log handler prints to stderr where its API is away
    with ExitStack() as leases:
        api, unavailable = _begin_api(leases)
        _print_header(console, plan)
        run = RunPaths((runs / study.study).absolute())
        to_rent = targets_to_rent(plan, run, only_failed)
        agreed = agreed_to_rent(study, yes, expected_costs(plan, run, to_rent, only_failed))
        accept = accept_environment or _asked_to_accept(RunPaths(runs / study.study), plan, only_failed)
        # While the server starts, torch is imported for the first launch, and Prefect here.
        prepare_first(_launches(plan), plan, run, cache_folder())
        from flows.running import run_here

        if api is not None and api.creates_database:
            console.print("  note: Prefect's database is created first, which takes some seconds, once", markup=False)
        unavailable = unavailable or not_healthy(api) or _why_away(api)
        _print_api(console, api, unavailable)
        display = RunDisplay(console, lambda result: _print_result(console, result, runs / study.study))
        with display:
            ended = run_here(
                study,
                runs,
                path.parent.absolute(),
                only_failed,
                accept,
                None if outdated else plan,
                unavailable,
                display.print_result,
                agreed,
            )
        code = display.code
        if code is None:  # cancelled before there was a report
            code = _print_result(console, ended.result, runs / study.study)
        if unavailable and api and not ended.unpublished:
            console.print(f"  note: published in Prefect's UI, {_shown_at(api)}", markup=False)
        if ended.unpublished:
            if api is not None:
                api.lost = True
            reason = unavailable if api is None else api.why_gone() or ended.unpublished
            folder = quote(str(runs / study.study))
            console.print(
                f"  note: not in Prefect's UI ({reason}). To publish it: rankwise publish {folder}", markup=False
            )
    code = _print_unusable(console, _unusable(ended.result, plan), code)
    # The process ends now; collecting Prefect's half a million objects first would take a second.
    gc.freeze()
    return code


def _begin_api(leases: ExitStack) -> tuple[ApiLease | None, str | None]:
    """Find or start the Prefect API and set the environment for it. Returns its lease, or why there is none."""
    from flows.server.local import lease_server
    from flows.server.settings import apply_environment, environment_without_api

    try:
        api = leases.enter_context(lease_server())
    except LocalServerError as error:
        apply_environment(environment_without_api())
        return None, str(error).splitlines()[0]
    apply_environment(api.environment)
    return api, None


def not_healthy(api: ApiLease | None) -> str | None:
    """Why the local server does not answer; None for one that does, and for an API that the environment names."""
    try:
        if api is not None:
            api.wait_until_healthy(HEALTHY_SECONDS if api.creates_database else _SERVER_SECONDS)
    except LocalServerError as error:
        return str(error).splitlines()[0]
    return None


def _why_away(api: ApiLease | None) -> str | None:
    """Why the API records no run now; None if it does.

    The local server is asked again for a while: on a busy machine an answer can take longer than a question waits.
    """
    from tasks.prefect_api.api import await_api, why_unavailable

    return why_unavailable() if api is None or api.home is None else await_api(_SERVER_SECONDS)


def _shown_at(api: ApiLease) -> str:
    """The address of the UI; of the local server, which ends soon, also how to see it later."""
    return api.ui if api.home is None else f"{api.ui}; later: rankwise ui"


def publish_folder(folder: Path) -> int:
    """Copy the report of a run to the Prefect API, started locally if the environment names none."""
    run = RunPaths(folder)
    if not run.plan.is_file() or not run.report.is_file():
        raise WrongArgument(f"{folder}: no report of a run here. Expected a run folder, such as runs/quickstart")
    read_plan(run.plan)  # a folder that cannot be read is no fault of the API, and nothing is started for it
    with ExitStack() as leases:
        api, unavailable = _begin_api(leases)
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        from flows.publishing import publish_run

        if api is not None:
            api.wait_until_healthy(HEALTHY_SECONDS)
            # Unlike in a run, nothing waits for this: a database that is busy is asked again.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: _PUBLISH_RETRIES}):
                unavailable = publish_run(folder.absolute(), _SERVER_SECONDS)
        if api is None or unavailable:
            where = f" {shown_url(api.url)}" if api else ""
            raise LocalServerError(f"Prefect API{where}: {unavailable}; not published")
        print(f"published: {_shown_at(api)}")
    gc.freeze()
    return ALL_COMPLETED


def _asked_to_accept(run: RunPaths, plan: Plan, only_failed: bool = False) -> bool:
    """On a terminal, ask for confirmation before mixing measurements of two environments."""
    from flows.folders import cache_folder
    from tasks.campaign.repeats import targets_in_use
    from tasks.checks.environment import EnvironmentChanged, check_environment
    from tasks.checks.installed import installed_servers

    if not (run.folder / "environment.json").exists() or not sys.stdin.isatty():
        return False
    try:
        servers = installed_servers(plan, cache_folder())
        check_environment(run, accept=False, targets=targets_in_use(plan, run, only_failed), servers=servers)
    except EnvironmentChanged as error:
        print(error)
        try:
            return input("resume in this environment? [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:  # Ctrl-D
            print()
    return False


def _print_header(console: Console, plan: Plan) -> None:
    from importlib.metadata import version

    from tasks.campaign.ledger import planned_repeats

    count = Counter(measuring_pass for _, measuring_pass, _ in planned_repeats(plan))
    untimed = [name for name in get_args(MeasuringPass) if name != "timed" and count[name]]
    extra = "".join(f" + {count[name]} for {name}" for name in untimed)
    console.print(
        f"Rankwise {version('rankwise')}  study {plan.study}  {plural(len(plan.cells), 'cell')}, "
        f"{plural(count['timed'], 'measurement')}{extra}, {plural(len(_launches(plan)), 'launch')}"
    )
    models = [f"{model.name}{_remark(model)}" for model in plan.models]
    if models:
        console.print(f"  models   {'   '.join(models)}", markup=False)
    for place, target in enumerate(plan.targets):
        console.print(f"  {'' if place else 'target':<8} {target.name}  {_place_of(target)}", markup=False)


def _print_api(console: Console, api: ApiLease | None, unavailable: str | None) -> None:
    """Print where the run is shown, or why it is measured without Prefect."""
    if api is not None and unavailable is None:
        console.print(f"  UI       {api.ui}", markup=False)
    else:
        where = f" {shown_url(api.url)}" if api and api.url not in str(unavailable) else ""
        console.print(f"  note: measuring without Prefect{where}: {unavailable}", markup=False)
    console.print()


def _remark(model: PlannedModel) -> str:
    """Return what follows a model's name: a repository's revision until the run has found its commit."""
    if model.manifest:
        return " (random weights)" if model.synthetic else ""
    return f" ({model.identity})"


def _place_of(target: Target) -> str:
    """Return a description of a target for the header."""
    from engine.planner.accelerators import device_text
    from engine.planner.local import local_devices
    from tasks.checks.environment import this_machine

    if isinstance(target, ClusterTarget):
        most = f"up to {target.nodes} nodes" if target.nodes > 1 else "one node"
        ranks = f"{plural(target.ranks_per_node, 'rank')} per node"
        return f"{target.scheduler}, {target.where}, {most}, {ranks}"
    here, devices = this_machine(), device_text(local_devices(target))
    return f"{f'{devices}, ' if devices else ''}{plural(here['cores'], 'core')}, {here['memory_gib']} GiB"


def _print_result(console: Console, result: "RunSummary | State[Any]", folder: Path) -> int:
    from flows.scaling_study import RunSummary
    from tasks.campaign.progress import current_progress

    for note in current_progress().notes:
        console.print(f"  note: {printable(note, MAX_MESSAGE_CHARACTERS)}", markup=False)
    if not isinstance(result, RunSummary):
        console.print(f"cancelled{left_text()}", markup=False)
        return OTHER_ERROR
    if result.already_measured:
        console.print(
            f"  {result.already_measured} of {plural(result.measurements, 'measurement')} "
            f"{'was' if result.already_measured == 1 else 'were'} already completed"
        )
    return _print_summary(console, result.sentences, result.statuses, Path(result.report), folder)


def _print_summary(
    console: Console, sentences: Iterable[str], statuses: dict[str, int], report: Path, folder: Path
) -> int:
    """Print the report's summary, the failures and the report's path. Returns the exit code."""
    console.print()
    for sentence in sentences:
        console.print(sentence, markup=False)
    failures = {name: count for name, count in statuses.items() if name != "completed"}
    if failures:
        listed = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in failures.items())
        console.print(f"Not measured: {listed} (see {folder}/report.md)", markup=False)
    console.print(f"Report     {_short(report)}", markup=False)
    return SOME_UNMEASURED if failures else ALL_COMPLETED


def _unusable(result: "RunSummary | State[Any]", plan: Plan) -> tuple[UnusableModel, ...]:
    """The models that a run has left out: of those of a hub it sees the files only once it has fetched them."""
    from flows.scaling_study import RunSummary

    return result.unusable if isinstance(result, RunSummary) else plan.unusable


def _print_unusable(console: Console, unusable: Sequence[UnusableModel], code: int) -> int:
    """Name the models that were left out. Returns the exit code."""
    for model in unusable:
        console.print(f"Not measured: model {model.name}: {model.reason}", markup=False)
    return SOME_UNMEASURED if unusable and code == ALL_COMPLETED else code


def _short(path: Path) -> str:
    """Return the path relative to the working directory if it lies below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def validate_study(path: Path, assignments: list[str]) -> int:
    """Validate a study file and return the exit code."""
    from tasks.campaign.ledger import planned_repeats

    _, plan = _checked(path, assignments, Path("runs"))
    if plan.unusable:
        raise StudyError([model.reason for model in plan.unusable])
    measurements = len(planned_repeats(plan))
    print(
        f"{path}: valid. {plural(len(plan.cells), 'cell')}, {plural(measurements, 'measurement')} in "
        f"{plural(len(_launches(plan)), 'launch')}"
    )
    return ALL_COMPLETED


def dry_run_study(path: Path, assignments: list[str], runs: Path, only_failed: bool = False) -> int:
    """Print every cell and the remaining launches of a study, or those of failed repeats, without starting them."""
    study, plan = _checked(path, assignments, runs)
    console = plain_console()
    asked: dict[str, list[str]] = {}
    for experiment in plan.experiments:
        for point in experiment.points:
            asked.setdefault(point.cell, []).append(f"{experiment.name} ({point.label})")
    names = {model.identity: model.name for model in plan.models}
    console.print(plural(len(plan.cells), "cell"))
    for key, cell in plan.cells.items():
        name = names.get(cell.model or "", "")
        title = f"{name}  {cell.label}" if name else cell.label
        console.print(f"  {key}  {title}  x{plan.repeats[key]}  for {', '.join(asked[key])}")
    _print_unusable(console, plan.unusable, ALL_COMPLETED)
    launches = _launches(plan, RunPaths(runs / study.study), only_failed)
    console.print(f"{plural(len(launches), 'launch')} remaining{' of failed repeats' if only_failed else ''}")
    for number, launch in enumerate(launches, 1):
        counts = Counter(measurement.cell.key for measurement in launch.measurements)
        kind = f"block {launch.block + 1}" if launch.measuring_pass == "timed" else launch.measuring_pass
        console.print(f"  {number:3}  {kind:<9} {launch.pack_key}  {' '.join(counts)}")
    return ALL_COMPLETED


def _checked(
    path: Path, assignments: list[str], runs: Path, clusters: bool = False, only_failed: bool = False
) -> tuple[StudySpec, Plan]:
    from flows.folders import cache_folder
    from flows.precheck import check_study, missing_folders

    try:
        study = load_study(path, assignments)
    except StudyError as error:
        if error.more or any(assignment.startswith("models") for assignment in assignments):
            raise
        told = [problem for problem in missing_folders(path, cache_folder()) if problem not in error.problems]
        raise StudyError([*error.problems, *told]) from error
    return study, check_study(study, path.parent, cache_folder(), runs / study.study, clusters, only_failed)


def _launches(plan: Plan, run: RunPaths | None = None, only_failed: bool = False) -> list[Launch]:
    """Return the launches that a run would start, without those already completed in `run`."""
    from tasks.campaign.ledger import Ledger, missing_launches, read_ledger

    return missing_launches(plan, read_ledger(run) if run is not None else Ledger(), only_failed)
