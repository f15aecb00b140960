"""What the scheduler's accounts say of a study's jobs: one row for each target and place of ranks on nodes.

A job makes several visits, whose records all carry its accounts; each job counts once.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from configs.cell import Cell
from configs.record import Accounting
from reports.reading.load import StudyResult
from reports.text import UNKNOWN, Table, count, escaped, joined, mebibytes, number, percent

_MOST_NAMES = 4

Accounts = list[tuple[Cell, Accounting]]


def scheduler_table(study: StudyResult) -> Table | None:
    """Jobs, how they ended, time in the queue, time and memory used; None where no scheduler kept accounts."""
    groups: dict[tuple[str, str], dict[str, tuple[Cell, Accounting]]] = {}
    for reading in study.readings:
        record = reading.record
        if record.accounting is not None:
            place = (record.cell.target, record.cell.place)
            groups.setdefault(place, {})[record.accounting.job_id] = (record.cell, record.accounting)
    if not groups:
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
    rows = [(escaped(target), escaped(place), *_row(list(jobs.values()))) for (target, place), jobs in groups.items()]
    return Table(columns, tuple(rows), text_columns=2).without_empty_columns()


def _row(jobs: Accounts) -> tuple[str, ...]:
    accounts = [accounting for _, accounting in jobs]
    queued, elapsed = (_known(getattr(one, name) for one in accounts) for name in ("queued_seconds", "elapsed_seconds"))
    cpu, energy = (_known(getattr(one, name) for one in accounts) for name in ("cpu_seconds", "energy_joules"))
    memory = _known(one.max_rss_bytes for one in accounts)
    shares = [share for cell, accounting in jobs if (share := _core_share(cell, accounting)) is not None]
    ended = Counter(one.state.lower().replace("_", " ") for one in accounts)
    return (
        count(len(jobs)),
        escaped(joined([f"{times} {state}" for state, times in sorted(ended.items())])),
        escaped(_some(sorted({name for one in accounts for name in one.nodes}))),
        number(median(queued) if queued else None),
        number(max(queued, default=None)),
        number(median(elapsed) if elapsed else None),
        number(sum(cpu) if cpu else None),
        percent(median(shares) if shares else None),
        mebibytes(max(memory, default=None)),
        number(sum(energy) / 1000 if energy else None),
        escaped(_some([one.job_id for one in accounts])),
    )


def _core_share(cell: Cell, accounting: Accounting) -> float | None:
    """CPU seconds of a job over those that its ranks' cores had."""
    if accounting.cpu_seconds is None or not accounting.elapsed_seconds:
        return None
    return accounting.cpu_seconds / (accounting.elapsed_seconds * cell.layout.ranks * cell.cores_per_rank)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _some(names: Sequence[str]) -> str:
    """The names, or the first and last of many."""
    if not names:
        return UNKNOWN
    return joined(names) if len(names) <= _MOST_NAMES else f"{names[0]} … {names[-1]}"
