"""Stage 8: report, cell table and link become Prefect artifacts, for those who look at its UI."""

import csv
import re
from uuid import UUID

from prefect import task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from configs.paths import RunPaths

_MOST_ROWS = 500
_TABLE_COLUMNS = 12


@task(name="publish", task_run_name="publish {study}", cache_policy=NO_CACHE)
def publish(study: str, run: RunPaths) -> None:
    """Create the artifacts. Raises whatever Prefect's API raises; files on disk are the report itself."""
    key = artifact_key(study)
    text = re.sub(r"!\[([^\]]*)\]\(([^)]+)\)", rf"*figure: `{run.folder}/\2`*", run.report.read_text())
    create_markdown_artifact(text, key=f"report-{key}", description=f"Report of study {study}")
    with run.cells_csv.open(newline="") as file:
        rows = [dict(list(row.items())[:_TABLE_COLUMNS]) for row in csv.DictReader(file)]
    create_table_artifact(rows[:_MOST_ROWS], key=f"cells-{key}", description=f"Cells of study {study}")
    create_link_artifact(run.report.resolve().as_uri(), key=f"folder-{key}", link_text=str(run.report))


def begin_progress(study: str) -> UUID | None:
    """A progress artifact for this flow run; None where the API does not answer."""
    try:
        created = create_progress_artifact(0.0, key=f"progress-{artifact_key(study)}", description=f"Study {study}")
    except Exception as error:
        get_run_logger().warning("no progress artifact: %s", error)
        return None
    return created if isinstance(created, UUID) else None


def artifact_key(study: str) -> str:
    """Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-") or "study"
