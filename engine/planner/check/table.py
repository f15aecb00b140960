"""Read files of measured rows, identify them by their columns, predict the rows and compare with the measurements.

    checked = check_files(Path("B.csv"), Path("A.csv"))     # predicts B's rows from constants and A's rows
    checked.kind.title, checked.result.percentile(50)

Measured columns are removed from B's rows before prediction, so that they cannot be read; A's are read. An invalid cell
affects its row only: a row of B gets a reason instead of a prediction, or has no measurement to compare with; a row of
A is left out. `notes` lists them. A file with the wrong columns raises ValueError naming the file and the expected
columns.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from configs.common.reading import read_text
from engine.planner.check.rows import Checked, PublishedRow, RowPrediction, checked, measured_figure, whole_number

RowPredictor = Callable[[Sequence[PublishedRow], Sequence[PublishedRow]], list[RowPrediction]]


@dataclass(frozen=True)
class FileKind:
    """Columns of a file kind.

    telling: columns that only this kind has. required: columns needed for a prediction. numbers: required columns that
    hold a number. optional: known but not needed. measured: the first is the one predicted.
    shown: columns that identify a row in a table, words first.
    """

    title: str
    module: str
    telling: frozenset[str]
    required: tuple[str, ...]
    numbers: tuple[str, ...]
    optional: tuple[str, ...]
    measured: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def predictor(self) -> RowPredictor:
        """The `predict` function of the kind's module."""
        found: RowPredictor = import_module(self.module).predict
        return found

    @property
    def columns(self) -> tuple[str, ...]:
        """All known columns."""
        return (*self.required, *self.optional, *self.measured)


KINDS = (
    FileKind(
        title="training throughput",
        module="engine.planner.check.throughput",
        telling=frozenset(
            {"micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "sharding", "precision"}
        ),
        required=("model", "sequence_length", "num_gpus", "gpu", "micro_batch_size"),
        numbers=("sequence_length", "num_gpus", "micro_batch_size"),
        optional=(
            "num_parameters", "gradient_accumulation_steps", "global_batch_size", "precision", "sharding",
            "activation_checkpointing",
        ),
        measured=("tokens_per_second", "tokens_per_second_per_gpu", "mfu_percent", "hfu_percent"),
        shown=("model", "gpu", "num_gpus", "sequence_length", "micro_batch_size"),
    ),
    FileKind(
        title="tensor-parallel decode",
        module="engine.planner.check.decode",
        telling=frozenset({"prompt_tokens", "dtype", "batch_size"}),
        required=("model", "num_gpus", "gpu", "dtype", "batch_size", "prompt_tokens"),
        numbers=("num_gpus", "batch_size", "prompt_tokens"),
        optional=(),
        measured=("tokens_per_second", "achieved_bandwidth_gb_per_second"),
        shown=("model", "gpu", "dtype", "num_gpus", "batch_size"),
    ),
    FileKind(
        title="training memory",
        module="engine.planner.check.memory",
        telling=frozenset({"parallelism", "local_batch_size", "compile", "float8"}),
        required=("model", "num_gpus", "gpu", "parallelism", "local_batch_size", "sequence_length"),
        numbers=("num_gpus", "local_batch_size", "sequence_length"),
        optional=("num_parameters", "activation_checkpointing", "compile", "float8"),
        measured=("peak_memory_gib", "tokens_per_second_per_gpu"),
        shown=("model", "gpu", "parallelism", "num_gpus", "local_batch_size"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class CheckedFile:
    """Rows of a file without their measured columns, and predictions compared with the measurements."""

    kind: FileKind
    rows: tuple[PublishedRow, ...]
    result: Checked
    ignored: tuple[str, ...]  # unknown columns
    in_fit: int  # rows that the fit file contains too
    notes: tuple[str, ...]  # invalid cells


def check_files(predict: Path, fit: Path | None = None) -> CheckedFile:
    """Predict every row of one file from constants and, where it is given, the rows of another of the same kind."""
    rows, kind, ignored = read_published_rows(predict)
    fit_rows: list[PublishedRow] = []
    if fit is not None:
        fit_rows, fit_kind, _ = read_published_rows(fit)
        if fit_kind is not kind:
            raise ValueError(f"{fit}: rows of {fit_kind.title}, but {predict} has rows of {kind.title}; give one kind")
        if kind.measured[0] not in fit_rows[0]:
            raise ValueError(f"{fit}: no column {kind.measured[0]}; a file to fit on needs it")
    blind = [_without_measured(row, kind) for row in rows]
    readable, notes = _readable(fit, fit_rows, kind)
    return CheckedFile(
        kind,
        tuple(blind),
        checked(rows, _predictions(kind, blind, readable), kind.measured[0]),
        ignored,
        _in_both(blind, readable, kind),
        (*_unmeasured(predict, rows, kind), *notes),
    )


def read_published_rows(path: Path) -> tuple[list[PublishedRow], FileKind, tuple[str, ...]]:
    """A CSV file's rows, their kind, and the names of columns that are not known."""
    try:
        reader = csv.reader(read_text(path).splitlines(keepends=True), strict=True)
        lines = [line for line in reader if any(cell.strip() for cell in line)]
    except (OSError, csv.Error) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or f'not a CSV file ({error})'}") from error
    if len(lines) < 2:
        raise ValueError(f"{path}: {'no rows after the header' if lines else 'empty'}; {_known_kinds()}")
    header = [name.strip() for name in lines[0]]
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: column {twice[0]} is there twice")
    kind = _kind_of(path, header)
    rows = []
    for count, line in enumerate(lines[1:], 1):
        if len(line) != len(header):
            raise ValueError(f"{path}: row {count} has {len(line)} fields, the header {len(header)}")
        rows.append(dict(zip(header, (cell.strip() for cell in line), strict=True)))
    return rows, kind, tuple(name for name in header if name not in kind.columns)


def _kind_of(path: Path, header: Sequence[str]) -> FileKind:
    counts = [len(kind.telling & set(header)) for kind in KINDS]
    best = max(counts)
    if best == 0 or counts.count(best) > 1:
        unknown = [name for name in header if not any(name in kind.columns for kind in KINDS)]
        said = f"columns {', '.join(unknown)} are not known" if unknown else f"columns {', '.join(header)} fit no kind"
        raise ValueError(f"{path}: {said}; {_known_kinds()}")
    kind = KINDS[counts.index(best)]
    missing = [name for name in kind.required if name not in header]
    if missing:
        raise ValueError(
            f"{path}: column {missing[0]} is missing; rows of {kind.title} need {', '.join(kind.required)}"
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
                whole_number(row, name)
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


def _without_measured(row: PublishedRow, kind: FileKind) -> PublishedRow:
    return {name: value for name, value in row.items() if name not in kind.measured}


def _predictions(kind: FileKind, rows: Sequence[PublishedRow], fit: Sequence[PublishedRow]) -> list[RowPrediction]:
    """Rows that lack a required field are not asked for."""
    empty = [next((name for name in kind.required if not row[name]), None) for row in rows]
    whole = [row for row, name in zip(rows, empty, strict=True) if name is None]
    asked = iter(kind.predictor(whole, fit))
    return [next(asked) if name is None else RowPrediction(None, f"{name} is not given") for name in empty]
