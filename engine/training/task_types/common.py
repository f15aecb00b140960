"""Shared parts of tasks: the loss over targets, sums for evaluation, export, padding of rows.

    return the_task(model, call, config, workload, context, classes=True)

A task is defined by `call(module, inputs) -> logits` [.., classes]; its inputs' `targets` [..] are the labels,
`IGNORED` for none. The loss is the mean over a batch's targets, in float32; `TrainingBatch.share` makes means of
micro-batches and ranks into the mean over all targets of a step, independent of padding.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.common.base import write_atomically
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.models.weights import write_weights
from engine.prompts.tokens import tokenizer_path
from engine.training.data.examples import IGNORED, Inputs, Numbers
from engine.training.task_types.models import repeated_layers
from engine.training.trainer import Task, TrainingBatch

Call = Callable[[nn.Module, Inputs], Tensor]

EXPORTED = torch.bfloat16
SHOWN_CLASSES = 20
"""Named where a class is none of the data's."""
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""Of a tokenizer: also how a conversation is written, and which tokens end an answer."""
_MAX_CLASSES = 1 << 20
"""Each is a row of the model's head. A larger label is a mistake, such as an identifier in its place."""


def the_task(
    model: nn.Module, call: Call, config: dict[str, Any], workload: TrainWorkload, context: Context, classes: bool
) -> Task:
    """Return the task of a model. classes: whether it predicts one class per row, so that accuracy is counted."""
    names = exported_names(model)

    def loss(module: nn.Module, batch: TrainingBatch) -> Tensor:
        logits = call(module, batch.inputs)
        return functional.cross_entropy(
            logits.float().flatten(0, -2), batch.inputs["targets"].flatten(), ignore_index=IGNORED
        )

    def metrics(module: nn.Module, batch: TrainingBatch) -> dict[str, Tensor]:
        logits, targets = call(module, batch.inputs).float().flatten(0, -2), batch.inputs["targets"].flatten()
        summed = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        sums = {"loss": summed.double(), "targets": (targets != IGNORED).sum().double()}
        if classes:
            sums["correct"] = (logits.argmax(-1) == targets).sum().double()
        return sums

    def export(state: dict[str, Tensor], folder: Any) -> None:
        """Write weights in bfloat16 with their configuration and tokenizer: a folder that transformers loads."""
        tensors = {name: exported_tensor(state[name], EXPORTED) for name in names}
        write_weights(tensors, config, Path(folder), EXPORTED)
        write_tokenizer(tokenizer_path(context, workload.tokenizer), Path(folder))

    return Task(model, repeated_layers(model), loss, metrics, config, export)


def exported_names(model: nn.Module) -> list[str]:
    """Return the names of a model's weights, tied ones once, and of the buffers that its files hold (running means)."""
    buffers = {name for name, _ in model.named_buffers()}
    return [name for name, _ in model.named_parameters()] + [name for name in model.state_dict() if name in buffers]


def exported_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of an exported folder, on the CPU and in `dtype`; one of whole numbers keeps its own."""
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()


def exported_config(config: dict[str, Any], model: nn.Module, **changes: Any) -> dict[str, Any]:
    """Return the exported model's configuration: the original one, with the current class."""
    return config | {"architectures": [type(model).__name__], **changes}


def write_tokenizer(source: Path | None, folder: Path) -> None:
    """Copy a tokenizer.json and its companion files into a folder; no-op if there is none."""
    if source is None or not source.is_file():
        return
    shutil.copyfile(source, folder / "tokenizer.json")
    for name in _COMPANIONS:
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, folder / name)
    if not (folder / _COMPANIONS[0]).is_file():
        # Otherwise transformers uses the architecture's class, which replaces parts of tokenizer.json.
        write_atomically(folder / _COMPANIONS[0], json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def numbered_names(highest: int, field: str) -> tuple[str, ...]:
    """Return the names of the classes 0 to `highest`. Raises ValueError for more than a model can have."""
    if highest >= _MAX_CLASSES:
        raise ValueError(
            f"workload.{field}: label {highest} would be one of {highest + 1:,} classes; number classes from 0 on, or "
            "name them by words"
        )
    return tuple(str(number) for number in range(highest + 1))


def filled_rows(rows: Sequence[Sequence[int]], length: int, filling: int) -> Numbers:
    """Return [len(rows), length]: rows truncated, and padded at the right."""
    filled = np.full((len(rows), length), filling, dtype=np.int64)
    for place, row in enumerate(rows):
        cut = row[:length]
        filled[place, : len(cut)] = cut
    return filled


def seen(rows: Sequence[Sequence[int]], length: int) -> Numbers:
    """Return [len(rows), length]: 1 at positions without padding."""
    lengths = np.array([min(len(row), length) for row in rows])
    return (np.arange(length) < lengths[:, None]).astype(np.int64)


def tensors(**arrays: np.ndarray) -> Inputs:
    """Return inputs by name."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
