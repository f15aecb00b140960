"""Training tasks: each is a plain function that returns a `Task` for a model, and a function for its rows.

    task = make_task(workload, context)             # a new model with initial weights, in each measurement
    train, held = load_examples(workload, context)  # rows, once per launch

A task's module documents its columns. To add one: a module with both functions, a line in `TASKS`, and its name in
`configs.workloads.train.TrainingTask`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.llama import Llama
from engine.rank.agreement import raise_on_all_ranks
from engine.training.data.examples import ExampleParts, Examples
from engine.training.task_types import causal, classify, masked, seq2seq
from engine.training.task_types.reach import leaves_weights_out
from engine.training.trainer import Task, TrainingBatch

__all__ = ["TASKS", "TaskKind", "load_examples", "make_task", "preprocess_seconds"]


@dataclass(frozen=True)
class TaskKind:
    """Functions of a task. examples: training and validation rows. make: called with the workload and the training
    rows, which determine the number of classes.
    """

    make: Callable[[TrainWorkload, Context, Examples], Task]
    examples: Callable[[TrainWorkload, Context], ExampleParts]


TASKS: dict[str, TaskKind] = {
    "causal_lm": TaskKind(lambda work, context, _: causal.make_causal(work, context), causal.causal_parts),
    "masked_lm": TaskKind(lambda work, context, _: masked.make_masked(work, context), masked.masked_parts),
    "seq2seq": TaskKind(lambda work, context, _: seq2seq.make_seq2seq(work, context), seq2seq.seq2seq_parts),
    "text_classification": TaskKind(classify.make_text, classify.text_parts),
    "image_classification": TaskKind(classify.make_image, classify.image_parts),
}

_KEPT = "training_examples"


def make_task(workload: TrainWorkload, context: Context) -> Task:
    """Return the task of a measurement. All ranks call it; if one cannot use model or data, all raise ValueError."""
    kind, layout = TASKS[workload.task], context.job.cell.layout

    def make() -> Task:
        rows, _ = load_examples(workload, context)
        task = kind.make(workload, context, rows)
        if layout.strategy == "ddp" and layout.dp > 1 and not isinstance(task.model, Llama):  # which uses all of its
            task.leaves_weights_out = leaves_weights_out(task, _first_row(rows, context))
        return task

    return raise_on_all_ranks(make, context)


def _first_row(rows: Examples, context: Context) -> TrainingBatch:
    first = np.zeros(1, dtype=np.int64)
    inputs = {name: tensor.to(context.device) for name, tensor in rows.collate(first, first).items()}
    return TrainingBatch(inputs, 1.0, 1, rows.positions)


def load_examples(workload: TrainWorkload, context: Context) -> ExampleParts:
    """Return training rows and validation rows (None: none). Raises ValueError, on this rank only."""
    return _examples(workload, context)[0]


def preprocess_seconds(workload: TrainWorkload, context: Context) -> float:
    """Return the seconds of reading and tokenising the rows in this launch."""
    return _examples(workload, context)[1]


def _examples(workload: TrainWorkload, context: Context) -> tuple[ExampleParts, float]:
    """Load the rows, cached for the launch."""
    used = {"task", "data", "validation_data", "tokenizer", "global_batch_size", "sequence_length", "heldout_share"}
    key = workload.model_dump_json(include=used)
    kept: dict[str, tuple[ExampleParts, float]] = context.kept.setdefault(_KEPT, {})
    if key not in kept:
        began = time.perf_counter()
        parts = TASKS[workload.task].examples(workload, context)
        kept[key] = parts, time.perf_counter() - began
    return kept[key]
