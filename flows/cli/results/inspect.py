"""`rankwise status`, `report` and `convert`: inspect a run folder without Prefect."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from configs.common.base import Frozen
from configs.plans.job import Job, Progress, Submission
from configs.plans.paths import JobPaths, RunPaths
from configs.plans.plan import Plan
from configs.plans.record import Status

_Model = TypeVar("_Model", bound=Frozen)


def open_run(folder: Path) -> tuple[RunPaths, Plan]:
    """Return the paths of a run folder and its plan. Raises ValueError for a folder without a run."""
    run = RunPaths(folder.absolute())
    if not run.plan.exists():
        raise ValueError(f"{folder}: not a run folder (no plan.json). Expected a folder such as runs/quickstart")
    return run, Plan.model_validate_json(run.plan.read_bytes())


def print_status(folder: Path, as_json: bool) -> int:
    """Print one line (or JSON object) for each cell and repeat."""
    run, plan = open_run(folder)
    rows = status_rows(run, plan)
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    names = {model.identity: model.name for model in plan.models}
    table = Table(box=None, pad_edge=False)
    with_jobs = any(row["job"] for row in rows)
    columns = ("key", "cell", "repeat", "status", *(("job",) if with_jobs else ()), "attempts", "started", "why")
    for column in columns:
        table.add_column(
            column, no_wrap=column != "why", justify="right" if column in ("repeat", "attempts") else "left"
        )
    for row in rows:
        cell = plan.cells[row["key"]]
        label = f"{names.get(cell.model or '', '')}  {cell.label}".strip()
        started = (row["started_at"] or "")[:19].replace("T", " ")
        why = row["failure"] or ""
        jobs = (row["job"] or "",) if with_jobs else ()
        table.add_row(row["key"], label, str(row["repeat"]), row["status"], *jobs, str(row["attempts"]), started, why)
    console.print(table)
    done = sum(1 for row in rows if row["status"] == Status.COMPLETED)
    console.print(f"{done} of {len(rows)} repeats completed")
    return 0


def status_rows(run: RunPaths, plan: Plan) -> list[dict[str, Any]]:
    """Return key, repeat, status, attempts, started_at, finished_at, record and scheduler job of each repeat.

    A repeat without a record is `running` if a launch measures it now, `queued` if its job is pending,
    else `waiting`. The job is the one that measures or measured it.
    """
    from tasks.campaign.ledger import read_ledger

    ledger, under_way = read_ledger(run), _under_way(run)
    rows = []
    for key in plan.cells:
        for repeat in range(plan.repeats[key]):
            entry = ledger.decisive((key, "timed", repeat))
            memory = ledger.decisive((key, "memory", 0))
            state, job_id = under_way.get((key, repeat), ("waiting", None))
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
                    "failure": entry.record.failure.message if entry and entry.record.failure else None,
                }
            )
    return rows


def _under_way(run: RunPaths) -> dict[tuple[str, int], tuple[str, str | None]]:
    """Return state and scheduler job by (key, repeat) for the timed measurements of active jobs."""
    found: dict[tuple[str, int], tuple[str, str | None]] = {}
    for path in run.jobs.glob("*-timed-*/job.json"):
        paths = JobPaths(path.parent)
        if paths.end.exists():
            continue
        job, submission = _read(paths.job, Job), _read(paths.submission, Submission)
        progress = _read(paths.progress(0), Progress)
        begun = progress.measurement if progress and progress.phase == "measurement" else None
        waits = submission is not None and not paths.node_launcher(0).exists()
        for measurement in job.measurements if job else ():
            state = "running" if measurement.name == begun else "queued" if waits else "waiting"
            found[measurement.cell.key, measurement.repeat] = (state, submission.job_id if submission else None)
    return found


def _read(path: Path, model: type[_Model]) -> _Model | None:
    """Read a file of a job folder; None if it is missing or just being written."""
    try:
        return model.model_validate_json(path.read_bytes().rstrip(b" \0"))
    except (OSError, ValueError):
        return None


def render_again(folder: Path) -> int:
    """Render the report from the current records."""
    from reports.render import render_report

    run, _ = open_run(folder)
    summary = render_report(run)
    for sentence in summary.sentences:
        print(sentence)
    print(f"Report     {folder / 'report.md'}")
    return 0 if set(summary.statuses) <= {"completed"} else 3


def convert_checkpoint(source: Path, destination: Path) -> int:
    """Run the engine's converter in a separate process, which may read pickled data."""
    command = [sys.executable, "-P", "-m", "engine.tools.convert", str(source), str(destination)]
    return subprocess.run(command, check=False).returncode
