"""Precision of training: `torch.autocast` around float32 weights, and loss scaling for float16.

    with autocast(device, "bfloat16"):          # float32: nothing
        loss = task.loss(module, batch)
    scale = LossScale()                         # float16 alone
    applied = scale.take(norm_is_finite)        # after each step: False skips the update and halves the scale

torch.amp.GradScaler is not used, because each rank of a sharded model would check only its own shard and skip alone.
The norm over all shards, which clipping needs anyway, is non-finite if any gradient is, and equal on all ranks; the
scale is removed in the clipping multiplication. The rules and numbers are GradScaler's.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from configs.common.execution import Dtype
from engine.models.weights import DTYPES

INITIAL_SCALE = 2.0**16
GROWTH, BACKOFF, GROWTH_STEPS = 2.0, 0.5, 2000


@dataclass
class LossScale:
    """Factor on losses before the backward pass, so that small gradients do not underflow in float16."""

    scale: float = INITIAL_SCALE
    good_steps: int = 0

    def take(self, finite: bool) -> bool:
        """Return whether to update; adapt the scale for the next step."""
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
        """Return the state as tensors, for checkpoints."""
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self.good_steps, dtype=torch.int64),
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restore from `state`."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


def autocast(device: torch.device, dtype: Dtype) -> AbstractContextManager[None]:
    """Return a context with products in `dtype` and float32 weights; a no-op for float32."""
    if dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[dtype])
