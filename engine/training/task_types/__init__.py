"""What is learnt: the tasks, each a plain function that makes a `Task` of a model, and the rows that it learns from.

    task = make_task(workload, context)             # a new model with the first weights, in each visit
    train, held = load_examples(workload, context)  # rows, once per launch

A task's module says which columns it reads. To add one: a module with both functions, a line in `TASKS`, and its name
in `configs.training.TrainingTask`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from configs.training import TrainWorkload
from engine.agreement import together
from engine.context import Context
from engine.training.data.examples import Examples, Parts
from engine.training.task_types import causal, classify, masked, seq2seq
from engine.training.trainer import Task

__all__ = ["TASKS", "Kind", "load_examples", "make_task", "preprocess_seconds"]


@dataclass(frozen=True)
class Kind:
    """How a task is made. examples: rows to train on and rows held out. make: of the workload and the training rows,
    which say how many classes there are."""

    make: Callable[[TrainWorkload, Context, Examples], Task]
    examples: Callable[[TrainWorkload, Context], Parts]


TASKS: dict[str, Kind] = {
    "causal_lm": Kind(lambda work, context, _: causal.make(work, context), causal.examples),
    "masked_lm": Kind(lambda work, context, _: masked.make(work, context), masked.examples),
    "seq2seq": Kind(lambda work, context, _: seq2seq.make(work, context), seq2seq.examples),
    "text_classification": Kind(classify.make_text, classify.text_parts),
    "image_classification": Kind(classify.make_image, classify.image_parts),
}

_KEPT = "training_examples"


def make_task(workload: TrainWorkload, context: Context) -> Task:
    """The task of a visit. All ranks call it; where one cannot use model or data, all raise ValueError."""
    kind = TASKS[workload.task]
    return together(lambda: kind.make(workload, context, load_examples(workload, context)[0]), context)


def load_examples(workload: TrainWorkload, context: Context) -> Parts:
    """Rows to train on and rows held out (None: none). Raises ValueError, on this rank alone."""
    return _examples(workload, context)[0]


def preprocess_seconds(workload: TrainWorkload, context: Context) -> float:
    """What reading and tokenising the rows took in this launch."""
    return _examples(workload, context)[1]


def _examples(workload: TrainWorkload, context: Context) -> tuple[Parts, float]:
    """Kept for the launch."""
    used = {"task", "data", "validation_data", "tokenizer", "global_batch_size", "sequence_length", "heldout_share"}
    key = workload.model_dump_json(include=used)
    kept: dict[str, tuple[Parts, float]] = context.kept.setdefault(_KEPT, {})
    if key not in kept:
        began = time.perf_counter()
        parts = TASKS[workload.task].examples(workload, context)
        kept[key] = parts, time.perf_counter() - began
    return kept[key]
