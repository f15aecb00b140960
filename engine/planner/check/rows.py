"""Rows of a measurement file, their predictions, and the table of errors.

The checker for a file kind is a function `predict(rows, fit) -> list[RowPrediction]`; it may read the measured column
of `fit`, never that of `rows`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from engine.planner.architecture import Architecture

PublishedRow = dict[str, str]
Described = TypeVar("Described")
_MOST, _MOST_RANKS = 10**9, 65_536
_RANKS = ("num_gpus", "num_devices")
"""Columns that count ranks, of which a layout has no more than that."""


@dataclass(frozen=True)
class RowPrediction:
    """Predicted figure of one row in the unit of its measured column, or the reason why there is none."""

    predicted: float | None
    reason: str | None = None
    interval: tuple[float, float] | None = None  # holds 90 % of measurements
    support: str | None = None  # the measured rows that the prediction stands on
    in_sample: bool = False  # the row itself is one of them


@dataclass(frozen=True)
class CheckedRow:
    """Prediction and measurement of a row; `error` = |predicted - measured| / measured."""

    predicted: float | None
    measured: float | None
    error: float | None
    reason: str | None = None
    interval: tuple[float, float] | None = None
    support: str | None = None
    in_sample: bool = False


@dataclass(frozen=True)
class Checked:
    """All rows of a file, and the errors of rows both predicted and measured."""

    rows: tuple[CheckedRow, ...]

    @property
    def errors(self) -> list[float]:
        """Relative errors of the rows that have one."""
        return [row.error for row in self.rows if row.error is not None]

    @property
    def held(self) -> tuple[int, int]:
        """How many measured rows lie within their interval, and how many have one."""
        both = [row for row in self.rows if row.interval is not None and row.measured is not None]
        inside = sum(low <= (row.measured or 0.0) <= high for row in both for low, high in [row.interval or (0.0, 0.0)])
        return inside, len(both)

    def percentile(self, percent: float) -> float | None:
        """Percentile of the errors, linear between neighbours; None without errors."""
        return float(np.percentile(self.errors, percent)) if self.errors else None


def positive_integer(row: PublishedRow, column: str) -> int:
    """From 1 to 10^9, of ranks to 65,536; `8.0` is one too. Raises ValueError that names the column."""
    text = (row.get(column) or "").strip()
    if not text:
        raise ValueError(f"{column}: missing or empty")
    number = _number(text)
    if number is None or number < 1 or number != int(number):
        raise ValueError(f"{column}: {text!r} is not a whole number of at least 1")
    most = _MOST_RANKS if column in _RANKS else _MOST
    if number > most:
        raise ValueError(f"{column}: got {text}, expected at most {most:,}")
    return int(number)


def measured_figure(row: PublishedRow, column: str) -> float | None:
    """What was measured; None where nothing is written, or anything but a number over 0 (`OOM`)."""
    number = _number(row.get(column) or "")
    return number if number is not None and number > 0 else None


def known_rows(
    rows: Sequence[PublishedRow], column: str, setup_of: Callable[[PublishedRow], Described]
) -> tuple[list[Described], list[float]]:
    """Return what was measured in rows that are understood, and their figures of a column."""
    known, measured = [], []
    for row in rows:
        figure = measured_figure(row, column)
        try:
            setup = setup_of(row)
        except ValueError:
            continue
        if figure is not None:
            known.append(setup)
            measured.append(figure)
    return known, measured


def split_parts(architecture: Architecture) -> str:
    """Name what tensor-parallel ranks share."""
    return (
        f"{architecture.heads} heads, {architecture.kv_heads} of keys and values and a feed-forward of "
        f"{architecture.feed_forward}"
    )


def factor_interval(predicted: float, factor: float) -> tuple[float, float]:
    """Return an interval of a factor either way."""
    return predicted / factor, predicted * factor


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def checked(rows: Sequence[PublishedRow], predictions: Sequence[RowPrediction], column: str) -> Checked:
    """Hold predictions against `column` of the rows; it may be absent, empty or no number."""
    found = []
    for row, prediction in zip(rows, predictions, strict=True):
        measured = measured_figure(row, column)
        error = None
        if measured is not None and prediction.predicted is not None:
            error = abs(prediction.predicted - measured) / measured
        found.append(
            CheckedRow(
                prediction.predicted,
                measured,
                error,
                prediction.reason,
                prediction.interval,
                prediction.support,
                prediction.in_sample,
            )
        )
    return Checked(tuple(found))
