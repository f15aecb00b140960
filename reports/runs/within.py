"""Comparison of the variants of one experiment with its baseline, measured interleaved in one run: a performance gate.

    comparison = compare_within(study, "runs/gate", "gate", threshold=0.05)
    comparison.regressions

Throughput counts all that happened, what other processes did to a step included. `undisturbed` judges the fastest tenth
of each repeat's steps instead: other processes only ever make a step longer, so these show the code itself, on a busy
machine too (J. Chen, J. Revels, Robust benchmarking in noisy environments, arXiv 1608.04295). What slows down fewer
than nine steps in ten by itself (a checkpoint, an evaluation) is not seen then.

Variant and baseline share their blocks, so ratios are paired and what shifts a whole block cancels, unlike between two
runs (`reports.runs.compare`), whose verdicts and forms are used.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from configs.common.base import WrongArgument
from configs.common.printable import plural
from configs.records.rates import MeasurementSamples
from reports.numbers.statistics import min_repeats, paired_ratio
from reports.reading.load import CellResult, StudyResult
from reports.reading.run_figures import FIGURE_KINDS, CellFigures, RunFigures, run_figures
from reports.runs.compare import (
    changed_environment,
    idle_cell,
    idle_repeats,
    judge_change,
    repeats_needed,
    unmeasured_cell,
)
from reports.runs.comparison import CellChange, Change, Comparison, ComparisonVerdict

_FAST = 0.1
_MIN_STEPS = 20


def compare_within(
    study: StudyResult, name: str, experiment: str, threshold: float, undisturbed: bool = False
) -> Comparison:
    """Judge each variant of an `optimization` or `sweep` experiment. Raises WrongArgument naming what is there.

    undisturbed: judge the throughput of the fastest tenth of the steps. Raises ValueError where there are too few.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"threshold: {threshold:g} is not a share between 0 and 1; 0.05 stands for 5 %")
    fitting = [each for each in study.plan.experiments if each.kind in ("optimization", "sweep")]
    found = [each for each in fitting if each.name == experiment]
    if not found:
        known = ", ".join(dict.fromkeys(each.name for each in fitting)) or "none"
        raise WrongArgument(
            f"--within: no experiment {experiment} of kind optimization or sweep in this run; it has: {known}"
        )
    figures = run_figures(study, name)
    if undisturbed:
        used = {point.cell for each in found for point in each.points}
        fast = {key: _undisturbed(study, study.cells[key], figures.cells[key]) for key in used}
        figures = replace(figures, cells={**figures.cells, **fast})
    pairs = []
    several = len({each.model for each in found}) > 1
    for each in found:
        if not each.points:
            continue  # all of them are unsupported
        base = next((point for point in each.points if point.baseline), None)
        if base is None:
            continue  # its part of another device
        for point in each.points:
            if point.cell != base.cell:
                title = f"{each.model}, {point.label}" if several else point.label
                pairs.append((_titled(figures, base.cell, title), _titled(figures, point.cell, title)))
    if not pairs:
        raise ValueError(f"--within: experiment {experiment} of this run has no point beside its baseline to compare")
    cells = tuple(_judged(first, second, threshold, len(pairs)) for first, second in pairs)
    return Comparison(
        first=replace(figures, name=f"{name}: baseline of {experiment}"),
        second=replace(figures, name=f"{name}: variants of {experiment}"),
        threshold=threshold,
        comparisons=len(pairs),
        cells=cells,
        only_first=(),
        only_second=(),
        answers_kept=(),
        differences=changed_environment(
            figures, figures, [first.key for first, _ in pairs], [second.key for _, second in pairs]
        ),
        rules=(),
        half_width=None,
        between={},
        paired=True,
    )


def _titled(run: RunFigures, key: str, label: str) -> CellFigures:
    return replace(run.cells[key], title=label)


def _undisturbed(study: StudyResult, result: CellResult, cell: CellFigures) -> CellFigures:
    """The cell with the throughput that it had if all steps were as the fastest tenth, by repeat."""
    throughput = FIGURE_KINDS[0].name
    found = {}
    for repeat, value in cell.figures.get(throughput, {}).items():
        column, reading = result.kind.series, result.completed[repeat]
        samples = study.samples(reading, (column,)) if column else {}
        count = min((len(steps) for steps in samples.values() if len(steps)), default=0)
        if count < _MIN_STEPS:
            raise ValueError(
                f"--undisturbed: {cell.title}: got {plural(count, 'step')} a repeat, expected at least {_MIN_STEPS}"
            )
        # Of the steps that the throughput is of: the mean of all would count a start-up as speed.
        measured = MeasurementSamples(result.cell, samples)
        steps = measured.without_first(reading.steady.first if reading.steady else 0).walls
        fastest = float(np.quantile(steps, _FAST))
        if fastest <= 0:
            raise ValueError(
                f"--undisturbed: {cell.title}: the fastest tenth of the steps took 0 s. Compare without it"
            )
        found[repeat] = value * float(steps.mean()) / fastest
    return replace(cell, figures={**cell.figures, throughput: found}, unit=f"{cell.unit} undisturbed")


def _judged(first: CellFigures, second: CellFigures, threshold: float, comparisons: int) -> CellChange:
    if not (first.completed and second.completed):
        return unmeasured_cell(first, second)
    idle = idle_cell(first, second)
    if idle is not None:
        return idle
    change = _change(first, second, threshold, comparisons)
    if change is None or change.verdict is None:
        why = "no block has a figure of both"
        return CellChange(first, second, ComparisonVerdict.CANNOT_TELL, False, why=why)
    return CellChange(first, second, change.verdict, change.regression, (change,), idle_repeats(first, second))


def _change(first: CellFigures, second: CellFigures, threshold: float, comparisons: int) -> Change | None:
    """Throughput, paired by block: one figure, so that a gate has one chance to be wrong."""
    kind = FIGURE_KINDS[0]
    values: Sequence[dict[int, float]] = [dict(cell.figures.get(kind.name, {})) for cell in (second, first)]
    confidence = max(first.confidence, second.confidence)
    ratio = paired_ratio(values[0], values[1], comparisons, confidence)
    before, after = first.estimate(kind.name), second.estimate(kind.name)
    if ratio is None or before is None or after is None:
        return None
    verdict, regression = judge_change(kind, ratio.interval, ratio.value, threshold)
    needed = None
    if verdict is ComparisonVerdict.CANNOT_TELL:
        least = partial(min_repeats, confidence=confidence)
        needed = repeats_needed(ratio, ratio.interval, ratio.count, threshold, least)
    return Change(kind, before, after, ratio, ratio.interval, verdict, regression, needed)
