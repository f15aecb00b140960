"""Comparison of two runs cell by cell: better, worse, equal or inconclusive.

    comparison = compare(run_figures(study_a, "a"), run_figures(study_b, "b"), threshold=0.05)
    comparison.regressions                          # cells for which a gate should close

Cells are matched by key; one that was measured on another device is in no ratio. Two runs share no block, so ratios are
unpaired; their intervals hold for all ratios of the comparison at once. What shifts a whole run is in the ratio and not
in its interval, unless runs of the same code in the history say how large such shifts are
(`reports.runs.between_runs`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import ceil, exp, log
from statistics import median

import numpy as np

from configs.records.record import Status
from reports.numbers.statistics import CONFIDENCE, LEAST_REPEATS, ROUNDING, Bounds, Ratio, unpaired_ratio
from reports.reading.load import MISSING
from reports.reading.run_figures import FIGURE_KINDS, CellFigures, FigureKind, RunFigures
from reports.runs.between_runs import BetweenRuns
from reports.runs.comparison import CellChange, Change, Comparison, ComparisonVerdict, Difference
from reports.text import joined

DEFAULT_THRESHOLD = 0.05
OF_SINGLE = "of single requests or operations"
"""Figures of kinds of work whose speed is not compared: loads on servers, communication."""
MOST_REPEATS = 10_000
"""Repeats beyond this are not advised: the difference is too near the edge for any number to settle."""


def compare(
    first: RunFigures,
    second: RunFigures,
    threshold: float = DEFAULT_THRESHOLD,
    between: Mapping[str, BetweenRuns] | None = None,
) -> Comparison:
    """Match and judge. Raises ValueError for a threshold outside 0 to 1, or where no cell can be compared."""
    if not 0 < threshold < 1:
        raise ValueError(f"threshold: {threshold:g} is not a share between 0 and 1; 0.05 stands for 5 %")
    matched = [key for key in first.cells if key in second.cells]
    kept = [key for key in matched if not first.cells[key].compared]
    keys = [key for key in matched if first.cells[key].compared]
    if not keys:
        raise ValueError(_nothing_to_compare(first, second, [first.cells[key] for key in kept]))
    apart = {key: why for key in keys if (why := _other_device(first, second, key))}
    comparisons = sum(_ratios(first.cells[key], second.cells[key]) for key in keys if key not in apart)
    between = between or {}
    cells = tuple(
        _cell(first.cells[key], second.cells[key], threshold, max(1, comparisons), between, apart.get(key))
        for key in keys
    )
    return Comparison(
        first=first,
        second=second,
        threshold=threshold,
        comparisons=comparisons,
        cells=cells,
        only_first=tuple(cell for key, cell in first.cells.items() if key not in second.cells),
        only_second=tuple(cell for key, cell in second.cells.items() if key not in first.cells),
        answers_kept=tuple(first.cells[key] for key in kept if first.cells[key].keeps_answers),
        of_single=tuple(first.cells[key] for key in kept if not first.cells[key].keeps_answers),
        differences=changed_environment(first, second, keys),
        rules=_differences(first.rules, second.rules),
        half_width=_half_width(cells),
        between=between,
    )


def judge_change(
    kind: FigureKind, bounds: Bounds | None, value: float, threshold: float
) -> tuple[ComparisonVerdict, bool]:
    """(verdict, whether it is a regression) of second / first with its interval."""
    if bounds is None:
        return ComparisonVerdict.CANNOT_TELL, False
    low, high = bounds
    if low > 1 + ROUNDING or high < 1 - ROUNDING:
        worse = (low > 1) != kind.more_is_better
        beyond = abs(value - 1) > threshold
        return (ComparisonVerdict.WORSE, beyond) if worse else (ComparisonVerdict.BETTER, False)
    inside = 1 - threshold < low and high < 1 + threshold
    return (ComparisonVerdict.SAME if inside else ComparisonVerdict.CANNOT_TELL), False


def repeats_needed(
    ratio: Ratio, bounds: Bounds | None, repeats: int, threshold: float, least: Callable[[int], int] | None = None
) -> int | None:
    """About how many repeats in each run would settle it, if the ratio stays: widths shrink as 1 / sqrt(repeats).

    least: the fewest that give so many ratios an interval; none: those of two runs. The result is None where the noise
    between runs is what is too wide, or no sensible number of repeats would do.
    """
    if ratio.interval is None:
        return (least or repeats_for_interval)(ratio.comparisons)
    if bounds != ratio.interval:
        return None
    middle = abs(log(ratio.value))
    width = max(log(ratio.interval[1]) - log(ratio.value), log(ratio.value) - log(ratio.interval[0]))
    enough = max(middle, log(1 + threshold) - middle)
    needed = ceil(repeats * (width / enough) ** 2)
    return max(needed, repeats + 1) if needed <= MOST_REPEATS else None


@lru_cache(maxsize=64)
def repeats_for_interval(comparisons: int, confidence: float = CONFIDENCE) -> int:
    """The fewest repeats in each of two runs that give so many ratios an interval."""
    count = LEAST_REPEATS
    while (
        ratio := unpaired_ratio([2.0] * count, [1.0] * count, comparisons, confidence)
    ) is None or ratio.interval is None:
        count += 1
    return count


def changed_environment(
    first: RunFigures, second: RunFigures, keys: Sequence[str], others: Sequence[str] | None = None
) -> tuple[Difference, ...]:
    """In what the environments differ that these cells were measured in; what matters most comes first.

    others: the cells of the second run, where they have other keys. Nothing where no cell of a side was measured.
    """
    sides = ((first, keys), (second, keys if others is None else others))
    if not all(any(run.cells[key].completed for key in used) for run, used in sides):
        return ()
    names = {name for run in (first, second) for flat in run.environments.values() for name in flat or ()}
    facts = [run.facts(names, used) for run, used in sides]
    hosts = [{host for key in used for host in run.cells[key].hosts} for run, used in sides]
    for known, found in zip(facts, hosts, strict=True):
        known["hosts"] = found
    if facts[0].get("hostname") == facts[0]["hosts"] and facts[1].get("hostname") == facts[1]["hosts"]:
        names -= {"hostname"}  # one host a run, said by `hosts`
    ordered = sorted({*names, "hosts"}, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return tuple(
        Difference(name, tuple(sorted(facts[0][name])), tuple(sorted(facts[1][name])))
        for name in ordered
        if facts[0][name] != facts[1][name]
    )


FIRST = (
    "device", "hosts", "hostname", "cpu_model", "cores", "memory_bytes", "commit", "dirty", "torch", "python", "kernel"
)  # fmt: skip
"""The facts that explain a difference most often."""


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[Difference, ...]:
    changed = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    texts = [[(side[name],) if name in side else () for name in changed] for side in (first, second)]
    return tuple(Difference(name, *values) for name, *values in zip(changed, *texts, strict=True))


def _nothing_to_compare(first: RunFigures, second: RunFigures, matched: Sequence[CellFigures]) -> str:
    """Why no cell can be compared, with the field that differs where two cells differ in one only.

    matched: the cells that both runs have.
    """
    if any(cell.keeps_answers for cell in matched):
        return "the cells that both runs have keep their answers, which takes time; their speed is not compared"
    if matched:
        return f"the figures of the cells that both runs have are {OF_SINGLE}; they are not compared"
    text = f"{first.name} and {second.name} have no cell in common; cells are matched by key"
    names = {
        tuple(name for name in sorted({*one.fields, *two.fields}) if one.fields.get(name) != two.fields.get(name))
        for one in first.cells.values()
        for two in second.cells.values()
    }
    nearest = min(names, key=lambda fields: (len(fields), fields), default=())
    return f"{text}. The nearest two differ in: {', '.join(nearest)}" if nearest else text


def _ratios(first: CellFigures, second: CellFigures) -> int:
    """How many figures of a cell are judged."""
    return sum(_judged(kind) and bool(first.values(kind.name) and second.values(kind.name)) for kind in FIGURE_KINDS)


def _judged(kind: FigureKind) -> bool:
    return kind.name != "peak_memory_bytes"


def _other_device(first: RunFigures, second: RunFigures, key: str) -> str | None:
    """Why a cell's figures are in no ratio: they are of different devices. None: of one, or it is not known."""
    devices = [sorted(run.facts({"device"}, [key]).get("device", ())) for run in (first, second)]
    if not all(devices) or devices[0] == devices[1]:
        return None
    return f"measured on {joined(devices[0])} in the first, on {joined(devices[1])} in the second: no ratio"


