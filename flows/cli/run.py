"""`rankwise run`, `validate` and `--dry-run`: from the command line to the flow, errors made readable."""

import gc
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

from rich.console import Console

from configs.packing import Launch, pack_launches
from configs.paths import RunPaths
from configs.plan import Plan
from configs.record import MeasuringPass
from configs.study import StudyError, StudySpec, load_study
from configs.target import SlurmTarget, Target
from flows.local_server import Lease, LocalServerError

_API_SECONDS = 20.0
"""So long a Prefect API that the environment names is waited for before a local one takes its place."""

ALL_COMPLETED, OTHER_ERROR, WRONG_STUDY, SOME_UNMEASURED = 0, 1, 2, 3


def guarded(work: Callable[[], int], subject: Path, debug: bool, wrong_value: int = OTHER_ERROR) -> int:
    """Run a command; an error that a user can mend becomes a message, never a traceback.

    wrong_value: the exit code of a ValueError, for commands where it can only be an argument's.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        return work()
    except StudyError as error:
        caught: BaseException = error
        for problem in error.problems:
            console.print(problem if problem.startswith(str(subject)) else f"{subject}: {problem}")
        count = len(error.problems)
        console.print(f"{count} problem{'s' if count != 1 else ''}; nothing was started")
        code = WRONG_STUDY
    except KeyboardInterrupt as error:
        caught = error
        console.print(f"interrupted; {_left()}, what was measured is kept")
        code = OTHER_ERROR
    except BrokenPipeError as error:
        caught = error  # whoever read the output has seen enough
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
    """What became of the launches of a run that was ended."""
    from tasks.board import current_board

    return current_board().left_behind or "every launch was ended"


def _readable(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; what was measured before is kept, run again when this is mended"
    return str(error)


def run_study(
    path: Path,
    assignments: list[str],
    runs: Path,
    only_failed: bool,
    accept_environment: bool,
    calibrate: bool = True,
) -> int:
    """`rankwise run`. Returns the exit code. calibrate: measure this machine first where nobody did."""
    from flows.cli.calibrate import ensure_calibration
    from flows.local_server import begin
    from flows.prefect_settings import apply_environment
    from tasks.machine import check_clusters

    study, plan = _checked(path, assignments, runs)
    check_clusters(plan)
    if calibrate:
        ensure_calibration(plan, print)
    with begin(wait_for_named_seconds=_API_SECONDS) as api:
        apply_environment(api.environment)
        # Prefect is imported while the server comes up.
        import httpx

        from flows.scaling_study import scaling_study

        api.wait_until_healthy()
        console = Console(soft_wrap=True, highlight=False)
        _print_header(console, plan, api)
        accept = accept_environment or _asked_to_accept(RunPaths(runs / study.study), plan)
        from flows.cli.live import show_progress

        try:
            with show_progress(console):
                result = scaling_study(study, runs, only_failed, accept, path.parent.absolute(), return_state=True)
            code = _print_result(console, result, runs / study.study)
        except httpx.HTTPError as error:
            code = _print_without_api(console, RunPaths(runs / study.study), api.url, error)
    # The process ends now: to collect Prefect's half a million objects first would take a second.
    gc.freeze()
    return code


def _asked_to_accept(run: RunPaths, plan: Plan) -> bool:
    """On a terminal, ask before measurements of two environments are mixed."""
    from tasks.machine import EnvironmentChanged, check_environment

    if not (run.folder / "environment.json").exists() or not sys.stdin.isatty():
        return False
    try:
        check_environment(run, accept=False, targets=plan.targets)
    except EnvironmentChanged as error:
        print(error)
        return input("measure the rest here all the same? [y/N] ").strip().lower() in ("y", "yes")
    return False


def _print_header(console: Console, plan: Plan, api: Lease) -> None:
    from importlib.metadata import version

    from tasks.ledger import places

    count = Counter(measuring_pass for _, measuring_pass, _ in places(plan))
    untimed = [name for name in get_args(MeasuringPass) if name != "timed" and count[name]]
    extra = "".join(f" + {count[name]} for {name}" for name in untimed)
    console.print(
        f"Rankwise {version('rankwise')}  study {plan.study}  {len(plan.cells)} cells, {count['timed']} visits{extra}, "
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
            f"  note: {api.instead_of} did not answer for {_API_SECONDS:.0f} s; this run shows in the UI above"
        )
    console.print()


def _place_of(target: Target) -> str:
    """Where the cells of a target run, for the header."""
    from tasks.machine import this_machine

    if isinstance(target, SlurmTarget):
        most = f"up to {target.nodes} nodes" if target.nodes > 1 else "one node"
        ranks = f"{target.ranks_per_node} rank{'s' if target.ranks_per_node > 1 else ''} a node"
        return f"Slurm, {f'partition {target.partition}' if target.partition else 'default partition'}, {most}, {ranks}"
    here = this_machine()
    return f"{here['cores']} cores, {here['memory_gib']} GiB"


def _print_without_api(console: Console, run: RunPaths, url: str, error: Exception) -> int:
    """The API was gone when the run ended, or before it began: what was measured is there all the same."""
    if not (run.folder / "plan.json").exists():
        raise ValueError(f"the Prefect API {url} did not take the run ({error}); nothing was started") from error
    from reports.render import render_report

    summary = render_report(run)
    console.print(
        f"  note: the Prefect API {url} was away at the end ({error}); its UI does not show how the run ended"
    )
    return _print_summary(console, summary.sentences, summary.statuses, summary.path, run.folder)


def _print_result(console: Console, state: object, folder: Path) -> int:
    from prefect.client.schemas.objects import State

    from tasks.board import current_board

    assert isinstance(state, State)
    for note in current_board().notes:
        console.print(f"  note: {note}", markup=False)
    if state.is_cancelled():
        console.print(f"cancelled; {_left()}, what was measured is kept")
        return OTHER_ERROR
    result = state.result(raise_on_failure=True)
    if result.already_measured:
        console.print(f"  {result.already_measured} of {result.visits} visits were already measured")
    return _print_summary(console, result.sentences, result.statuses, Path(result.report), folder)


def _print_summary(
    console: Console, sentences: Iterable[str], statuses: dict[str, int], report: Path, folder: Path
) -> int:
    """What the report says first, what has no figure, and where the report is. Returns the exit code."""
    console.print()
    for sentence in sentences:
        console.print(sentence, markup=False)
    failures = {name: count for name, count in statuses.items() if name != "completed"}
    if failures:
        listed = ", ".join(f"{count} {name}" for name, count in failures.items())
        console.print(f"Without a figure: {listed}; see {folder}/report.md")
    console.print(f"Report     {_short(report)}", markup=False)
    return SOME_UNMEASURED if failures else ALL_COMPLETED


def _short(path: Path) -> str:
    """Relative to where the user stands, if it lies below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def validate_study(path: Path, assignments: list[str]) -> int:
    """`rankwise validate`. Returns the exit code."""
    from tasks.ledger import places

    _, plan = _checked(path, assignments, Path("runs"))
    visits = len(places(plan))
    print(f"{path}: fine. {len(plan.cells)} cells, {visits} visits in {len(_launches(plan))} launches")
    return ALL_COMPLETED


