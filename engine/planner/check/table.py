"""Read files of measured rows, identify them by their columns, predict the rows and compare with the measurements.

    checked = check_files(Path("B.csv"), Path("A.csv"))     # predicts B's rows from constants and A's rows
    checked.kind.title, checked.result.percentile(50)
    check_files(path, None, Columns({"model": "Name"}, {"framework": "vllm"}))     # a file with columns of its own

Of B's rows only the columns that describe a run reach the predictor, so that no measurement can be read; A's
measurements are read. An invalid cell
affects its row only: a row of B gets a reason instead of a prediction, or has no measurement to compare with; a row of
A is left out. `notes` lists them. A file with the wrong columns raises ValueError naming the file and the expected
columns.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.common.files.reading import read_text
from engine.planner.check.kinds import KINDS, FileKind
from engine.planner.check.rows import Checked, PublishedRow, RowPrediction, checked, measured_figure, positive_integer


@dataclass(frozen=True)
class CheckedFile:
    """Rows of a file without their measured columns, and predictions compared with the measurements."""

    kind: FileKind
    rows: tuple[PublishedRow, ...]
    result: Checked
    ignored: tuple[str, ...]  # unknown columns
    in_fit: int  # rows that the fit file contains too
    notes: tuple[str, ...]  # invalid cells


@dataclass(frozen=True)
class Columns:
    """How a file's columns are called, and those that it lacks. names: ours -> the file's; values: ours -> a value."""

    names: Mapping[str, str]
    values: Mapping[str, str]

    @classmethod
    def parsed(cls, names: Sequence[str], values: Sequence[str]) -> "Columns":
        """Read `model=Name` and `framework=vllm`. Raises ValueError for anything else, or a column that is unknown."""
        known = {name for kind in KINDS for name in kind.columns}
        found: list[dict[str, str]] = []
        for option, entries in (("--column", names), ("--value", values)):
            pairs = {}
            for entry in entries:
                ours, equals, theirs = entry.partition("=")
                if not equals or not theirs.strip() or ours.strip() not in known:
                    raise ValueError(
                        f"{option}: expected NAME={'COLUMN' if option == '--column' else 'VALUE'} with one of "
                        f"{', '.join(sorted(known))} as NAME, got {entry!r}"
                    )
                pairs[ours.strip()] = theirs.strip()
            found.append(pairs)
        return cls(*found)


def check_files(predict: Path, fit: Path | None = None, columns: Columns | None = None) -> CheckedFile:
    """Predict every row of one file from constants and, where it is given, the rows of another of the same kind."""
    rows, kind, ignored = read_published_rows(predict, columns)
    fit_rows: list[PublishedRow] = []
    if fit is not None:
        fit_rows, fit_kind, _ = read_published_rows(fit, columns)
        if fit_kind is not kind:
            raise ValueError(f"{fit}: rows of {fit_kind.title}, but {predict} has rows of {kind.title}; give one kind")
        if kind.measured[0] not in fit_rows[0]:
            raise ValueError(f"{fit}: no column {kind.measured[0]}; a file to fit on needs it")
    blind = [_described(row, kind) for row in rows]
    readable, notes = _readable(fit, fit_rows, kind)
    return CheckedFile(
        kind,
        tuple(blind),
        checked(rows, _predictions(kind, blind, readable), kind.measured[0]),
        ignored,
        _in_both(blind, readable, kind),
        (*_unmeasured(predict, rows, kind), *notes),
    )


def read_published_rows(
    path: Path, columns: Columns | None = None
) -> tuple[list[PublishedRow], FileKind, tuple[str, ...]]:
    """A CSV file's rows, their kind, and the names of columns that are not known."""
    try:
        reader = csv.reader(read_text(path).splitlines(keepends=True), strict=True)
        lines = [line for line in reader if any(cell.strip() for cell in line)]
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or f'not a CSV file ({error})'}") from error
    if len(lines) < 2:
        raise ValueError(f"{path}: {'no rows after the header' if lines else 'empty'}; {_known_kinds()}")
    header, added = _renamed(path, [name.strip() for name in lines[0]], columns)
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: column {twice[0]} is there twice")
    kind = _kind_of(path, [*header, *added])
    rows = []
    for count, line in enumerate(lines[1:], 1):
        if len(line) != len(header):
            raise ValueError(f"{path}: row {count} has {len(line)} fields, the header {len(header)}")
        rows.append(dict(zip(header, (cell.strip() for cell in line), strict=True)) | added)
    ignored = tuple(name for name in header if name not in kind.columns)
    return [kind.completed(row) for row in rows], kind, ignored


