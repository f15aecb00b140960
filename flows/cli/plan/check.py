"""`rankwise plan-check`: predict the rows of a file of measurements and print the prediction errors.

Exit codes: 0 predicted (rows without a prediction have a reason), 2 a file is wrong.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.common.printable import plural
from engine.planner.check.rows import Checked, CheckedRow
from engine.planner.check.table import CheckedFile, Columns, check_files
from engine.planner.choice.descriptions import short
from flows.cli.tables import print_table

PREDICTED, WRONG_FILE = 0, 2
_SUPPORTS = 8


def plan_check(
    predict: Path, fit: Path | None, as_json: bool, column: Sequence[str] = (), value: Sequence[str] = ()
) -> int:
    """Predict the rows of a file, print them beside the measured values, and return the exit code.

    column: `NAME=COLUMN`, how the files call one of ours; value: `NAME=VALUE`, a column that they lack.
    """
    try:
        found = check_files(predict, fit, Columns.parsed(column, value) if column or value else None)
    except ValueError as error:
        print(error, file=sys.stderr)
        return WRONG_FILE
    if found.ignored:
        print(f"{predict}: unknown columns ignored: {', '.join(found.ignored)}", file=sys.stderr)
    for note in found.notes:
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(checked_json(found.result), indent=1))
        return PREDICTED
    title = f"{found.kind.title}: {found.kind.measured[0]}, predicted from constants" + (
        f" and the rows of {fit}" if fit else ""
    )
    print(title)
    print_table(_header(found), _cells(found), words=sum(name not in found.kind.numbers for name in found.kind.shown))
    for line in _summary(found):
        print(line)
    return PREDICTED


def checked_json(result: Checked) -> dict[str, Any]:
    """Return rows and errors as plain data, with a `reason` for rows without a prediction."""
    inside, intervals = result.held
    return {
        "rows": [_row_json(row) for row in result.rows],
        "median_error": result.percentile(50),
        "p90_error": result.percentile(90),
        "worst_error": result.percentile(100),
        "interval_coverage": inside / intervals if intervals else None,
    }


def _row_json(row: CheckedRow) -> dict[str, Any]:
    data: dict[str, Any] = {"predicted": row.predicted, "measured": row.measured, "error": row.error}
    data["interval"] = None if row.interval is None else list(row.interval)
    told = {"support": row.support, "reason": row.reason, "in_sample": row.in_sample}
    return data | {name: value for name, value in told.items() if value}


def _header(found: CheckedFile) -> list[str]:
    return [*found.kind.shown, "predicted", "90 % interval", "measured", "error"]


def _cells(found: CheckedFile) -> list[list[str]]:
    lines = []
    for row, checked in zip(found.rows, found.result.rows, strict=True):
        predicted = "-" if checked.predicted is None else short(checked.predicted)
        error = "-" if checked.error is None else f"{checked.error * 100:.1f} %"
        measured = "-" if checked.measured is None else _number(checked.measured)
        interval = "-" if checked.interval is None else " to ".join(map(short, checked.interval))
        shown = (row.get(name) or "-" for name in found.kind.shown)
        lines.append([*shown, predicted, interval, measured, error])
    return lines


def _summary(found: CheckedFile) -> list[str]:
    result = found.result
    lines = [f"row {at}: {row.reason}" for at, row in enumerate(result.rows, 1) if row.reason]
    unpredicted, held = sum(row.predicted is None for row in result.rows), len(result.errors)
    lines.append(
        f"{plural(len(result.rows), 'row')}, {unpredicted} without a prediction, {held} compared with a measurement"
    )
    if held:
        middle, high, worst = (result.percentile(percent) or 0.0 for percent in (50, 90, 100))
        lines.append(
            f"error: median {middle * 100:.1f} %, 90th percentile {high * 100:.1f} %, worst {worst * 100:.1f} %"
        )
    inside, intervals = result.held
    if intervals:
        lines.append(f"90 % intervals: {inside} of {intervals} measured values inside")
    supports = Counter(row.support for row in result.rows if row.support)
    lines += [f"{plural(count, 'row')} predicted from {words}" for words, count in supports.most_common(_SUPPORTS)]
    others = sum(count for _, count in supports.most_common()[_SUPPORTS:])
    if others:
        lines.append(
            f"{plural(others, 'row')} predicted from {plural(len(supports) - _SUPPORTS, 'other set')} of "
            "measured points"
        )
    in_sample = sum(row.in_sample for row in result.rows)
    if in_sample:
        lines.append(
            f"rows that are themselves among those measured points: {in_sample}. Their errors are in-sample and say "
            "nothing of other models or devices (docs/measurements/planner.md has the errors of left-out rows)"
        )
    if found.in_fit:
        lines.append(f"{found.in_fit} of the rows are also in the fit file, so their errors are in-sample")
    return lines


def _number(value: float) -> str:
    """Format with four significant digits; measured integers with all of theirs."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
