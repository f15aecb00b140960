"""`rankwise run`, `validate` and `--dry-run`: start the flow from the command line and print readable errors."""

import gc
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

from rich.console import Console

from configs.plans.packing import Launch, pack_launches
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.plans.record import MeasuringPass
from configs.spec.study import StudyError, StudySpec, load_study
from configs.spec.target import SlurmTarget, Target
from flows.server.local import Lease, LocalServerError

_API_SECONDS = 20.0
"""Seconds to wait for the Prefect API named by the environment before starting a local one."""

ALL_COMPLETED, OTHER_ERROR, WRONG_STUDY, SOME_UNMEASURED = 0, 1, 2, 3


def guarded(work: Callable[[], int], subject: Path, debug: bool, wrong_value: int = OTHER_ERROR) -> int:
    """Run a command and print a message instead of a traceback for errors that a user can correct.

    wrong_value: the exit code of a ValueError, for commands where it always means a wrong argument.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        return work()
    except StudyError as error:
        caught: BaseException = error
        for problem in error.problems:
            console.print(problem if problem.startswith(str(subject)) else f"{subject}: {problem}")
        count = len(error.problems)
        console.print(f"{count} problem{'s' if count != 1 else ''}, nothing started")
        code = WRONG_STUDY
    except KeyboardInterrupt as error:
        caught = error
        console.print(f"interrupted: {_left()}, completed measurements are kept")
        code = OTHER_ERROR
    except BrokenPipeError as error:
        caught = error  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OTHER_ERROR
    except (ValueError, OSError, LocalServerError) as error:
        caught = error
        console.print(_readable(error))
        code = wrong_value if isinstance(error, ValueError) else OTHER_ERROR
    if debug:
        traceback.print_exception(caught)
    return code


def _left() -> str:
    """Return a summary of the launches of an interrupted run."""
    from tasks.campaign.progress import current_progress

    return current_progress().left_behind or "all launches ended"


def _readable(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}. Completed measurements are kept; correct this and run again to resume"
    return str(error)


def run_study(
    path: Path,
    assignments: list[str],
    runs: Path,
    only_failed: bool,
    accept_environment: bool,
    calibrate: bool = True,
) -> int:
    """Run a study and return the exit code. calibrate: calibrate this machine first if it never was."""
    from flows.cli.doctor.calibrate import ensure_calibration
    from flows.server.local import begin
    from flows.server.settings import apply_environment

    study, plan = _checked(path, assignments, runs, clusters=True)
    # Layouts and forecasts rest on what was measured of this machine.
    outdated = calibrate and ensure_calibration(plan, print)
    with begin(wait_for_named_seconds=_API_SECONDS) as api:
        apply_environment(api.environment)
        # Prefect is imported while the server starts.
        import httpx

        from flows.scaling_study import checked_before, scaling_study

        api.wait_until_healthy()
        console = Console(soft_wrap=True, highlight=False)
        _print_header(console, plan, api)
        accept = accept_environment or _asked_to_accept(RunPaths(runs / study.study), plan)
        from flows.cli.live import show_progress

        try:
            with show_progress(console), checked_before(None if outdated else plan):
                result = scaling_study(study, runs, only_failed, accept, path.parent.absolute(), return_state=True)
            code = _print_result(console, result, runs / study.study)
        except httpx.HTTPError as error:
            code = _print_without_api(console, RunPaths(runs / study.study), api.url, error)
    # The process ends now; collecting Prefect's half a million objects first would take a second.
    gc.freeze()
    return code


def _asked_to_accept(run: RunPaths, plan: Plan) -> bool:
    """On a terminal, ask for confirmation before mixing measurements of two environments."""
    from tasks.checks.machine import EnvironmentChanged, check_environment

    if not (run.folder / "environment.json").exists() or not sys.stdin.isatty():
        return False
    try:
        check_environment(run, accept=False, targets=plan.targets)
    except EnvironmentChanged as error:
        print(error)
        return input("resume in this environment? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _print_header(console: Console, plan: Plan, api: Lease) -> None:
    from importlib.metadata import version

    from tasks.campaign.ledger import places

    count = Counter(measuring_pass for _, measuring_pass, _ in places(plan))
    untimed = [name for name in get_args(MeasuringPass) if name != "timed" and count[name]]
    extra = "".join(f" + {count[name]} for {name}" for name in untimed)
    console.print(
        f"Rankwise {version('rankwise')}  study {plan.study}  {len(plan.cells)} cells, {count['timed']} "
        f"measurements{extra}, "
        f"{len(_launches(plan))} launches"
    )
    models = [f"{model.name}{' (random weights)' if model.synthetic else ''}" for model in plan.models]
    if models:
        console.print(f"  models   {'   '.join(models)}", markup=False)
    for place, target in enumerate(plan.targets):
        console.print(f"  {'' if place else 'target':<8} {target.name}  {_place_of(target)}", markup=False)
    console.print(f"  UI       {api.ui}")
    if api.instead_of:
        console.print(
            f"  note: {api.instead_of} did not respond within {_API_SECONDS:.0f} s; this run uses the UI above"
        )
    console.print()


def _place_of(target: Target) -> str:
    """Return a description of a target for the header."""
    from tasks.checks.machine import this_machine

    if isinstance(target, SlurmTarget):
        most = f"up to {target.nodes} nodes" if target.nodes > 1 else "one node"
        ranks = f"{target.ranks_per_node} rank{'s' if target.ranks_per_node > 1 else ''} per node"
        return f"Slurm, {f'partition {target.partition}' if target.partition else 'default partition'}, {most}, {ranks}"
    here = this_machine()
    return f"{here['cores']} cores, {here['memory_gib']} GiB"


def _print_without_api(console: Console, run: RunPaths, url: str, error: Exception) -> int:
    """Report a run whose Prefect API was unavailable at the start or the end; its measurements are kept."""
    if not (run.folder / "plan.json").exists():
        raise ValueError(f"Prefect API {url}: did not accept the run ({error}); nothing started") from error
    from reports.render import render_report

    summary = render_report(run)
    console.print(f"  note: Prefect API {url} unavailable at the end of the run ({error}); its UI shows no final state")
    return _print_summary(console, summary.sentences, summary.statuses, summary.path, run.folder)


def _print_result(console: Console, state: object, folder: Path) -> int:
    from prefect.client.schemas.objects import State

    from tasks.campaign.progress import current_progress

    assert isinstance(state, State)
    for note in current_progress().notes:
        console.print(f"  note: {note}", markup=False)
    if state.is_cancelled():
        console.print(f"cancelled: {_left()}, completed measurements are kept")
        return OTHER_ERROR
    result = state.result(raise_on_failure=True)
    if result.already_measured:
        console.print(f"  {result.already_measured} of {result.measurements} measurements were already completed")
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
        listed = ", ".join(f"{count} {name}" for name, count in failures.items())
        console.print(f"Not measured: {listed} (see {folder}/report.md)")
    console.print(f"Report     {_short(report)}", markup=False)
    return SOME_UNMEASURED if failures else ALL_COMPLETED


def _short(path: Path) -> str:
    """Return the path relative to the working directory if it lies below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def validate_study(path: Path, assignments: list[str]) -> int:
    """Validate a study file and return the exit code."""
    from tasks.campaign.ledger import places

    _, plan = _checked(path, assignments, Path("runs"))
    measurements = len(places(plan))
    print(f"{path}: valid. {len(plan.cells)} cells, {measurements} measurements in {len(_launches(plan))} launches")
    return ALL_COMPLETED


