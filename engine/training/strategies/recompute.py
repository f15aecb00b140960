"""Activation checkpointing and torch.compile of blocks, in place: parameter names are unchanged.

    recompute(task.blocks, "selective")
    compile_blocks(task.blocks)                 # after recompute, before a strategy wraps

A block's `forward` is replaced, not the block: FSDP2's hooks (which gather weights) then wrap the recomputed part, and
any module can be a block, transformers' too.

`full` keeps the input of a block. `selective` keeps also the outputs of attention and of every second product, the
policy "op" of torchtitan, as in the planner (engine.planner.memory.activations).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from configs.workloads.train import ActivationCheckpointing

_aten = torch.ops.aten
PRODUCTS = (_aten.mm.default, _aten.addmm.default)
ATTENTION = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)


def recompute(blocks: Sequence[nn.Module], checkpointing: ActivationCheckpointing) -> None:
    """Recompute each block's activations in the backward pass."""
    if checkpointing == "none":
        return
    more: dict[str, Any] = {} if checkpointing == "full" else {"context_fn": _kept_and_dropped}
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block with torch at its first call; on a CPU that needs a C++ compiler."""
    for block in blocks:
        compiled: Callable[..., Any] = torch.compile(block.forward)
        block.forward = compiled


def _kept_and_dropped() -> Any:
    """Return contexts of one forward pass and its recomputation, with separate counts of products."""
    counts = {False: 0, True: 0}

    def policy(context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator in PRODUCTS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
