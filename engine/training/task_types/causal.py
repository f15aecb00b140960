"""Causal language modelling: each token of a packed text is predicted from the previous ones.

Data: one long text, or rows with a `text`, packed into windows of `sequence_length` without padding. The families of
`engine.models.llama` are trained with our implementation, others with transformers'.
"""

import numpy as np
from torch import Tensor, nn

from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.weights import required_manifest
from engine.training.data.examples import ExampleParts, Examples, Inputs, Numbers, rows_fingerprint
from engine.training.data.text import check_long_enough, split_text, text_tokens, windows
from engine.training.task_types.common import exported_config, tensors, the_task
from engine.training.task_types.models import (
    check_length,
    fresh_model,
    llama,
    own_model,
    transformers_model,
    vocabulary_of,
    without_filling,
)
from engine.training.trainer import Task


def make_causal(workload: TrainWorkload, context: Context) -> Task:
    """Return the task. Raises ValueError for an unsuitable model or length."""
    check_length(workload, context)
    config = required_manifest(context).config
    if own_model(context):
        model = fresh_model(context, lambda device: llama(context, device))
        return the_task(model, _own_logits, config, workload, context, classes=False)
    model = without_filling(
        fresh_model(context, lambda device: transformers_model("AutoModelForCausalLM", context, device))
    )
    return the_task(model, _logits, exported_config(config, model), workload, context, classes=False)


def _own_logits(module: nn.Module, inputs: Inputs) -> Tensor:
    logits: Tensor = module(inputs["tokens"])
    return logits


def _logits(module: nn.Module, inputs: Inputs) -> Tensor:
    logits: Tensor = module(input_ids=inputs["tokens"], use_cache=False).logits
    return logits


def causal_parts(workload: TrainWorkload, context: Context) -> ExampleParts:
    """Return windows of the text; validation is its last share, or another file."""
    vocabulary, needed = vocabulary_of(context), workload.sequence_length + 1
    ids = text_tokens(workload.data, "data", workload, context, vocabulary)
    training, rest = split_text(ids, workload, needed)
    if workload.validation_data is not None:
        rest = text_tokens(workload.validation_data, "validation_data", workload, context, vocabulary)
        check_long_enough(rest, needed, "validation_data")
    held = _windows(rest, workload, context) if len(rest) else None
    return _windows(training, workload, context), held


def _windows(ids: np.ndarray, workload: TrainWorkload, context: Context) -> Examples:
    """Sequences of `sequence_length`; input and target overlap by all but one token."""
    length = workload.sequence_length

    def collate(numbers: Numbers, places: Numbers) -> Inputs:
        rows = windows(ids, numbers, length, length + 1)
        return tensors(tokens=rows[:, :-1].copy(), targets=rows[:, 1:].copy())

    return Examples(
        count=(len(ids) - 1) // length,
        positions=length,
        collate=collate,
        targets=lambda numbers: np.full(len(numbers), length),
        fingerprint=rows_fingerprint(workload, context),
    )