def _cell(
    first: CellFigures,
    second: CellFigures,
    threshold: float,
    comparisons: int,
    between: Mapping[str, BetweenRuns],
    apart: str | None,
) -> CellChange:
    if not (first.completed and second.completed):
        return unmeasured_cell(first, second)
    if apart is not None:
        return CellChange(first, second, ComparisonVerdict.CANNOT_TELL, False, why=apart)
    idle = idle_cell(first, second)
    if idle is not None:
        return idle
    changes = tuple(
        change
        for kind in FIGURE_KINDS
        if (change := _change(kind, first, second, threshold, comparisons, between.get(kind.name))) is not None
    )
    regression = any(change.regression for change in changes)
    main = next((change.verdict for change in changes if change.verdict is not None), None)
    verdict = ComparisonVerdict.WORSE if regression else main or ComparisonVerdict.CANNOT_TELL
    why = "; ".join(text for text in (_lost_repeats(first, second), idle_repeats(first, second)) if text)
    return CellChange(first, second, verdict, regression, changes, why)


def unmeasured_cell(first: CellFigures, second: CellFigures) -> CellChange:
    """A cell without figures in one run or both: newly failing is worse, mended is better."""
    states = [status.replace("_", " ") for status in (first.status, second.status)]
    if first.completed and second.broken:
        return CellChange(first, second, ComparisonVerdict.WORSE, True, why=f"newly fails: {states[1]}")
    if first.broken and second.completed:
        return CellChange(first, second, ComparisonVerdict.BETTER, False, why=f"works again: {states[0]} before")
    said = [
        f"{which}: {'not measured' if state == MISSING else state}" for which, state in zip(SIDES, states, strict=True)
    ]
    why = "no figure in " + " and ".join(text for text in said if not text.endswith(Status.COMPLETED))
    return CellChange(first, second, ComparisonVerdict.CANNOT_TELL, False, why=why)


