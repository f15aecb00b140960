"""Documents of several runs: a comparison of two, and the figures of many over time.

    report_page(comparison_document(comparison))
    report_page(history_document(runs))                  # the oldest first
    report_page(run_document(kept, kind))                # the cells of one run of a history

They have the same structure of sections as the report of one run, and are shown by the same templates.
"""

from collections.abc import Sequence

from reports.charts.chart import MAX_ROWS, Chart, ChartPoint, ChartSeries, measured_point
from reports.document.structure import Document, Section
from reports.reading.run_figures import FIGURE_KINDS, CellFigures, FigureKind
from reports.runs.compare_text import (
    change_table,
    comparison_headline,
    details,
    difference_sentence,
    difference_table,
    notes,
    run_line,
    short_commit,
    threshold_text,
)
from reports.runs.comparison import Change, Comparison
from reports.runs.history import KeptRun
from reports.tables import first_rows
from reports.text import UNKNOWN, Table, code, escaped, estimate_cell, joined, percent, plural

MAX_CELLS = 24
"""Charts of single cells on one page; the table has the others."""
MAX_RUNS = 200
"""The newest runs, on one page."""
MAX_LINES = 200


def comparison_document(comparison: Comparison) -> Document:
    """A page for two runs: the verdict, the ratio of each cell, what differs, and what to know of the figures."""
    first, second = comparison.first, comparison.second
    table, told = first_rows(change_table(comparison), where="the JSON form"), details(comparison)
    judged = any(cell.change("throughput") for cell in comparison.cells)
    charts = {"ratios": _ratio_charts(comparison)} if judged else {}
    lines = (*told[:MAX_LINES], *((f"{len(told) - MAX_LINES:,} more.",) if len(told) > MAX_LINES else ()))
    lead, _, rest = comparison_headline(comparison).partition(" ")
    if not lead.endswith(":"):
        lead, rest = comparison_headline(comparison), ""
    sections = (
        Section(
            "Cells",
            question="What changed, by how much, and is it sure?",
            sentence=f"Ratios are second / first. The threshold for a regression is {threshold_text(comparison)}.",
            plot="ratios" if charts else None,
            tables=(("", table),),
            lines=tuple(lines),
        ),
        Section(
            "Environment",
            question="Were the runs measured in the same way?",
            sentence=difference_sentence(comparison),
            table=difference_table(comparison),
        ),
        Section("Notes", question="What limits the comparison?", lines=tuple(notes(comparison))),
    )
    return Document(
        title=f"{first.name} and {second.name}",
        sentences=((lead, rest, "Cells"), ("Environment:", difference_sentence(comparison), "Environment")),
        counts=f"First: {run_line(first)}. Second: {run_line(second)}.",
        sections=sections,
        charts=charts,
    )


def _ratio_charts(comparison: Comparison) -> tuple[Chart, ...]:
    """Throughput of the second run over the first, a row for each cell; those furthest from 1 where there are many."""
    known = [(cell, change) for cell in comparison.cells if (change := cell.change("throughput")) is not None]
    known.sort(key=lambda pair: -abs(pair[1].ratio.value - 1))
    shown = known[:MAX_ROWS]
    points = tuple(_ratio_point(row, cell.first.title, change) for row, (cell, change) in enumerate(shown))
    left = f", the {MAX_ROWS} that changed most of {len(known)} cells" if len(known) > MAX_ROWS else ""
    return (
        Chart(
            f"Throughput, second / first{left}",
            "ratio of throughput (1: the same)",
            "ratio of throughput",
            (ChartSeries("second / first", points, line=False),),
            form="dots",
            rows=tuple(cell.first.title for cell, _ in shown),
            from_zero=False,
            reference=1.0,
        ),
    )


def _ratio_point(row: int, title: str, change: Change) -> ChartPoint:
    low, high = change.bounds or change.ratio.bounds
    return ChartPoint(row, change.ratio.value, low, high, change.bounds is not None, label=title)


def history_document(
    runs: Sequence[KeptRun], title: str = "History", kind: FigureKind = FIGURE_KINDS[0], key: str | None = None
) -> Document:
    """A page for many runs, the oldest first: all of them, and each cell's figure over the runs that have it.

    key: of this cell only.
    """
    shown = list(runs)[-MAX_RUNS:]
    studies = list(dict.fromkeys(run.figures.study for run in shown))
    charts: dict[str, tuple[Chart, ...]] = {}
    groups = []
    for place, study in enumerate(studies):
        group = [run for run in shown if run.figures.study == study]
        cells = _cells(group) if key is None else [cell for cell in _cells(group) if cell.key == key]
        if not cells:
            continue
        name = f"study-{place}"
        drawn = tuple(_trend(group, cell, kind) for cell in cells[:MAX_CELLS])
        charts[name] = tuple(chart for chart in drawn if chart is not None)
        told = f"{plural(len(group), 'run')}, {plural(len(cells), 'cell')}"
        told += f"; charts show the first {MAX_CELLS}" if len(cells) > MAX_CELLS else ""
        table = first_rows(_trend_table(group, cells, kind), where="the runs")
        groups.append(Section(study, f"{told}.", table, plot=name if charts[name] else None))
    question = f"How did {kind.title} change over time?"
    note = (
        "Marks are medians, bars their intervals or ranges. Runs of other machines or versions are not comparable: a "
    )
    note += "cell that ran on several devices has a line for each, and no ratio."
    sections = [Section("Runs", question="What was measured, when and with what?", table=runs_table(shown))]
    if groups:
        sections.append(Section("Trends", note, question=question, more=tuple(groups)))
    left = f" The newest {MAX_RUNS} of {len(runs):,}." if len(runs) > MAX_RUNS else ""
    last = shown[-1].figures.started_at if shown else None
    lead = f"{plural(len(runs), 'run')} of {'one study' if len(studies) == 1 else plural(len(studies), 'studie')}."
    return Document(
        title=title,
        sentences=(
            (lead.replace("studie ", "study "), f"The last began at {_moment(last)} UTC." if last else "", "Runs"),
        ),
        counts=f"Runs stand in the order in which they were measured.{left}",
        sections=tuple(sections),
        charts=charts,
    )


