"""`rankwise status`, `report` and `convert`: inspect a run folder without Prefect."""

import json
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.common.base import Frozen, WrongArgument
from configs.common.files.reading import PLAN_BYTES, read_model, reason_of
from configs.common.printable import plural, printable
from configs.common.system.proc import is_alive
from configs.plans.job import Job, Launcher, Progress, Submission
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan, read_plan
from configs.records.record import Status
from flows.cli.console import set_width

if TYPE_CHECKING:
    from tasks.campaign.ledger import Ledger

_Model = TypeVar("_Model", bound=Frozen)

_FILE_COLUMNS, _WHY_COLUMNS = 200, 40


def open_run(folder: Path) -> tuple[RunPaths, Plan]:
    """Return the paths of a run folder and its plan.

    Raises WrongArgument for a folder without a run, ValueError for one whose plan cannot be read.
    """
    run = RunPaths(folder.absolute())
    if not run.plan.exists():
        what = "no plan.json" if run.folder.is_dir() else "no such folder" if not run.folder.exists() else "a file"
        raise WrongArgument(
            f"{printable(str(folder))}: not a run folder ({what}). Expected a folder such as runs/quickstart"
        )
    return run, read_plan(run.plan)


def print_status(folder: Path, as_json: bool) -> int:
    """Print one line (or JSON object) for each cell and repeat."""
    from reports.reading.names import cell_names

    run, plan = open_run(folder)
    ledger = _ledger(run)
    rows = status_rows(run, plan, ledger)
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    names = {model.identity: model.name for model in plan.models}
    titles = cell_names(plan)
    with_jobs = any(row["job"] for row in rows)
    columns = ("key", "cell", "repeat", "status", *(("job",) if with_jobs else ()), "attempts", "started, UTC", "why")
    lines = []
    for row in rows:
        model = names.get(plan.cells[row["key"]].model or "", "")
        label = f"{model}  {titles[row['key']]}".strip()
        started = (row["started_at"] or "")[:19].replace("T", " ")
        why = row["failure"] or row["waits_for"] or ""
        jobs = (row["job"] or "",) if with_jobs else ()
        texts = (row["key"], label, str(row["repeat"]), row["status"], *jobs, str(row["attempts"]), started, why)
        lines.append(tuple(map(printable, texts)))
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column, no_wrap=column != "why", justify="right" if column in ("repeat", "attempts") else "left"
        )
    for line in lines:
        table.add_row(*map(Text, line))
    console = _console_for([columns, *lines])
    console.print(table)
    done = sum(1 for row in rows if row["status"] == Status.COMPLETED)
    console.print(f"{done} of {plural(len(rows), 'repeat')} completed")
    if ledger.damaged:
        path, error = next(iter(ledger.damaged.items()))
        first = path.relative_to(run.folder)
        what = f"{first} is" if len(ledger.damaged) == 1 else f"{len(ledger.damaged)} records, {first} the first, are"
        refused = all(isinstance(each, OSError) for each in ledger.damaged.values())  # as to another user: not damaged
        advice = "; `rankwise run` sets damaged records aside and measures them again"
        console.print(f"{printable(what)} unreadable{f': {reason_of(error)}' if refused else advice}")
    return 0


def _console_for(lines: Sequence[tuple[str, ...]]) -> Console:
    """A console as wide as all columns but the last need: a narrow terminal wraps lines, where rich would cut states.

    The last column has room for a few words at least.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    widths = [max(cell_len(text) for text in column) for column in zip(*lines, strict=True)]
    needed = sum(widths[:-1]) + 2 * len(widths) + min(widths[-1], _WHY_COLUMNS)
    return set_width(console, max(needed, console.width if console.is_terminal else _FILE_COLUMNS))


def _ledger(run: RunPaths) -> "Ledger":
    from tasks.campaign.ledger import read_ledger

    return read_ledger(run)


def status_rows(run: RunPaths, plan: Plan, ledger: "Ledger") -> list[dict[str, Any]]:
    """Return key, repeat, status, attempts, started_at, finished_at, record and scheduler's job of each repeat.

    A repeat without a record is `running` if a launch measures it now, `suspended` if the scheduler has stopped that,
    `queued` if its job is pending, `unreadable` if its record is damaged, else `waiting`. So is one that failed and is
    tried again. The job is the one that measures or measured it.
    """
    from tasks.campaign.ledger import damaged_places

    under_way, damaged = _under_way(run), damaged_places(ledger)
    rows = []
    for key in plan.cells:
        for repeat in range(plan.repeats[key]):
            entry = ledger.decisive((key, "timed", repeat))
            memory = ledger.decisive((key, "memory", 0))
            unreadable = damaged.get((key, "timed", repeat)) if entry is None else None
            start = (0, "unreadable" if unreadable else "waiting", None, None)
            attempt, state, job_id, waits_for = under_way.get((key, repeat), start)
            if entry and entry.status is not Status.COMPLETED and attempt > entry.attempt:
                entry = None  # its record is of an attempt before
            if entry and entry.record.accounting and job_id is None:
                job_id = entry.record.accounting.job_id
            rows.append(
                {
                    "key": key,
                    "repeat": repeat,
                    "status": entry.status.value if entry else state,
                    "job": job_id,
                    "attempts": ledger.attempts.get((key, "timed", repeat), 0),
                    "started_at": entry.record.started_at if entry else None,
                    "finished_at": entry.record.finished_at if entry else None,
                    "record": str(entry.path) if entry else None,
                    "memory_record": str(memory.path) if memory else None,
                    "waits_for": waits_for,
                    "failure": entry.record.failure.message if entry and entry.record.failure else unreadable,
                }
            )
    return rows


def _under_way(run: RunPaths) -> dict[tuple[str, int], tuple[int, str, str | None, str | None]]:
    """Return attempt, state, scheduler's job and why it waits by (key, repeat): timed measurements of active jobs."""
    from slurm.schedulers.waiting import is_suspended, read_waiting

    found: dict[tuple[str, int], tuple[int, str, str | None, str | None]] = {}
    for path in run.jobs.glob("*-timed-*/job.json"):
        paths = JobPaths(path.parent)
        if paths.end.exists() or _is_gone(_read(paths.launcher, Launcher)):
            continue
        job, submission = _read(paths.job, Job), _read(paths.submission, Submission)
        progress = _read(paths.progress(0), Progress)
        begun = progress.measurement if progress and progress.phase == "measurement" else None
        has_begun = paths.node_launcher(0).exists()
        others = "queued" if submission is not None and not has_begun else "waiting"
        now = "suspended" if has_begun and is_suspended(paths) else "running"
        waiting = None if has_begun else read_waiting(paths)
        for measurement in job.measurements if job else ():
            state = now if measurement.name == begun else others
            job_id = submission.job_id if submission else None
            reason = waiting.reason or None if waiting else None
            found[measurement.cell.key, measurement.repeat] = (measurement.attempt, state, job_id, reason)
    return found


