"""What is trained on, as rows with numbers: which a step takes is the feed's affair, what they hold is a task's.

    train, held = load_examples(workload, context)      # once per launch and data
    inputs = train.collate(numbers, places)             # tensors on the CPU, `targets` among them

A file of a study lies in the inputs folder under its hash and a suffix: `.txt` is one long text, `.ndjson` has an
object in each line, `.npz` images and labels (datasets and .parquet have become one of these). Which columns a task
reads stands in its module (`engine.training.task_types`).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from configs.examples import Row, read_examples
from configs.training import TrainWorkload
from engine.context import Context
from engine.tokens import tokenizer_path

IGNORED = -100
"""A target that counts for nothing: filling, or a word that is not asked for. What PyTorch's loss passes over."""
RANDOM_STEPS = 32
"""Without data, random rows for so many steps."""
SUFFIXES = (".txt", ".ndjson", ".npz")

Numbers = npt.NDArray[np.int64]
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Examples:
    """Rows to train or to evaluate on; every rank knows all of them.

    positions: what the model computes for a row, all of which have one length: a step's work is the same in every
    step, and its shapes are static. collate: inputs of some rows [len(numbers), ..]; `places` are theirs in the endless
    row of epochs, for what is drawn anew in each. targets: how many each of some rows has. names: of the classes, where
    there are any. fingerprint: what the rows are made from; equal for equal rows.
    """

    count: int
    positions: int
    collate: Callable[[Numbers, Numbers], Inputs]
    targets: Callable[[Numbers], Numbers]
    fingerprint: str
    names: tuple[str, ...] = ()

    def some(self, numbers: Numbers) -> "Examples":
        """Only these rows, in this order, numbered anew."""
        return Examples(
            count=len(numbers),
            positions=self.positions,
            collate=lambda rows, places: self.collate(numbers[rows], places),
            targets=lambda rows: self.targets(numbers[rows]),
            fingerprint=self.fingerprint,
            names=self.names,
        )


Parts = tuple[Examples, Examples | None]
"""What is trained on, and what is held out."""


def fingerprint_of(workload: TrainWorkload, context: Context) -> str:
    """16 digits that are equal where training sees the same rows: data, tokenizer, lengths, what is held out."""
    path = tokenizer_path(context, workload.tokenizer)
    told = [
        workload.task,
        workload.data or f"random for batches of {workload.global_batch_size}",
        hashlib.sha256(path.read_bytes()).hexdigest() if path and path.is_file() else None,
        workload.sequence_length,
        workload.heldout_share,
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def input_file(data: str, field: str, context: Context) -> Path:
    """The file of the inputs folder that a workload names by its hash. Raises ValueError where there is none."""
    for suffix in SUFFIXES:
        path = context.inputs / f"{data}{suffix}"
        if path.is_file():
            return path
    raise ValueError(f"workload.{field}: {context.inputs / data} is missing, with any of {', '.join(SUFFIXES)}")


def read_rows(data: str, columns: Sequence[str], field: str, context: Context) -> list[Row]:
    """All rows of a file of examples, with these columns. Raises ValueError naming the row for one that lacks any."""
    path = input_file(data, field, context)
    if path.suffix != ".ndjson":
        wanted = json.dumps(dict.fromkeys(columns, ".."))
        raise ValueError(
            f"workload.{field}: task {context_task(context)} learns from rows; write a .jsonl with {wanted} in each "
            "line, a .parquet with these columns, or name hf:DATASET"
        )
    rows = read_examples(path)
    for number, row in enumerate(rows, start=1):
        missing = [name for name in columns if row.get(name) is None]
        if missing:
            raise ValueError(
                f"workload.{field}: row {number} has no `{missing[0]}`; each needs {' and '.join(columns)}"
            )
    return rows


def context_task(context: Context) -> str:
    """The task of the launch's cells, for messages."""
    work = context.job.cell.workload
    return work.task if isinstance(work, TrainWorkload) else work.kind


def parted(everything: Examples, held: Examples | None, workload: TrainWorkload, seed: int) -> Parts:
    """Rows to train on and rows held out: another file's, or a share of these, drawn by the seed.

    Drawn, because files are often sorted by class. Raises ValueError where one part would be empty.
    """
    if held is not None or not workload.heldout_share:
        return everything, held
    count = int(everything.count * workload.heldout_share)
    if not 0 < count < everything.count:
        raise ValueError(
            f"workload.heldout_share: {workload.heldout_share:g} of {everything.count} rows leaves a part without any; "
            "change the share or use more data"
        )
    drawn = np.random.default_rng([seed, everything.count]).permutation(everything.count)
    return everything.some(np.sort(drawn[count:])), everything.some(np.sort(drawn[:count]))