def dry_run_study(path: Path, assignments: list[str], runs: Path) -> int:
    """Print every cell and the remaining launches of a study without starting them."""
    study, plan = _checked(path, assignments, runs)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    asked: dict[str, list[str]] = {}
    for experiment in plan.experiments:
        for point in experiment.points:
            asked.setdefault(point.cell, []).append(f"{experiment.name} ({point.label})")
    names = {model.identity: model.name for model in plan.models}
    console.print(f"{len(plan.cells)} cells")
    for key, cell in plan.cells.items():
        engine = "" if cell.engine == "rankwise" else f", {cell.engine}"
        name = names.get(cell.model or "", "")
        title = f"{name}  {cell.label}{engine}" if name else cell.label
        console.print(f"  {key}  {title}  x{plan.repeats[key]}  for {', '.join(asked[key])}")
    launches = _launches(plan, RunPaths(runs / study.study))
    console.print(f"{len(launches)} launches remaining")
    for number, launch in enumerate(launches, 1):
        counts = Counter(measurement.cell.key for measurement in launch.measurements)
        kind = f"block {launch.block + 1}" if launch.measuring_pass == "timed" else launch.measuring_pass
        console.print(f"  {number:3}  {kind:<9} {launch.pack_key}  {' '.join(counts)}")
    return ALL_COMPLETED


def _checked(path: Path, assignments: list[str], runs: Path, clusters: bool = False) -> tuple[StudySpec, Plan]:
    from flows.folders import cache_folder
    from flows.precheck import check_study

    study = load_study(path, assignments)
    return study, check_study(study, path.parent, cache_folder(), runs / study.study, clusters)


def _launches(plan: Plan, run: RunPaths | None = None) -> list[Launch]:
    """Return the launches that a run would start, without those already completed in `run`."""
    from tasks.campaign.ledger import Ledger, missing_measurements, read_ledger

    ledger = read_ledger(run) if run is not None else Ledger()
    return [
        launch
        for measuring_pass in get_args(MeasuringPass)
        for launch in pack_launches(
            missing_measurements(plan, ledger, measuring_pass, False), measuring_pass, plan.measuring.seed, plan.pack
        )
    ]
