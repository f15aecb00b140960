"""Scheduler accounting of a study's jobs: one row for each target and placement of ranks on nodes.

A job makes several measurements, whose records all carry its accounts; each job counts once.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.records.record import Accounting, Record
from reports.reading.load import StudyResult
from reports.text import UNKNOWN, Table, count, escaped, joined, mebibytes, number, percent

if TYPE_CHECKING:
    import pandas as pd

_MOST_NAMES = 4
_FIGURES = ["queued_seconds", "elapsed_seconds", "cpu_seconds", "core_share", "max_rss_bytes", "energy_kilojoules"]


def scheduler_table(study: StudyResult) -> Table | None:
    """Jobs, how they ended, time in the queue, time and memory used; None where no scheduler kept accounts."""
    import pandas as pd

    records = [reading.record for reading in study.readings]
    accounts = [_account(record, record.accounting) for record in records if record.accounting is not None]
    if not accounts:
        return None
    columns = (
        "target",
        "layout",
        "jobs",
        "ended",
        "nodes",
        "in the queue, s",
        "longest in the queue, s",
        "running, s",
        "CPU, s, all jobs",
        "own cores in use",
        "largest task, MiB",
        "energy, kJ, all jobs",
        "ids",
    )
    jobs = pd.DataFrame(accounts).drop_duplicates(["target", "place", "job_id"])
    groups = jobs.groupby(["target", "place"], sort=False)
    rows = [(*(escaped(str(part)) for part in place), *_row(group)) for place, group in groups]
    return Table(columns, tuple(rows), text_columns=2).without_empty_columns()


def _account(record: Record, accounting: Accounting) -> dict[str, object]:
    """The accounts of the job that made a record, the same for each of its records, and where it ran."""
    cell, cpu, elapsed = record.cell, accounting.cpu_seconds, accounting.elapsed_seconds
    core_seconds = elapsed * cell.layout.ranks * cell.cores_per_rank if elapsed else None
    share = cpu / core_seconds if cpu is not None and core_seconds else None
    energy = None if accounting.energy_joules is None else accounting.energy_joules / 1000
    derived = {"core_share": share, "energy_kilojoules": energy}
    return {"target": cell.target, "place": cell.place, **accounting.model_dump(), **derived}


def _row(jobs: "pd.DataFrame") -> tuple[str, ...]:
    ended = jobs["state"].str.lower().str.replace("_", " ").value_counts().sort_index()
    figures = jobs[_FIGURES].astype(float)
    middle, largest, total = (_known(each) for each in (figures.median(), figures.max(), figures.sum(min_count=1)))
    return (
        count(len(jobs)),
        escaped(joined([f"{times} {state}" for state, times in ended.items()])),
        escaped(_some(sorted(set(jobs["nodes"].explode().dropna())))),
        number(middle["queued_seconds"]),
        number(largest["queued_seconds"]),
        number(middle["elapsed_seconds"]),
        number(total["cpu_seconds"]),
        percent(middle["core_share"]),
        mebibytes(largest["max_rss_bytes"]),
        number(total["energy_kilojoules"]),
        escaped(_some(list(jobs["job_id"]))),
    )


def _known(values: "pd.Series[float]") -> dict[str, float | None]:
    """The values by name, None for those that are not known."""
    return {str(name): None if math.isnan(value) else value for name, value in values.items()}


def _some(names: Sequence[str]) -> str:
    """The names, or the first and last of many."""
    if not names:
        return UNKNOWN
    return joined(names) if len(names) <= _MOST_NAMES else f"{names[0]} … {names[-1]}"
