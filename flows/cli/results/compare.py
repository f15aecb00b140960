"""`rankwise compare` and `rankwise history`: compare two runs, and track figures over many runs.

Exit codes of `compare`: 0 no regression, 4 a regression over the threshold, 2 wrong arguments, 1 anything else.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from configs.common.base import WrongArgument
from configs.common.printable import plural, printable
from configs.plans.paths import RunPaths
from flows.cli.options import write_output
from reports.document.between import cells_table, comparison_document, history_document, run_document
from reports.document.html import report_page
from reports.reading.devices import load_comparable
from reports.reading.load import StudyResult
from reports.reading.run_figures import FIGURE_KINDS, FigureKind, RunFigures, run_figures
from reports.runs.between_runs import BetweenRuns, between_runs
from reports.runs.compare import compare
from reports.runs.compare_export import as_json, junit_xml
from reports.runs.compare_text import markdown, short_commit, terminal_text
from reports.runs.comparison import Comparison
from reports.runs.history import HISTORY_FILE, KeptRun, open_history
from reports.runs.within import compare_within
from reports.text import UNKNOWN, Table, aligned, escaped, estimate_cell, joined

NO_REGRESSION, OTHER_ERROR, WRONG_ARGUMENTS, REGRESSION = 0, 1, 2, 4
_SHOWN_FILES = 5
DEFAULT_HISTORY = Path("runs") / HISTORY_FILE


def compare_runs(
    first: Path,
    second: Path | None,
    baseline: str | None = None,
    threshold_percent: float = 5.0,
    markdown_file: Path | None = None,
    junit_file: Path | None = None,
    json_wanted: bool = False,
    history_file: Path | None = None,
    within: str | None = None,
    html_file: Path | None = None,
    undisturbed: bool = False,
) -> int:
    """Compare a run with another, with a baseline of the history, or its own variants; return the exit code.

    With `baseline`, `first` is the newer run. Raises ValueError for runs that cannot be compared, WrongArgument for a
    baseline that is not there.
    """
    if sum(given is not None for given in (second, baseline, within)) != 1:
        return _refused("RUN: expected two run folders, or one and --baseline NAME or --within EXPERIMENT")
    if not 0 < threshold_percent < 100:
        return _refused(f"--threshold: got {threshold_percent:g}, expected a percentage between 0 and 100 (default 5)")
    if undisturbed and within is None:
        return _refused("--undisturbed: requires --within EXPERIMENT")
    if within is not None:
        comparison = compare_within(_study_of(first), str(first), within, threshold_percent / 100, undisturbed)
        return _told(comparison, markdown_file, junit_file, json_wanted, html_file)
    if second is not None and os.path.realpath(first) == os.path.realpath(second):
        return _refused(f"{first}: got the same run twice, expected two runs")
    file = history_file or _history_beside(first)
    if history_file is not None and not file.exists():
        raise WrongArgument(f"{file}: no such history. Create it with `rankwise history add RUN --as NAME`")
    if baseline is not None:
        with open_history(file) as history:
            before = history.run(baseline).figures
        after = read_run(first)
        if _is_same_run(before, after):  # its ratios are 1: a check that could never fail
            return _refused(f"--baseline {baseline}: is {first} itself, expected another run")
    else:
        assert second is not None
        before, after = read_run(first), read_run(second)
    comparison = compare(before, after, threshold_percent / 100, _between(file, before, after))
    return _told(comparison, markdown_file, junit_file, json_wanted, html_file)


def _told(
    comparison: Comparison,
    markdown_file: Path | None,
    junit_file: Path | None,
    json_wanted: bool,
    html_file: Path | None,
) -> int:
    """Print a comparison, write its files, and return the exit code."""
    if html_file is not None:
        write_output(html_file, report_page(comparison_document(comparison)))
    if markdown_file is not None:
        write_output(markdown_file, markdown(comparison))
    if junit_file is not None:
        write_output(junit_file, junit_xml(comparison))
    print(json.dumps(as_json(comparison), indent=1) if json_wanted else terminal_text(comparison).rstrip())
    if html_file is not None and not json_wanted:
        print(f"\nPage       {html_file}")
    return REGRESSION if comparison.regressions else NO_REGRESSION


def read_run(folder: Path) -> RunFigures:
    """Return the comparable figures of a run folder. Raises ValueError for a folder without a run."""
    return run_figures(_study_of(folder), str(folder))


def _study_of(folder: Path) -> StudyResult:
    from flows.cli.results.inspect import open_run

    run, _ = open_run(folder)
    study = load_comparable(run)
    _tell_unreadable(folder, study)
    return study


def _tell_unreadable(folder: Path, study: StudyResult) -> None:
    """Say on standard error what the figures of a run are missing."""
    for note in study.other_devices:
        print(f"{printable(str(folder))}: left out: {printable(note)}", file=sys.stderr)
    for item in study.unreadable[:_SHOWN_FILES]:
        print(f"{printable(f'{folder}/{item.path}')}: left out: {item.reason}", file=sys.stderr)
    if len(study.unreadable) > _SHOWN_FILES:
        more = len(study.unreadable) - _SHOWN_FILES
        print(f"{printable(str(folder))}: {plural(more, 'more file')} left out", file=sys.stderr)


def _between(file: Path, before: RunFigures, after: RunFigures) -> Mapping[str, BetweenRuns]:
    """Return the noise between runs of the same code if a history has it, excluding the run in question."""
    if not file.exists():
        return {}
    keys = frozenset(before.cells.keys() & after.cells.keys())
    with open_history(file) as history:
        kept = [run.figures for run in history.runs(keys)]
    return between_runs([run for run in kept if run.started_at != after.started_at], keys)


def _is_same_run(before: RunFigures, after: RunFigures) -> bool:
    """Whether a history would keep both under one number, although one of them may have grown or moved."""
    return before.started_at is not None and (before.study, before.started_at) == (after.study, after.started_at)


def _history_beside(folder: Path) -> Path:
    """The history beside a run folder as it was named; where there is none, beside the folder that a link leads to."""
    named = Path(os.path.abspath(folder)).parent / HISTORY_FILE
    return named if named.exists() else Path(os.path.realpath(folder)).parent / HISTORY_FILE


def _refused(message: str) -> int:
    print(message, file=sys.stderr)
    return WRONG_ARGUMENTS


def history_add(folder: Path, name: str | None = None, history_file: Path | None = None) -> int:
    """Add a run's figures to the history, optionally under a name. Returns the exit code."""
    file = history_file or _history_beside(folder)
    run = read_run(folder)
    with open_history(file, create=True) as history:
        added = history.add(run, name)
    said = {
        "new": f"added as run {added.number}",
        "known": f"already present as run {added.number}",
        "grown": f"updated as run {added.number} with what the folder has now",
    }[added.state]
    named = f", named {name}" if name is not None else ""
    moved = f" (previously run {added.moved_from})" if added.moved_from is not None else ""
    lost = [plural(count, what) for count, what in ((added.kept, "cell"), (added.kept_repeats, "repeat")) if count]
    kept = f"; kept: {joined(lost)} that its study no longer has" if lost else ""
    print(printable(f"{folder}: {said}{named}{moved}{kept}  ({file})"))
    return NO_REGRESSION


