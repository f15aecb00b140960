"""`rankwise status`, `logs`, `report` and `convert`: looking at a run folder, no Prefect needed."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.job import Progress
from configs.paths import RunPaths
from configs.plan import Plan
from configs.record import Status


def open_run(folder: Path) -> tuple[RunPaths, Plan]:
    """A run folder and its plan. Raises ValueError for a folder that holds no run."""
    run = RunPaths(folder.absolute())
    if not run.plan.exists():
        raise ValueError(f"{folder}: no run here (no plan.json); give a folder such as runs/quickstart")
    return run, Plan.model_validate_json(run.plan.read_bytes())


def print_status(folder: Path, as_json: bool) -> int:
    """One line (or JSON object) for each cell and repeat."""
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
    for column in ("key", "cell", "repeat", "status", "attempts", "started", "why"):
        table.add_column(
            column, no_wrap=column != "why", justify="right" if column in ("repeat", "attempts") else "left"
        )
    for row in rows:
        cell = plan.cells[row["key"]]
        label = f"{names.get(cell.model or '', '')}  {cell.label}".strip()
        started = (row["started_at"] or "")[:19].replace("T", " ")
        why = row["failure"] or ""
        table.add_row(row["key"], label, str(row["repeat"]), row["status"], str(row["attempts"]), started, why)
    console.print(table)
    done = sum(1 for row in rows if row["status"] == Status.COMPLETED)
    console.print(f"{done} of {len(rows)} repeats completed")
    return 0


def status_rows(run: RunPaths, plan: Plan) -> list[dict[str, Any]]:
    """Key, repeat, status, attempts, started_at, finished_at, record of each repeat.

    A repeat without a record is `running` if a launch visits it now, else `waiting`.
    """
    from tasks.ledger import read_ledger

    ledger, running = read_ledger(run), _running_visits(run)
    rows = []
    for key in plan.cells:
        for repeat in range(plan.repeats[key]):
            entry = ledger.decisive((key, "timed", repeat))
            memory = ledger.decisive((key, "memory", 0))
            rows.append(
                {
                    "key": key,
                    "repeat": repeat,
                    "status": entry.status.value if entry else ("running" if (key, repeat) in running else "waiting"),
                    "attempts": ledger.attempts.get((key, "timed", repeat), 0),
                    "started_at": entry.record.started_at if entry else None,
                    "finished_at": entry.record.finished_at if entry else None,
                    "record": str(entry.path) if entry else None,
                    "memory_record": str(memory.path) if memory else None,
                    "failure": entry.record.failure.message if entry and entry.record.failure else None,
                }
            )
    return rows


def _running_visits(run: RunPaths) -> set[tuple[str, int]]:
    """(key, repeat) of what ranks say they visit now, in jobs that have not ended."""
    found = set()
    for path in run.jobs.glob("*/progress_0.json"):
        if (path.parent / "end.json").exists() or "-memory-" in path.parent.name:
            continue
        try:
            progress = Progress.model_validate_json(path.read_bytes().rstrip(b" \0"))
        except ValueError:
            continue  # being rewritten at this moment
        if progress.phase == "visit" and progress.visit:
            key, repeat, _ = progress.visit.split("-")
            found.add((key, int(repeat[1:])))
    return found


def print_logs(folder: Path, follow: bool) -> int:
    """Every rank's log, each line after the name of its job and rank."""
    run, _ = open_run(folder)
    positions: dict[Path, int] = {}
    while True:
        for path in sorted(run.jobs.glob("*/*.log")):
            positions[path] = _print_new_lines(path, positions.get(path, 0))
        if not follow or not _anything_runs(run):
            return 0
        time.sleep(0.5)


def _print_new_lines(path: Path, position: int) -> int:
    """Print whole lines after `position`; returns where to go on."""
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        print(f"{path.parent.name}/{path.stem}: {line}")
    sys.stdout.flush()
    return position + len(whole)


def _anything_runs(run: RunPaths) -> bool:
    from tasks.runlock import is_locked

    return is_locked(run)


def render_again(folder: Path) -> int:
    """The report from the records as they are now."""
    from reports.render import render_report

    run, _ = open_run(folder)
    summary = render_report(run)
    for sentence in summary.sentences:
        print(sentence)
    print(f"Report     {folder / 'report.md'}")
    return 0 if set(summary.statuses) <= {"completed"} else 3


def convert_checkpoint(source: Path, destination: Path) -> int:
    """Hand over to the engine's converter: a process of its own may read what was pickled."""
    command = [sys.executable, "-m", "engine.convert", str(source), str(destination)]
    return subprocess.run(command, check=False).returncode
