"""Predict inference memory on the fullest rank, and the largest batch that fits.

    memory = inference_memory(setup)                       # InferenceSetup -> Memory
    largest_batch(setup, 80e9)   # None: nothing fits

Parameters are exact. The peak is the prefill of the whole batch (or of a micro-batch) at once, with the cache allocated
for the whole context, as our engine and most do; activations are the largest set of tensors alive at once in a block of
plain PyTorch without gradients (listed at `_block_elements`). Decode needs less.
"""

from collections.abc import Sequence
from math import ceil

from configs.hardware.hardware import Accelerator
from engine.planner.architecture import Architecture
from engine.planner.memory.stored import (
    BYTES,
    feed_forward_width,
    is_quantised,
    stored_bytes,
    stored_stage_layers,
)
from engine.planner.results import Memory
from engine.planner.setup import InferenceSetup

_MIB = 2**20
CPU_PROCESS_BYTES = 195 * _MIB
"""A process of this engine with torch's libraries initialised, without the model: 191 to 198 MiB in four cells of 1M
and 110M parameters (torch 2.13, x86-64). A calibrated machine has its own (`Accelerator.framework_bytes`).
"""
GPU_CONTEXT_BYTES = 500 * _MIB
"""CUDA or HIP context with the kernels of the libraries: assumption, 300 to 600 MiB by device and driver."""
GPU_WORKSPACE_BYTES = 64 * _MIB
"""cuBLAS's workspaces: 8 MiB, on Hopper 32 MiB a handle and stream (docs.pytorch.org, notes on CUDA, 2026-11-21)."""
NCCL_BYTES = 400 * _MIB
"""NCCL's buffers for one group within a node: assumption; 4 MiB (NCCL_BUFFSIZE) a channel and peer, and its kernels."""
_ALLOCATOR_SHARE = 0.03
"""Share of memory that a caching allocator loses to short-lived tensors: assumption."""


def inference_memory(setup: InferenceSetup, all_logits: bool = False) -> Memory:
    """Predict the peak.

    `all_logits`: logits of every prompt position, if an engine computes them (ours: the last only).
    """
    stages = [_stage(setup, stage, all_logits) for stage in range(setup.layout.pp)]
    return max(stages, key=lambda memory: memory.total)


def largest_batch(setup: InferenceSetup, memory_bytes: float) -> int | None:
    """Return the largest `batch` that fits in one device's memory; None if not even one sequence fits."""

    def fits(batch: int) -> bool:
        return inference_memory(setup.replace(batch=batch)).total <= memory_bytes

    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if low >= _MOST_SEQUENCES:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


_MOST_SEQUENCES = 2**20


def framework_bytes(accelerator: Accelerator, ranks: int) -> int:
    """Return the bytes of a process before its first tensor, and of a group's buffers."""
    if accelerator.kind == "cpu":
        return accelerator.framework_bytes or CPU_PROCESS_BYTES
    return GPU_CONTEXT_BYTES + GPU_WORKSPACE_BYTES + (NCCL_BYTES if ranks > 1 else 0)


def _stage(setup: InferenceSetup, stage: int, all_logits: bool) -> Memory:
    """Return the memory of one pipeline stage's fullest tensor-parallel rank."""
    architecture, layout = setup.architecture, setup.layout
    layers = stored_stage_layers(setup)[stage]
    first, last = stage == 0, stage == layout.pp - 1
    element = BYTES[setup.compute]
    tokens = setup.at_once * setup.prompt_tokens
    activations = (
        tokens * element * _block_elements(architecture, layout.tp, setup.machine.accelerator.widens(setup.compute))
    )
    # Norms are computed in float32: the widened tensor, its square, and the product.
    norm = tokens * architecture.hidden * (3 * element + 8)
    activations = max(activations, norm)
    logits = _logits_elements(setup, all_logits) * element if last else 0.0
    message = tokens * architecture.hidden * element if layout.tp * layout.pp > 1 else 0.0
    working = activations + logits + message
    framework = framework_bytes(setup.machine.accelerator, layout.tp * layout.pp)
    if setup.machine.accelerator.kind != "cpu":
        framework += round(_ALLOCATOR_SHARE * working)
    return Memory(
        parameters=round(_parameter_bytes(setup, layers, first, last)),
        activations=round(activations),
        logits=round(logits),
        kv_cache=round(_cache_bytes(setup, layers)),
        communication=round(message),
        framework=framework,
    )