def history_list(history_file: Path | None = None, json_wanted: bool = False, html_file: Path | None = None) -> int:
    """Print all runs of a history, oldest first. Returns the exit code. `html_file`: also write their page."""
    with open_history(history_file or DEFAULT_HISTORY) as history:
        runs = history.listed() if html_file is None else history.runs()
    if html_file is not None:
        write_output(html_file, report_page(history_document(runs)))
        print(f"Page       {html_file}", file=sys.stderr if json_wanted else sys.stdout)
    if json_wanted:
        print(json.dumps([_run_json(run) for run in runs], indent=1))
        return NO_REGRESSION
    rows = [
        (
            str(run.number),
            escaped(", ".join(run.names)) or UNKNOWN,
            escaped(run.figures.study),
            _moment(run.figures.started_at),
            short_commit(run.figures.commit) if run.figures.commit else UNKNOWN,
            run.figures.environment or UNKNOWN,
            f"{sum(cell.completed for cell in run.figures.cells.values())} of {len(run.figures.cells)}",
            escaped(run.source),
        )
        for run in runs
    ]
    columns = ("run", "names", "study", "measured, UTC", "commit", "environment", "cells", "from")
    print(aligned(Table(columns, tuple(rows), text_columns=len(columns))) if rows else "the history is empty")
    return NO_REGRESSION