def _is_gone(launcher: Launcher | None) -> bool:
    """Whether a launcher of this machine ended without a word, as when the machine was restarted."""
    if launcher is None or launcher.host != socket.gethostname():
        return False
    return not is_alive(launcher.pid, launcher.pid_started)


def _read(path: Path, model: type[_Model]) -> _Model | None:
    """Read a file of a job folder; None if it is missing or just being written."""
    try:
        return read_model(path, model, PLAN_BYTES)  # a launch of many cells has a long job.json
    except (OSError, ValueError):
        return None


def render_again(folder: Path) -> int:
    """Render the report from the current records."""
    from reports.render import render_report

    run, plan = open_run(folder)
    summary = render_report(run)
    for sentence in summary.sentences:
        print(sentence)
    print(printable(f"Report     {folder / 'report.md'}"))
    return report_code(plan, summary.statuses)


def report_code(plan: Plan, statuses: Iterable[str]) -> int:
    """3 where a repeat has no measurement or a model was left out, as after `rankwise run`."""
    return 0 if set(statuses) <= {Status.COMPLETED} and not plan.unusable else 3


def render_html(folder: Path) -> int:
    """Write `report.html` from the current records."""
    from reports.render import analyze_run, write_page

    run, plan = open_run(folder)
    analysis = analyze_run(run, draws=False)
    write_page(run, analysis)
    for sentence in analysis.context["sentences"]:
        print(printable(sentence.text))
    print(printable(f"Report     {folder / run.page.name}"))
    return report_code(plan, analysis.context["statuses"])


def render_paper(folder: Path) -> int:
    """Write `paper.pdf` and its source `paper.typ` from the current records."""
    from reports.render import analyze_run, write_paper

    run, plan = open_run(folder)
    analysis = analyze_run(run)
    write_paper(run, analysis)
    print(printable(f"Paper      {folder / run.paper.name}, from {folder / run.paper_source.name}"))
    return report_code(plan, analysis.context["statuses"])


def export_figures(folder: Path, to: str, out: Path | None) -> int:
    """Write a run's figures as another program reads them. Raises ValueError where its library is missing."""
    from reports.exports.writers import EXPORTS
    from reports.reading.devices import load_comparable

    run, _ = open_run(folder)
    place = out or run.folder / "exports" / to
    place.mkdir(parents=True, exist_ok=True)
    try:
        paths = EXPORTS[to](load_comparable(run), place)
    except ImportError as error:
        raise ValueError(f"--to {to}: {error.name} is not installed. Run: pip install 'rankwise[{to}]'") from error
    print(f"Exported   {place}  ({plural(len(paths), 'path')})")
    return 0


def print_answers(folder: Path) -> int:
    """Print the answers of a run as JSON; writes nothing."""
    from reports.json_form import run_answers
    from reports.reading.devices import load_comparable
    from reports.tables import status_counts

    run, plan = open_run(folder)
    study = load_comparable(run)
    print(run_answers(study).model_dump_json(indent=2))
    return 3 if study.unreadable else report_code(plan, status_counts(study))


def convert_checkpoint(source: Path, destination: Path) -> int:
    """Run the engine's converters in separate processes, which may read pickled data. Returns the exit code."""
    from flows.cli.errors import WRONG_STUDY
    from tasks.models.conversion import add_fast_tokenizer, run_converter

    try:
        print("\n".join(run_converter(source, destination)))
        print("\n".join(add_fast_tokenizer(destination)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return WRONG_STUDY
    return 0
