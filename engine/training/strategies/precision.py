"""Precision of training: `torch.autocast` around float32 weights, and the scale that float16's losses need.

    with autocast(device, "bfloat16"):          # float32: nothing
        loss = task.loss(module, batch)
    scale = LossScale()                         # float16 alone
    applied = scale.take(norm_is_finite)        # after each step: False skips the update and halves the scale

Why no torch.amp.GradScaler: each rank of a sharded model would judge its own shard and skip alone. The norm over all
shards, which clipping needs anyway, is infinite or no number as soon as one gradient is, and is the same on all ranks;
and the scale comes off in the multiplication that clips. The rules and numbers are GradScaler's.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from configs.cell import Dtype
from engine.weights import DTYPES

INITIAL_SCALE = 2.0**16
GROWTH, BACKOFF, GROWTH_STEPS = 2.0, 0.5, 2000


@dataclass
class LossScale:
    """What losses are multiplied by before the backward pass, so that small gradients do not vanish in float16."""

    scale: float = INITIAL_SCALE
    good_steps: int = 0

    def take(self, finite: bool) -> bool:
        """Whether to update; adapts the scale for the next step."""
        if not finite:
            self.scale *= BACKOFF
            self.good_steps = 0
            return False
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.scale *= GROWTH
            self.good_steps = 0
        return True

    def state(self) -> dict[str, torch.Tensor]:
        """As tensors, for checkpoints."""
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self.good_steps, dtype=torch.int64),
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state` gave."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[None]:
    """Products in `dtype`, weights in float32; nothing where that is the precision already."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])