def history_show(
    what: str,
    history_file: Path | None = None,
    figure: str = "throughput",
    plot: Path | None = None,
    json_wanted: bool = False,
    html_file: Path | None = None,
) -> int:
    """Print the cells of a run (name or number), or one cell (key or name) over the runs; return the exit code.

    `plot`: also plot the cell's figure over the runs. Raises WrongArgument for an unknown name.
    """
    kind = next((kind for kind in FIGURE_KINDS if kind.name == figure), None)
    if kind is None:
        return _refused(f"--figure: got {figure}, expected one of: {', '.join(kind.name for kind in FIGURE_KINDS)}")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        return _refused(f"--plot: got {plot}, expected a name that ends in .png or .svg")
    with open_history(history_file or DEFAULT_HISTORY) as history:
        found = history.run_or_key(what)
        runs = history.runs([found]) if isinstance(found, str) else []
    if plot is not None and isinstance(found, KeptRun):
        return _refused(
            f"--plot: {what} is a run, expected a cell. `rankwise history show {what}` lists the keys of its cells"
        )
    if html_file is not None:
        document = (
            run_document(found, kind)
            if isinstance(found, KeptRun)
            else history_document(runs, runs[-1].figures.cells[found].title, kind, found)
        )
        write_output(html_file, report_page(document))
        print(f"Page       {html_file}", file=sys.stderr if json_wanted else sys.stdout)
    if isinstance(found, KeptRun):
        _show_run(found, kind, json_wanted)
        return NO_REGRESSION
    _show_cell(runs, found, kind, json_wanted)
    if plot is not None:
        _draw(runs, found, kind, plot)
        if not json_wanted:
            print(f"Figure     {plot}")
    return NO_REGRESSION


def _show_run(run: KeptRun, kind: FigureKind, json_wanted: bool) -> None:
    if json_wanted:
        cells = run.figures.cells.values()
        found = {
            cell.key: {
                "name": cell.title,
                "status": cell.status,
                "unit": cell.unit,
                "figures": _by_repeat(cell.figures),
            }
            for cell in cells
        }
        print(json.dumps({**_run_json(run), "cells": found}, indent=1))
        return
    print(aligned(cells_table(run, kind)))


def _show_cell(runs: list[KeptRun], key: str, kind: FigureKind, json_wanted: bool) -> None:
    pairs = [(run, run.figures.cells[key]) for run in runs]
    if json_wanted:
        found = [{**_run_json(run), "status": cell.status, "figures": _by_repeat(cell.figures)} for run, cell in pairs]
        last = pairs[-1][1]
        print(json.dumps({"key": key, "name": last.title, "unit": last.unit, "runs": found}, indent=1))
        return
    rows = [
        (
            escaped(run.title),
            _moment(run.figures.started_at),
            short_commit(run.figures.commit) if run.figures.commit else UNKNOWN,
            run.figures.environment or UNKNOWN,
            cell.status.replace("_", " "),
            str(len(cell.values(kind.name))),
            estimate_cell(cell.estimate(kind.name), kind.scale),
        )
        for run, cell in pairs
    ]
    unit = pairs[-1][1].unit_of(kind)
    columns = ("run", "measured, UTC", "commit", "environment", "state", "repeats", f"{unit}, median (interval)")
    print(printable(f"{pairs[-1][1].title}  {key}  {kind.title}"))
    print(aligned(Table(columns, tuple(rows), text_columns=5)))


def _draw(runs: list[KeptRun], key: str, kind: FigureKind, plot: Path) -> None:
    from reports.plots.runs.history import draw_history, history_height
    from reports.plots.style import drawn

    draw = partial(draw_history, runs=runs, key=key, kind=kind)
    write_output(plot, drawn(draw, history_height(len(runs)))[plot.suffix[1:]])


def _by_repeat(figures: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    return {name: {str(repeat): value for repeat, value in values.items()} for name, values in figures.items()}


def _run_json(run: KeptRun) -> dict[str, Any]:
    figures = run.figures
    return {
        "run": run.number,
        "names": list(run.names),
        "study": figures.study,
        "started_at": figures.started_at,
        "commit": figures.commit,
        "environment": figures.environment,
        "from": run.source,
    }


def _moment(text: str | None) -> str:
    return text[:16].replace("T", " ") if text else UNKNOWN


def join_runs(patterns: Sequence[str], output: Path | None = None) -> int:
    """Write one report over the runs that patterns match; of one run its own. Returns the exit code, that of the worst.

    Raises as `find_runs`.
    """
    from flows.cli.results.inspect import render_again, report_code
    from reports.runs.join import find_runs, joined_report
    from reports.tables import status_counts

    try:
        found = find_runs(patterns)
    except ValueError as error:
        raise WrongArgument(str(error)) from error
    if len(found.folders) == 1:
        only = found.folders[0]
        if output is not None:
            raise WrongArgument(f"--output: one run alone matches, whose own report is in {only}. Leave it out")
        return render_again(only)
    studies = [load_comparable(RunPaths(folder.absolute())) for folder in found.folders]
    for folder, study in zip(found.folders, studies, strict=True):
        _tell_unreadable(folder, study)
    file = output or Path("joined.md")
    write_output(file, joined_report(studies, found.others))
    for other in found.others:
        print(f"{printable(other)}: not a run folder, skipped")
    print(f"{len(studies)} runs joined")
    print(printable(f"Report     {file}"))
    return max(report_code(study.plan, status_counts(study)) for study in studies)