def _renamed(path: Path, header: list[str], columns: Columns | None) -> tuple[list[str], dict[str, str]]:
    """Return our names of the columns, and the values of those that the file lacks."""
    if columns is None:
        return header, {}
    ours = {theirs: name for name, theirs in columns.names.items()}
    missing = [theirs for theirs in ours if theirs not in header]
    if missing:
        raise ValueError(
            f"{path}: --column {ours[missing[0]]}={missing[0]}: no such column; it has {', '.join(header)}"
        )
    # A column that keeps a name which a mapped column takes is not ours.
    renamed = [ours.get(name, f"{name} (file)" if name in columns.names else name) for name in header]
    return renamed, {name: value for name, value in columns.values.items() if name not in renamed}


def _kind_of(path: Path, header: Sequence[str]) -> FileKind:
    """Return the kind with the most of its own columns; of equals, the first that lacks no column."""
    counts = [len(kind.telling & set(header)) for kind in KINDS]
    best = [kind for kind, count in zip(KINDS, counts, strict=True) if count == max(counts)]
    whole = [kind for kind in best if all(name in header for name in kind.required)]
    if max(counts) == 0 or (len(best) > 1 and not whole):
        unknown = [name for name in header if not any(name in kind.columns for kind in KINDS)]
        said = f"columns {', '.join(unknown)} are not known" if unknown else f"columns {', '.join(header)} fit no kind"
        raise ValueError(
            f"{path}: {said}; {_known_kinds()}. Name them with --column NAME=COLUMN and --value NAME=VALUE"
        )
    kind = (whole or best)[0]
    missing = [name for name in kind.required if name not in header]
    if missing:
        raise ValueError(
            f"{path}: column {missing[0]} is missing; rows of {kind.title} need {', '.join(kind.required)}. Name it "
            f"with --column {missing[0]}=COLUMN, or give --value {missing[0]}=VALUE"
        )
    return kind


def _known_kinds() -> str:
    listed = "; ".join(f"{kind.title}: {', '.join(kind.required)}" for kind in KINDS)
    return f"known kinds of file and the columns that they need: {listed}"


def _unmeasured(path: Path, rows: Sequence[PublishedRow], kind: FileKind) -> list[str]:
    """Notes of measured cells that are no figure, such as `OOM`: those rows count as not measured."""
    column = kind.measured[0]
    return [
        f"{path}: row {count}: {column}: {row[column]!r} is not a number over 0, so the row counts as not measured"
        for count, row in enumerate(rows, 1)
        if row.get(column) and measured_figure(row, column) is None
    ]


def _readable(path: Path | None, rows: Sequence[PublishedRow], kind: FileKind) -> tuple[list[PublishedRow], list[str]]:
    """Rows that something can be learnt from, and notes of those that are left out for a cell that is no number.

    Rows with an empty field are left out without a note.
    """
    readable, notes = [], []
    for count, row in enumerate(rows, 1):
        column = kind.measured[0]
        if not row[column] or not all(row[name] for name in kind.required):
            continue
        try:
            for name in kind.numbers:
                positive_integer(row, name)
            if measured_figure(row, column) is None:
                raise ValueError(f"{column}: {row[column]!r} is not a number over 0")
        except ValueError as error:
            notes.append(f"{path}: row {count} is left out: {error}")
        else:
            readable.append(row)
    return readable, notes


def _in_both(rows: Sequence[PublishedRow], fit: Sequence[PublishedRow], kind: FileKind) -> int:
    """How many rows the fit file has too, by the columns that both files have."""
    if not fit:
        return 0
    shared = [name for name in (*kind.required, *kind.optional) if name in rows[0] and name in fit[0]]
    known = {tuple(_plain(row[name]) for name in shared) for row in fit}
    return sum(tuple(_plain(row[name]) for name in shared) in known for row in rows)


def _plain(text: str) -> str | float:
    """Normalise a value: `8` equals `8.0`, `True` equals `true`."""
    try:
        return float(text)
    except ValueError:
        return text.lower()


def _described(row: PublishedRow, kind: FileKind) -> PublishedRow:
    return {name: value for name, value in row.items() if name in (*kind.required, *kind.optional)}


def _predictions(kind: FileKind, rows: Sequence[PublishedRow], fit: Sequence[PublishedRow]) -> list[RowPrediction]:
    """Rows that lack a required field are not asked for."""
    empty = [next((name for name in kind.required if not row[name]), None) for row in rows]
    whole = [row for row, name in zip(rows, empty, strict=True) if name is None]
    asked = iter(kind.predictor(whole, fit))
    return [next(asked) if name is None else RowPrediction(None, f"{name} is not given") for name in empty]