def dry_run_study(path: Path, assignments: list[str], runs: Path) -> int:
    """`rankwise run --dry-run`: every cell and launch, and which of them are measured already."""
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
    console.print(f"{len(launches)} launches to go")
    for number, launch in enumerate(launches, 1):
        counts = Counter(visit.cell.key for visit in launch.visits)
        kind = f"block {launch.block + 1}" if launch.measuring_pass == "timed" else launch.measuring_pass
        console.print(f"  {number:3}  {kind:<9} {launch.pack_key}  {' '.join(counts)}")
    return ALL_COMPLETED


def _checked(path: Path, assignments: list[str], runs: Path) -> tuple[StudySpec, Plan]:
    from flows.folders import cache_folder
    from flows.precheck import check_study

    study = load_study(path, assignments)
    return study, check_study(study, path.parent, cache_folder(), runs / study.study)


def _launches(plan: Plan, run: RunPaths | None = None) -> list[Launch]:
    """The launches that a run would make, after what `run` holds already."""
    from tasks.ledger import Ledger, missing_visits, read_ledger

    ledger = read_ledger(run) if run is not None else Ledger()
    return [
        launch
        for measuring_pass in get_args(MeasuringPass)
        for launch in pack_launches(
            missing_visits(plan, ledger, measuring_pass, False), measuring_pass, plan.measuring.seed, plan.pack
        )
    ]
