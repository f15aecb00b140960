"""Whether a scheduled sweep is slower than those before it.

    found = regressions_since_last(runs=Path("runs"), run=Path("runs/2026-11-24T02-00-00Z/quickstart"))

Those before are earlier folders of the same study below a scheduled time. Each cell is compared with the newest of them
that measured it, as `rankwise compare` does: those are named whose interval is worse by more than its threshold.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from configs.plans.paths import RunPaths
from reports.reading.devices import load_comparable
from reports.reading.run_figures import CellFigures, RunFigures, run_figures
from reports.runs.compare import compare
from reports.runs.comparison import CellChange

_MOST_SWEEPS = 30
"""So far back a cell is looked for: reading a sweep takes a second or more."""


def regressions_since_last(runs: Path, run: Path) -> list[str]:
    """A sentence on each cell that became worse; none where there is no run before, or nothing to compare.

    A sweep in which a cell was not measured is passed over for it: what became slower while sweeps failed would else be
    compared with nothing. runs: folder of the scheduled times. run: the run folder of this sweep. Raises ValueError,
    OSError for folders that cannot be read, and ValueError where the sweep before has no cell of this one.
    """
    now = _figures(run)
    waiting = {key: cell for key, cell in now.cells.items() if cell.compared and (cell.completed or cell.broken)}
    found: list[str] = []
    for number, before in enumerate(sweeps_before(runs, run)):
        if not waiting or number == _MOST_SWEEPS:
            break
        earlier = _figures(before)
        known = {key: cell for key, cell in earlier.cells.items() if key in waiting and _answers(cell, waiting[key])}
        if known or (number == 0 and not earlier.cells.keys() & waiting.keys()):
            told = compare(replace(earlier, cells=known or earlier.cells), now).regressions
            found += [f"{_sentence(cell)} (before: {before})" for cell in told]
        waiting = {key: cell for key, cell in waiting.items() if key not in known}
    return found


def sweeps_before(runs: Path, run: Path) -> Iterator[Path]:
    """Yield the run folders of earlier scheduled times that have a report, the newest first."""
    earlier = sorted(time.name for time in runs.glob("????-??-??T??-??-??Z") if time.name < run.parent.name)
    for time in reversed(earlier):
        folder = runs / time / run.name
        if RunPaths(folder).report.is_file():
            yield folder


def _answers(earlier: CellFigures, now: CellFigures) -> bool:
    """Whether an earlier sweep says of a cell whether it became worse: it was measured, or failed as it does now."""
    return earlier.completed or (earlier.broken and now.broken)


def _figures(folder: Path) -> RunFigures:
    return run_figures(load_comparable(RunPaths(folder)), str(folder))


def _sentence(cell: CellChange) -> str:
    worse = [change for change in cell.changes if change.regression]
    told = ", ".join(f"{change.kind.title} {change.ratio.value:.2f} times" for change in worse) or cell.why
    return f"{cell.second.title}: {told}"