def _parameter_bytes(setup: InferenceSetup, layers: Sequence[int], first: bool, last: bool) -> float:
    """Return parameter bytes: blocks by their share of layers; tables on the first stage; norm and head on the last.

    On a CPU products are packed, and quantised weights are other numbers than the table's: a tied head is a copy there.
    """
    architecture, packs = setup.architecture, setup.machine.accelerator.kind == "cpu"
    share = len(layers) / max(architecture.layers, 1)
    total = 0.0
    for weight in architecture.weights:
        if weight.block:
            total += weight.copies * stored_bytes(weight, setup) * share
        elif weight.role == "embedding":
            total += weight.copies * stored_bytes(weight, setup) * first
        elif last:
            apart = packs or not first or is_quantised(weight, setup)
            own = max(weight.copies, 1) if apart else weight.copies
            total += own * stored_bytes(weight, setup)
    return total


def _cache_bytes(setup: InferenceSetup, layers: Sequence[int]) -> float:
    """Return keys and values of the whole context; an encoder-decoder's decoder caches its source's too."""
    architecture = setup.architecture
    if not architecture.decoder_layers:
        return 0.0
    per_token = architecture.cache_elements(1, setup.layout.tp) // architecture.decoder_layers
    start = architecture.layers - architecture.decoder_layers
    own, source = setup.context, 0
    if architecture.kind == "encoder_decoder":
        own, source = max(1, setup.new_tokens), setup.prompt_tokens
    elements = sum(architecture.attended(layer, own) + source for layer in layers if layer >= start) * per_token
    form = setup.cache or setup.compute
    # Quantised caches store one 16-bit scale for each token and head.
    heads = -(-architecture.kv_heads // setup.layout.tp)
    scales = 2 * heads * 2 / per_token if form in ("int8", "int4") else 0.0
    return setup.batch * elements * (BYTES[form] + scales)


def _block_elements(architecture: Architecture, tp: int, widened: bool) -> float:
    """Return elements a token of the tensors alive at a block's peak.

    Always included: the block's input, the residual stream and its norm. In attention: keys and values, and for the
    rotation the projected queries, their products with cosine and sine, and the swapped halves: four times the queries.
    In the feed-forward: the activation, the gated half, their product (three times its width; without a gate, two), for
    each expert that the token goes to. `widened`: 16-bit products are computed in float32 first, so one more tensor is
    alive during the last one.
    """
    queries = ceil(architecture.heads / tp) * architecture.head_dim
    keys = ceil(architecture.kv_heads / tp) * architecture.head_dim
    attention = 4 * queries + 2 * keys
    wide = ceil(feed_forward_width(architecture) / tp)
    routed = architecture.hidden * architecture.experts_per_token if architecture.experts > 1 else 0
    feed_forward = ((3 if architecture.gated else 2) + widened) * wide + routed
    return 3 * architecture.hidden + max(attention, feed_forward)


def _logits_elements(setup: InferenceSetup, all_logits: bool) -> float:
    """Return elements of the last position; an encoder's head returns all. Shards are gathered, so both are alive."""
    architecture, tp = setup.architecture, setup.layout.tp
    if not any(weight.role == "head" for weight in architecture.weights):
        return 0.0
    every = all_logits or architecture.decoder_layers == 0
    positions = setup.at_once * (setup.prompt_tokens if every else 1)
    gathered = tp > 1 and setup.sharded_vocabulary
    return positions * architecture.vocabulary * (1 + 1 / tp if gathered else 1.0)
