"""Which weights a task's loss depends on.

task.leaves_weights_out = leaves_weights_out(task, batch)

Some models of transformers have weights that a task does not use: the token for masked patches of DINOv2, the contact
head of ESM, the pooler of models whose masked language modelling has none.
"""

from typing import Any

import torch
from torch import Tensor

from engine.training.trainer import Task, TrainingBatch


def leaves_weights_out(task: Task, batch: TrainingBatch) -> bool:
    """Return whether the loss of a batch does not depend on every trained weight of the task's model.

    One forward pass in evaluation mode, which changes no running means; what it would keep for a backward pass is
    dropped at once.
    """
    task.model.eval()
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda _: None, _not_called):
            loss = task.loss(task.model, batch)
    finally:
        task.model.train()
    reached = _leaves(loss)
    return any(one.requires_grad and id(one) not in reached for one in task.model.parameters())


def _not_called(_: Any) -> Tensor:
    raise AssertionError("there is no backward pass")


def _leaves(result: Tensor) -> set[int]:
    """Return the ids of the tensors that the gradient of a result would reach."""
    found: set[int] = set()
    waiting: list[Any] = [result.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return found
