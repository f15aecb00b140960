"""Whether a scheduled sweep is slower than the one before it.

    found = regressions_since_last(runs=Path("runs"), run=Path("runs/2026-11-24T02-00-00Z/quickstart"))

The run before is the newest earlier folder of the same study below a scheduled time. Cells are compared as `rankwise
compare` does: those are named whose interval is worse by more than its threshold.
"""

from pathlib import Path

from configs.plans.paths import RunPaths
from reports.reading.devices import load_comparable
from reports.reading.run_figures import RunFigures, run_figures
from reports.runs.compare import CellChange, compare


def regressions_since_last(runs: Path, run: Path) -> list[str]:
    """A sentence on each cell that became worse; none where there is no run before, or nothing to compare.

    runs: folder of the scheduled times. run: the run folder of this sweep. Raises ValueError, OSError for folders that
    cannot be read.
    """
    before = last_before(runs, run)
    if before is None:
        return []
    found = compare(_figures(before), _figures(run))
    return [f"{_sentence(cell)} (before: {before})" for cell in found.cells if cell.regression]


def last_before(runs: Path, run: Path) -> Path | None:
    """The run folder of the newest earlier scheduled time that has a report."""
    earlier = sorted(time.name for time in runs.glob("????-??-??T??-??-??Z") if time.name < run.parent.name)
    folders = (runs / time / run.name for time in reversed(earlier))
    return next((folder for folder in folders if RunPaths(folder).report.is_file()), None)


def _figures(folder: Path) -> RunFigures:
    return run_figures(load_comparable(RunPaths(folder)), str(folder))


def _sentence(cell: CellChange) -> str:
    worse = [change for change in cell.changes if change.regression]
    told = ", ".join(f"{change.kind.title} {change.ratio.value:.2f} times" for change in worse) or cell.why
    return f"{cell.second.title}: {told}"
