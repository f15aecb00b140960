"""Training as one writes it without us: a plain loop in PyTorch, which our step is measured against.

    step = bare_loop(Plan(config, "ddp", "float32", 2, 1, 4, 256), rank=0)
    seconds = step()

Nothing of ours is in it but the model's class: the strategies are the library's, called as its tutorials call them,
and a step does what ours does (accumulation without synchronisation, clipping, AdamW, the loss read). So what is
left of a difference is what our measuring, tables and options cost. It shares nothing with `engine.training` on
purpose; the process group, where there are several ranks, is the caller's.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from configs.families.config import ModelConfig
from engine.models.llama import Llama

_BATCHES = 32


@dataclass(frozen=True)
class LoopPlan:
    """What to train: a config.json, how, and how much at once. micro_batch: sequences that a rank computes at once."""

    config: dict[str, Any]
    strategy: str
    dtype: str
    dp: int
    accumulation: int
    micro_batch: int
    length: int
    clipping: float = 1.0
    rate: float = 3e-4


def bare_loop(plan: LoopPlan, rank: int) -> Callable[[], float]:
    """The loop's body: makes a step and gives its seconds."""
    torch.manual_seed(0)
    config = ModelConfig.parse(plan.config)
    model = Llama(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    wrapped: nn.Module = model
    if plan.strategy == "ddp":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif plan.strategy == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    matrices = [parameter for parameter in wrapped.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in wrapped.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(
        config.vocabulary, (_BATCHES, plan.micro_batch, plan.length + 1), generator=generator, dtype=torch.int64
    )
    batches = itertools.cycle(rows)

    def step() -> float:
        began = time.perf_counter()
        total = 0.0
        for micro in range(plan.accumulation):
            last = micro == plan.accumulation - 1
            tokens = next(batches)
            if plan.strategy == "fsdp":
                wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]
            inner = plan.strategy == "ddp" and not last
            with wrapped.no_sync() if inner else nullcontext():  # type: ignore[operator]
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=plan.dtype == "bfloat16"):
                    logits = wrapped(tokens[:, :-1])
                loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                (loss / plan.accumulation).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        nn.utils.clip_grad_norm_(wrapped.parameters(), plan.clipping)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    return step
