"""Training examples as numbered rows. The feed selects the rows of a step; the task defines their contents.

    train, held = load_examples(workload, context)      # once per launch and data
    inputs = train.collate(numbers, places)             # tensors on the CPU, `targets` among them

A file of a study is in the inputs folder under its hash and a suffix: `.txt` is one long text, `.ndjson` has an
object in each line, `.npz` images and labels (datasets and .parquet are converted to one of these). A task's module
defines its columns (`engine.training.task_types`).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from configs.common.base import sha256_of_file
from configs.common.printable import plural
from configs.inputs.examples import ExampleRow, read_examples
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.prompts.tokens import tokenizer_path

IGNORED = -100
"""Target without loss: padding, or an unmasked word. The default ignore index of PyTorch's loss."""
RANDOM_STEPS = 32
"""Without data, random rows for this many steps."""
SUFFIXES = (".txt", ".ndjson", ".npz")

Numbers = npt.NDArray[np.int64]
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Examples:
    """Rows to train or to evaluate on; every rank has all of them.

    positions: computed per row; all rows have one length, so that work and shapes are the same in every step. collate:
    inputs of some rows [len(numbers), ..]; `places` are their positions in the concatenated epochs, for values drawn
    anew in each. targets: number of targets of each of some rows. names: of the classes, if any. filling: the padding
    token of texts to classify. fingerprint: of the rows' source; equal for equal rows.
    """

    count: int
    positions: int
    collate: Callable[[Numbers, Numbers], Inputs]
    targets: Callable[[Numbers], Numbers]
    fingerprint: str
    names: tuple[str, ...] = ()
    filling: int = 0

    def some(self, numbers: Numbers) -> "Examples":
        """Return only these rows, in this order, renumbered."""
        return Examples(
            count=len(numbers),
            positions=self.positions,
            collate=lambda rows, places: self.collate(numbers[rows], places),
            targets=lambda rows: self.targets(numbers[rows]),
            fingerprint=self.fingerprint,
            names=self.names,
            filling=self.filling,
        )


ExampleParts = tuple[Examples, Examples | None]
"""Training rows, and validation rows."""


def rows_fingerprint(workload: TrainWorkload, context: Context) -> str:
    """Return 16 digits that are equal for equal rows: data, tokenizer, lengths, validation split."""
    path = tokenizer_path(context, workload.tokenizer)
    told = [
        workload.task,
        workload.data or f"random for batches of {workload.global_batch_size}",
        sha256_of_file(path) if path and path.is_file() else None,
        workload.sequence_length,
        workload.heldout_share,
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def input_file(data: str, field: str, context: Context) -> Path:
    """Return the file of the inputs folder that a workload names by hash. Raises ValueError if there is none."""
    for suffix in SUFFIXES:
        path = context.inputs / f"{data}{suffix}"
        if path.is_file():
            return path
    raise ValueError(f"workload.{field}: {context.inputs / data} is missing, with any of {', '.join(SUFFIXES)}")


def read_rows(data: str, columns: Sequence[str], field: str, context: Context) -> list[ExampleRow]:
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
    """Return the task of the launch's cells, for messages."""
    work = context.job.cell.workload
    return work.task if isinstance(work, TrainWorkload) else work.kind


def parted(everything: Examples, held: Examples | None, workload: TrainWorkload, seed: int) -> ExampleParts:
    """Return training rows and validation rows: another file's, or a share of these, drawn by the seed.

    Drawn at random, because files are often sorted by class. Raises ValueError if one part would be empty.
    """
    if held is not None or not workload.heldout_share:
        return everything, held
    count = int(everything.count * workload.heldout_share)
    if not 0 < count < everything.count:
        raise ValueError(
            f"workload.heldout_share: {workload.heldout_share:g} of {plural(everything.count, 'row')} leaves a part "
            "without any; change the share or use more data"
        )
    drawn = np.random.default_rng([seed, everything.count]).permutation(everything.count)
    return everything.some(np.sort(drawn[count:])), everything.some(np.sort(drawn[:count]))
