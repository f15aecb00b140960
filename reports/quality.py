"""Data quality of a study: noise of the machine, drift, and stopping reasons of the repeats.

    lines = quality_lines(study)         # sentences for the report, plain text
    table = stopped_table(study)         # cells whose interval did not come within the target

Noise is an A/A comparison that costs nothing: repeats of a cell are launches of the same thing, so what
two that follow each other differ by is what the machine does by itself.
"""

from collections import Counter, defaultdict
from datetime import datetime

from reports.numbers.drift import drift, noise
from reports.numbers.statistics import LEAST_REPEATS, min_repeats
from reports.numbers.stopping import is_narrow, schedule
from reports.reading.load import CellResult, StudyResult
from reports.tables import first_rows
from reports.text import Table, code, escaped, estimate_cell, number, percent, plural

_ROWS = 50
_HOUR_SECONDS = 3600.0


def quality_lines(study: StudyResult) -> list[str]:
    """Noise, drift, pauses and stopping, a sentence or two each."""
    cells = [result for result in study.cells.values() if result.compared]
    series = [values for result in cells if len(values := result.values("throughput")) > 1]
    return [*_noise_lines(series), *_drift_lines(series), *_apart_lines(study, cells), *_stopping_lines(study, cells)]


def _noise_lines(series: list[dict[int, float]]) -> list[str]:
    found = noise(series)
    if found is None:
        return ["Noise of the machine (A/A) is not known: no cell has two repeats that follow each other."]
    repeats = max(len(values) for values in series)
    text = (
        f"Noise of the machine (A/A): throughput of the same cell in two launches that follow each other differs by "
        f"{percent(found.typical, 2)} (median of {plural(found.pairs, 'pair')})."
    )
    smallest = found.smallest_change(repeats)
    if smallest is None:
        return [f"{text} {plural(repeats, 'repeat')} give no interval; {LEAST_REPEATS} do."]
    return [
        f"{text} A true difference of {percent(smallest, 2)} or more between two cells would show in 95 % of "
        f"comparisons with {plural(repeats, 'repeat')} each; a smaller one may go unnoticed."
    ]


def _drift_lines(series: list[dict[int, float]]) -> list[str]:
    found = drift(series)
    if found is None:
        return []
    if found.interval is None:
        return [
            f"Whether the machine drifted over the study cannot be told from {plural(found.blocks, 'block')}; "
            f"it takes {LEAST_REPEATS}."
        ]
    low, high = found.interval
    change = f"{percent(found.change, 2)} ({percent(low, 2)} to {percent(high, 2)}, 95 % interval)"
    over = f"from the first to the last of {plural(found.blocks, 'block')}"
    if found.drifts:
        return [
            f"The machine drifted: throughput changed by {change} {over}. Ratios are taken within blocks, where it "
            "cancels; absolute figures are medians over the drift."
        ]
    return [f"No significant drift: throughput changed by {change} {over}."]


def _apart_lines(study: StudyResult, cells: list[CellResult]) -> list[str]:
    """Say where pairs of a block are not near each other in time, as those of cells that a later run has added."""
    pauses = _pauses(study)
    began: dict[int, list[float]] = defaultdict(list)
    for result in cells:
        for repeat, reading in result.completed.items():
            if reading.record.started_at is not None:
                began[repeat].append(_seconds(reading.record.started_at))
    blocks = [times for times in began.values() if len(times) > 1]
    split = [
        max(spans)
        for times in blocks
        if (spans := [after - before for before, after in pauses if min(times) < after <= max(times)])
    ]
    if not split:
        return []
    return [
        f"In {len(split)} of {plural(len(blocks), 'block')} nothing was measured for up to "
        f"{number(max(split) / _HOUR_SECONDS, 2)} hours between one cell and another, as where a later run adds cells. "
        "A ratio over such pairs has in it what changed on the machine meanwhile, and its interval does not show that."
    ]


def _pauses(study: StudyResult) -> list[tuple[float, float]]:
    """When nothing of the study was measured for more than an hour: from and until, in seconds since 1970."""
    records = [reading.record for reading in study.readings]
    times = sorted(
        (_seconds(each.started_at), _seconds(each.finished_at))
        for each in records
        if each.started_at and each.finished_at
    )
    found, until = list[tuple[float, float]](), None
    for began, ended in times:
        if until is not None and began - until > _HOUR_SECONDS:
            found.append((until, began))
        until = ended if until is None else max(until, ended)
    return found


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _stopping_lines(study: StudyResult, cells: list[CellResult]) -> list[str]:
    rules = study.plan.measuring
    if rules.target_interval is None:
        few = sorted({len(result.completed) for result in cells if 0 < len(result.completed) < LEAST_REPEATS})
        if not few:
            return []
        return [
            f"Cells with fewer than {LEAST_REPEATS} repeats have a range [in brackets], which is no interval of "
            f"confidence: {LEAST_REPEATS} are the fewest that hold one. To compare ten cells in one table takes "
            f"{min_repeats(10)}."
        ]
    ended = Counter(study.plan.stopped.values())
    listed = ", ".join(f"{reason}: {plural(count, 'cell')}" for reason, count in ended.items()) or "nothing yet"
    looks = list(schedule(rules))
    least, most = looks[0][0], looks[-1][0]
    return [
        f"Each cell was repeated until the 95 % interval of its median throughput reached at most "
        f"{percent(rules.target_interval)} to either side, at least {least} and at most {most} "
        f"times. What ended them: {listed}. The intervals are widened for having been looked at on the way."
    ]


def stopped_table(study: StudyResult) -> Table | None:
    """Cells that ended without their target, with what ended them."""
    target = study.plan.measuring.target_interval
    if target is None:
        return None
    rows = []
    for key, ended in study.plan.stopped.items():
        result = study.cells[key]
        found = result.estimate("throughput")
        if ended == "target reached" or is_narrow(found, target):
            continue
        reached = None
        if found is not None and found.interval is not None and found.median > 0:
            reached = (found.interval[1] - found.interval[0]) / 2 / found.median
        rows.append(
            (
                code(key),
                escaped(result.title),
                ended,
                f"{len(result.completed)}",
                f"{estimate_cell(found)} {result.unit}" if found else number(None),
                percent(reached, 2),
            )
        )
    columns = (
        "key",
        "cell",
        "ended by",
        "repeats",
        "throughput, median (interval)",
        "half the interval over the median",
    )
    return first_rows(Table(columns, tuple(rows), text_columns=3), max_rows=_ROWS) if rows else None