def cells_table(run: KeptRun, kind: FigureKind) -> Table:
    """A row for each cell of a run of a history."""
    rows = tuple(
        (
            code(cell.key),
            escaped(cell.title),
            cell.status.replace("_", " "),
            estimate_cell(cell.estimate(kind.name), kind.scale),
            cell.unit_of(kind),
        )
        for cell in run.figures.cells.values()
    )
    return Table(("key", "cell", "state", f"{kind.title}, median (interval)", "unit"), rows, 3)


def run_document(run: KeptRun, kind: FigureKind) -> Document:
    """A page for one run of a history: its cells."""
    cells = list(run.figures.cells.values())
    table = cells_table(run, kind)
    completed = sum(cell.completed for cell in cells)
    return Document(
        title=run.title,
        sentences=((f"{completed} of {plural(len(cells), 'cell')} completed.", run_line(run.figures), "Cells"),),
        counts=f"Run {run.number} of the history, from {run.source}.",
        sections=(Section("Cells", question="What did the run measure?", table=first_rows(table, where="the run")),),
    )


def runs_table(runs: Sequence[KeptRun]) -> Table:
    """One row for each run."""
    rows = tuple(
        (
            escaped(run.title),
            escaped(run.figures.study),
            _moment(run.figures.started_at),
            short_commit(run.figures.commit) if run.figures.commit else UNKNOWN,
            run.figures.environment or UNKNOWN,
            cells_done(run),
        )
        for run in runs
    )
    return Table(("run", "study", "measured, UTC", "commit", "environment", "cells"), rows, text_columns=5)


def cells_done(run: KeptRun) -> str:
    """`12 of 14`: completed cells."""
    cells = run.figures.cells.values()
    return f"{sum(cell.completed for cell in cells)} of {len(cells)}"


def _cells(runs: Sequence[KeptRun]) -> list[CellFigures]:
    """Each cell of these runs once, as the newest run names it; those in most runs first."""
    newest: dict[str, CellFigures] = {}
    seen: dict[str, int] = {}
    for run in runs:
        for key, cell in run.figures.cells.items():
            newest[key] = cell
            seen[key] = seen.get(key, 0) + cell.completed
    return sorted(newest.values(), key=lambda cell: -seen[cell.key])


def _trend(runs: Sequence[KeptRun], cell: CellFigures, kind: FigureKind) -> Chart | None:
    """A cell's figure by number of the run, a line for each device; None where no run has one."""
    devices = _devices(runs, cell.key)
    points: dict[str, list[ChartPoint]] = {}
    lost = []
    for place, run in enumerate(runs, 1):
        found = run.figures.cells.get(cell.key)
        if found is None:
            continue
        value = found.estimate(kind.name)
        label = f"{run.title}, {_moment(run.figures.started_at)}"
        if value is None:
            why = "no figure" if found.completed else found.status.replace("_", " ")
            lost.append((float(place), f"{label}: {why}"))
        else:
            name = kind.title + (f" on {devices[place - 1] or 'an unknown device'}" if _several(devices) else "")
            points.setdefault(name, []).append(measured_point(place, value, found.values(kind.name), kind.scale, label))
    if not points:
        return None
    unit = cell.unit_of(kind)
    series = tuple(ChartSeries(name, tuple(line)) for name, line in points.items())
    y_label = f"{kind.title}, {unit}"
    return Chart(cell.title, "run, by time", y_label, series, unit=unit, lost=tuple(lost), from_zero=False)


def _trend_table(runs: Sequence[KeptRun], cells: Sequence[CellFigures], kind: FigureKind) -> Table:
    """First and last figure of each cell, and how far the medians lie apart over all runs."""
    rows = []
    for cell in cells:
        found = [run.figures.cells[cell.key].estimate(kind.name) for run in runs if cell.key in run.figures.cells]
        known = [value for value in found if value is not None]
        medians = [value.median for value in known]
        one_device = not _several(_devices(runs, cell.key))
        ratio = len(known) > 1 and min(medians) > 0 and one_device
        spread = percent(max(medians) / min(medians) - 1) if ratio else UNKNOWN
        first, last = (known[0], known[-1]) if known else (None, None)
        rows.append(
            (
                escaped(cell.title),
                code(cell.key),
                str(len(known)),
                estimate_cell(first, kind.scale),
                estimate_cell(last, kind.scale),
                cell.unit_of(kind),
                spread,
            )
        )
    columns = ("cell", "key", "runs", "first", "last", "unit", "largest median above the smallest")
    return Table(columns, tuple(rows), text_columns=2)


def _devices(runs: Sequence[KeptRun], key: str) -> list[str | None]:
    """What a cell was measured on in each run; None where that is not known."""
    found = [run.figures.facts(("device",), [key] if key in run.figures.cells else [])["device"] for run in runs]
    return [joined(sorted(names)) or None for names in found]


def _several(devices: Sequence[str | None]) -> bool:
    return len({*devices} - {None}) > 1


def _moment(text: str | None) -> str:
    return text[:16].replace("T", " ") if text else UNKNOWN
