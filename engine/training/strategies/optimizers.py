"""Optimizer of a training run: AdamW or plain SGD, with weight decay on matrices only.

optimizer = make_optimizer(model, options)
set_rate(optimizer, rate)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.training.trainer import BETAS, EPSILON, TrainerOptions


def make_optimizer(model: nn.Module, options: TrainerOptions) -> torch.optim.Optimizer:
    """Build an optimizer of all parameters with gradients. Vectors (norms, biases) do not decay."""
    kinds: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # With tensor parallelism parameters are on several meshes, which one fused update does not support.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            kinds.setdefault((parameter.dim() >= 2, mesh), []).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": members, "weight_decay": options.weight_decay if decays else 0.0}
        for (decays, _), members in kinds.items()
    ]
    if options.optimizer == "sgd":
        # torch has no fused SGD for DTensors.
        whole = all(mesh is None for _, mesh in kinds)
        return torch.optim.SGD(groups, lr=options.learning_rate, fused=whole)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=BETAS, eps=EPSILON, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step in all groups; a group may have a `rate_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


@contextmanager
def own_settings(optimizer: Any) -> Iterator[None]:
    """Keep the settings of all groups (weight decay, betas) while a state is loaded, which has those of its run."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
