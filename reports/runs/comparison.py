"""What a comparison of two runs says: of each figure, of each cell, and of all."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from reports.numbers.statistics import Bounds, Estimate, Ratio
from reports.reading.run_figures import OTHERS_SHARE, CellFigures, FigureKind, RunFigures
from reports.runs.between_runs import BetweenRuns


class ComparisonVerdict(StrEnum):
    """What the repeats say of the second run against the first."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Change:
    """One figure of one cell. `ratio` is second / first; `bounds` its interval, widened by the noise between runs.

    `verdict` is None where the figure has one value a run (peak memory), which no interval can judge.
    `repeats_needed`: about so many in each run would settle a "cannot tell", or give it the interval that it has not;
    None where none is known to.
    """

    kind: FigureKind
    first: Estimate
    second: Estimate
    ratio: Ratio
    bounds: Bounds | None
    verdict: ComparisonVerdict | None
    regression: bool = False
    repeats_needed: int | None = None


@dataclass(frozen=True)
class CellChange:
    """One cell that both runs planned."""

    first: CellFigures
    second: CellFigures
    verdict: ComparisonVerdict
    regression: bool
    changes: tuple[Change, ...] = ()
    why: str = ""

    @property
    def key(self) -> str:
        """Of what is judged: within one run a variant's key, not its baseline's; two runs have one key."""
        return self.second.key

    def change(self, figure: str) -> Change | None:
        """The change of one figure, where both runs have it."""
        return next((change for change in self.changes if change.kind.name == figure), None)


@dataclass(frozen=True)
class Difference:
    """A fact in which the runs differ: the values seen in each, empty where it was not there."""

    what: str
    first: tuple[str, ...]
    second: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that is said of two runs. `half_width` is the typical one of throughput's intervals, as a share.

    `answers_kept`: cells of both that are not compared because they keep answers; `of_single`: because of their kind.
    """

    first: RunFigures
    second: RunFigures
    threshold: float
    comparisons: int
    cells: tuple[CellChange, ...]
    only_first: tuple[CellFigures, ...]
    only_second: tuple[CellFigures, ...]
    answers_kept: tuple[CellFigures, ...]
    differences: tuple[Difference, ...]
    rules: tuple[Difference, ...]
    half_width: float | None
    between: Mapping[str, BetweenRuns]
    of_single: tuple[CellFigures, ...] = ()
    paired: bool = False
    """Whether both were measured in the same blocks of one run (`reports.runs.within`)."""

    @property
    def regressions(self) -> tuple[CellChange, ...]:
        """Worse by more than the threshold, or newly failing."""
        return tuple(cell for cell in self.cells if cell.regression)

    def count(self, verdict: ComparisonVerdict) -> int:
        """Cells of a verdict."""
        return sum(cell.verdict is verdict for cell in self.cells)

    def matched(self, run: RunFigures) -> list[CellFigures]:
        """The cells of one of the runs that are compared, each once: variants of one run share their baseline."""
        keys = dict.fromkeys(cell.first.key if run is self.first else cell.second.key for cell in self.cells)
        return [run.cells[key] for key in keys]

    def busy(self, run: RunFigures) -> dict[str, float]:
        """The largest share of CPU that others took during each matched cell of a run, by title."""
        shares = {cell.title: cell.values(OTHERS_SHARE) for cell in self.matched(run)}
        return {title: max(values) for title, values in shares.items() if values}
