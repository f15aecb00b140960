"""Passes under perf and nsys: perf's counters over one pass of each cell, and the paths of both tools' files.

cells = recorded_cells(study)                # those with a completed pass under perf or nsys
perf_table(cells), perf_sentence(cells), perf_lines(cells)
"""

from collections.abc import Sequence
from statistics import fmean

from configs.common.printable import shortened
from configs.records.record import Figure
from reports.reading.load import CellResult, StudyResult
from reports.reading.read import Reading
from reports.tables import first_rows
from reports.text import UNKNOWN, Table, code, count, escaped, number, percent, plural

_HARDWARE = ("perf_cycles", "perf_instructions", "perf_cache_references", "perf_cache_misses")


def recorded_cells(study: StudyResult) -> list[CellResult]:
    """Cells with a completed pass under perf or nsys, in the order of the plan."""
    return [
        cell
        for cell in study.cells.values()
        if any(measurement and measurement.completed for measurement in (cell.perf, cell.nsys))
    ]


def _numbers(cell: CellResult, figure: str) -> list[float]:
    return cell.perf.numbers_by_rank(figure) if cell.perf and cell.perf.completed else []


def _rate(cell: CellResult, figure: str) -> list[float]:
    """By rank, events in a second of the recorded pass."""
    events, seconds = _numbers(cell, figure), _numbers(cell, "perf_wall_seconds")
    whole = len(events) == len(seconds)
    return [event / taken for event, taken in zip(events, seconds, strict=True)] if whole else []


def _quotient(cell: CellResult, above: str, below: str) -> list[float]:
    upper, lower = _numbers(cell, above), _numbers(cell, below)
    return [a / b for a, b in zip(upper, lower, strict=True) if b] if len(upper) == len(lower) else []


def perf_table(cells: Sequence[CellResult]) -> Table:
    """One row for each cell: means over ranks, counts in a second of the recorded pass."""
    columns = (
        "model", "cell", "ranks", "pass, ms", "cores busy, a rank", "context switches/s", "migrations/s",
        "page faults/s", "instructions a cycle", "cache misses", "hottest function of rank 0", "share", "samples",
    )  # fmt: skip
    rows = tuple(_row(cell) for cell in cells)
    return first_rows(Table(columns, rows, text_columns=2).without_empty_columns())


def _row(cell: CellResult) -> tuple[str, ...]:
    seconds = _numbers(cell, "perf_wall_seconds")
    figures = cell.perf.record.figures if cell.perf and cell.perf.completed else {}
    return (
        escaped(cell.model),
        escaped(cell.name),
        str(cell.cell.layout.ranks),
        number(max(seconds) * 1000) if seconds else UNKNOWN,
        _mean(_rate(cell, "perf_task_clock_seconds")),
        _mean(_rate(cell, "perf_context_switches")),
        _mean(_rate(cell, "perf_cpu_migrations")),
        _mean(_rate(cell, "perf_page_faults")),
        _mean(_quotient(cell, "perf_instructions", "perf_cycles")),
        percent(fmean(found)) if (found := _quotient(cell, "perf_cache_misses", "perf_cache_references")) else UNKNOWN,
        code(shortened(str(figures["perf_hottest"]), 60)) if figures.get("perf_hottest") else UNKNOWN,
        percent(_number(figures.get("perf_hottest_share"))),
        count(_number(figures.get("perf_samples"))),
    )


def _number(value: Figure) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _mean(values: Sequence[float]) -> str:
    return number(fmean(values)) if values else UNKNOWN


def perf_sentence(cells: Sequence[CellResult]) -> str:
    """How many cores a rank kept busy, where least; what is to be seen without perf: that reports are there."""
    busy = {cell.title: fmean(rates) for cell in cells if (rates := _rate(cell, "perf_task_clock_seconds"))}
    if not busy:
        return f"nsys recorded {plural(len(cells), 'cell')}."
    least, most = min(busy, key=busy.__getitem__), max(busy, key=busy.__getitem__)
    text = f"{most} keeps {number(busy[most])} cores of each rank busy"
    if least == most:
        return f"{text}."
    return f"{text}, {least} {number(busy[least])}: what is missing to a rank's cores is waiting."


def perf_lines(cells: Sequence[CellResult]) -> list[str]:
    """What was not counted, and where the files lie."""
    lines = []
    seen = [cell for cell in cells if cell.perf and cell.perf.completed]
    if seen:
        if not any(_numbers(cell, figure) for cell in seen for figure in _HARDWARE):
            lines.append(
                "This machine's kernel gives no hardware counters (cycles, instructions, cache misses), as in most "
                "virtual machines: they are unknown, and samples are taken by the clock."
            )
        lines.append(
            "Counters and hottest functions of each rank lie beside its record "
            f"({_stem(seen[0].perf)}.perf_rank_<r>.txt, and .data, which `perf report -i` opens)."
        )
    under_nsys = [cell for cell in cells if cell.nsys and cell.nsys.completed]
    if under_nsys:
        lines.append(
            f"Each rank's report by nsys lies beside its record ({_stem(under_nsys[0].nsys)}.nsys_rank_<r>.nsys-rep); "
            "Nsight Systems, or `nsys stats`, opens it."
        )
    return lines


def _stem(measurement: Reading | None) -> str:
    """Where the files of one record lie, the key left open."""
    assert measurement is not None
    return f"records/<key>/{measurement.path.rpartition('/')[2].removesuffix('.json')}"
