"""Rows of a file with measured figures, predictions of them, and the table of errors.

A checker of one kind of file is a function `predict(rows, fit) -> list[RowPrediction]`; it may read the measured
column of `fit`, never that of `rows`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Row = dict[str, str]


@dataclass(frozen=True)
class RowPrediction:
    """One row's predicted figure in the unit of its measured column, or the reason why there is none."""

    predicted: float | None
    reason: str | None = None


@dataclass(frozen=True)
class CheckedRow:
    """A prediction beside what was measured; `error` = |predicted - measured| / measured."""

    predicted: float | None
    measured: float | None
    error: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Checked:
    """All rows of a file, and the errors of those that were predicted and measured."""

    rows: tuple[CheckedRow, ...]

    @property
    def errors(self) -> list[float]:
        """Relative errors, of rows that have one."""
        return [row.error for row in self.rows if row.error is not None]

    def percentile(self, percent: float) -> float | None:
        """Percentile of the errors, linear between neighbours; None without errors."""
        return float(np.percentile(self.errors, percent)) if self.errors else None


def checked(rows: Sequence[Row], predictions: Sequence[RowPrediction], column: str) -> Checked:
    """Hold predictions against `column` of the rows; it may be absent or empty."""
    found = []
    for row, prediction in zip(rows, predictions, strict=True):
        text = row.get(column) or ""
        measured = float(text) if text.strip() else None
        error = None
        if measured and prediction.predicted is not None:
            error = abs(prediction.predicted - measured) / measured
        found.append(CheckedRow(prediction.predicted, measured, error, prediction.reason))
    return Checked(tuple(found))