def idle_cell(first: CellFigures, second: CellFigures) -> CellChange | None:
    """A cell that does no work any more, or does some again: there is no ratio to 0. None: any other."""
    before, after = (cell.estimate("throughput") for cell in (first, second))
    if before is None or after is None or (before.median > 0) == (after.median > 0):
        return None
    if before.median > 0:
        return CellChange(first, second, ComparisonVerdict.WORSE, True, why="throughput fell to 0")
    return CellChange(first, second, ComparisonVerdict.BETTER, False, why="throughput was 0 before")


SIDES = ("the first", "the second")


def _lost_repeats(first: CellFigures, second: CellFigures) -> str:
    """Whether repeats failed in a cell that has figures all the same."""
    lost = [
        f"{cell.failed} of {cell.planned} in {side}"
        for side, cell in zip(SIDES, (first, second), strict=True)
        if cell.failed
    ]
    return f"repeats failed: {' and '.join(lost)}" if lost else ""


def idle_repeats(first: CellFigures, second: CellFigures) -> str:
    """Whether repeats of a cell that does work did none: no ratio has a place for 0, so it is of the others alone."""
    zeros = [
        f"{idle} of {len(values)} in {side}"
        for side, values in zip(SIDES, (cell.values("throughput") for cell in (first, second)), strict=True)
        if (idle := sum(value <= 0 for value in values)) and idle < len(values)
    ]
    return f"repeats with a throughput of 0, which are in no ratio: {' and '.join(zeros)}" if zeros else ""


def _change(
    kind: FigureKind,
    first: CellFigures,
    second: CellFigures,
    threshold: float,
    comparisons: int,
    between: BetweenRuns | None,
) -> Change | None:
    """The change of one figure; None where one of the runs has none."""
    confidence = max(first.confidence, second.confidence)
    ratio = unpaired_ratio(second.values(kind.name), first.values(kind.name), comparisons, confidence)
    before, after = first.estimate(kind.name), second.estimate(kind.name)
    if ratio is None or before is None or after is None:
        return None
    if not _judged(kind):
        return Change(kind, before, after, ratio, bounds=None, verdict=None)
    bounds = _widened(ratio, between)
    verdict, regression = judge_change(kind, bounds, ratio.value, threshold)
    needed = None
    if verdict is ComparisonVerdict.CANNOT_TELL:
        least = partial(repeats_for_interval, confidence=confidence)
        needed = repeats_needed(ratio, bounds, ratio.count, threshold, least)
    return Change(kind, before, after, ratio, bounds, verdict, regression, needed)


def _widened(ratio: Ratio, between: BetweenRuns | None) -> Bounds | None:
    """The interval of the repeats or what two runs of the same code differ by, whichever reaches further."""
    if ratio.interval is None or between is None:
        return ratio.interval
    low, high = ratio.interval
    return min(low, ratio.value / between.margin), max(high, ratio.value * between.margin)


def _half_width(cells: tuple[CellChange, ...]) -> float | None:
    """Median over cells of how far the interval of throughput's ratio reaches from its middle."""
    bounds = [change.bounds for cell in cells if (change := cell.change("throughput")) and change.bounds]
    widths = [exp(float(np.log(high / low)) / 2) - 1 for low, high in bounds]
    return median(widths) if widths else None
