"""Stage 9: publish the report, the cell table and a link as Prefect artifacts.

They are copies: the files in the run folder stay the truth. The UI shows nothing that lies beside the
report, so figures are embedded, and links to files become their paths.
"""

import base64
import csv
import io
import re
from pathlib import Path
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
)
from prefect.logging import get_run_logger

from configs.common.files.reading import MIB, PLAN_BYTES, TEXT_BYTES, read_bytes, read_text
from configs.common.printable import printable
from configs.plans.paths import RunPaths
from reports.text import UNKNOWN, number
from tasks.campaign.progress import RunProgress
from tasks.prefect_api.api import api_error_text
from tasks.prefect_api.stages import stage

_MOST_ROWS = 500
_MOST_BYTES = 2_000_000
"""Of a report with its figures: the UI loads all of it to list it."""
_IMAGE = re.compile(r"!\[((?:\\.|[^\]\\])*)\]\(([^)]+)\)")
_FILE_LINK = re.compile(r" ?\(\[(?:SVG|more|evidence)\]\([^)]+\)\)")
"""In parentheses at the end of a sentence: to a file of the run folder, which the UI cannot open."""

_LINK = re.compile(r"(?<![!\\])\[((?:\\.|[^\]\\])+)\]\((?![a-z]+:)([^)]+)\)")

_FIGURES = {
    "tokens/s": ("tokens_per_second_median", 1.0),
    "ms per token": ("time_per_output_token_seconds_median", 1e3),
    "ms per step": ("step_seconds_median", 1e3),
    "embeddings/s": ("embeddings_per_second_median", 1.0),
    "items/s": ("items_per_second_median", 1.0),
    "peak MiB": ("peak_memory_bytes_all_ranks", 1 / MIB),
}
"""Figures in the cell table: the column of `cells.csv`, and what it is multiplied by."""


@stage("publish", "publish {study}", retry_on=httpx.TransportError)
def publish(study: str, run: RunPaths) -> None:
    """Create the artifacts. Raises whatever Prefect's API raises; files on disk are the report itself."""
    key = artifact_key(study)
    create_markdown_artifact(
        report_for_ui(run), key=f"report-{key}", description=f"Report of study {study}, a copy of `{run.report}`"
    )
    rows = cell_rows(list(csv.DictReader(io.StringIO(read_text(run.cells_csv, PLAN_BYTES), newline=""))))
    create_table_artifact(rows[:_MOST_ROWS], key=f"cells-{key}", description=_table_description(study, len(rows)))
    create_link_artifact(
        run.folder.resolve().as_uri(),
        key=f"folder-{key}",
        link_text=str(run.folder),
        description=f"Run folder of study {study}, on the machine of the Prefect worker",
    )


def begin_progress(run_progress: RunProgress) -> UUID | None:
    """A progress artifact for this flow run; None where the API does not answer."""
    try:
        created = create_progress_artifact(
            0.0, key=f"progress-{artifact_key(run_progress.study)}", description=run_progress.description
        )
    except Exception as error:
        get_run_logger().warning("progress artifact not published: %s", api_error_text(error))
        return None
    return created if isinstance(created, UUID) else None


def begin_jobs(study: str) -> UUID | None:
    """A table of the jobs that a scheduler has, kept up to date while the run goes on; None without an API."""
    try:
        created = create_table_artifact(
            [], key=f"jobs-{artifact_key(study)}", description=f"Study {study}: jobs that wait in the queue or run now"
        )
    except Exception as error:
        get_run_logger().warning("table of jobs not published: %s", api_error_text(error))
        return None
    return created if isinstance(created, UUID) else None


def artifact_key(study: str) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-") or "study"


def report_for_ui(run: RunPaths, max_bytes: int = _MOST_BYTES) -> str:
    """The report with its figures inside, as many as fit, the first first; links to files as their paths."""
    text = _LINK.sub(r"\1 (`\2`)", _FILE_LINK.sub("", read_text(run.report, TEXT_BYTES)))
    left = max_bytes - len(text.encode())

    def embedded(match: re.Match[str]) -> str:
        nonlocal left
        title, path = match[1], run.folder / match[2]
        figure = f"![{title}]({_data_uri(path)})" if path.is_file() and _is_figure(path, run) else ""
        if not figure or len(figure) > left:
            return f"*figure: `{path}`*"
        left -= len(figure)
        return figure

    return _IMAGE.sub(embedded, text)


def _is_figure(path: Path, run: RunPaths) -> bool:
    """Whether a path lies in the run folder, links followed: a foreign report may name any file of this machine."""
    return path.suffix == ".png" and path.resolve().is_relative_to(run.folder.resolve())


def _data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(read_bytes(path)).decode()}"


def cell_rows(cells: list[dict[str, str]]) -> list[dict[str, str]]:
    """Lines of `cells.csv` as rows for people, what matters most first: the UI's window shows some six columns."""
    figures = {name: of for name, of in _FIGURES.items() if any(cell.get(of[0]) for cell in cells)}
    several_models = len({cell["model"] for cell in cells}) > 1
    return [_row(cell, figures, several_models) for cell in cells]


def _row(cell: dict[str, str], figures: dict[str, tuple[str, float]], with_model: bool) -> dict[str, str]:
    row = {"model": cell["model"]} if with_model else {}
    row |= {"cell": printable(cell["name"]), "state": cell["status"]}
    for name, (column, scale) in figures.items():
        row[name] = number(float(cell[column]) * scale) if cell.get(column) else UNKNOWN
    row["repeats"] = f"{cell['repeats_completed']} of {cell['repeats_planned']}"
    row["experiments"] = cell["experiments"]
    return row


def _table_description(study: str, count: int) -> str:
    shown = f"; the first {_MOST_ROWS} of {count}" if count > _MOST_ROWS else ""
    return f"Cells of study {study}, medians over the repeats{shown}; every figure is in `cells.csv`"
