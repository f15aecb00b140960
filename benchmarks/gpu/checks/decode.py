"""Decode of an 8B shape in bfloat16, batch 1, 8 and 64: share of the copy bandwidth measured just before.

A step is what a study times (`engine.inference.pipeline`): the layers as a CUDA graph, the head, the choice of the next
token. The share is of bytes read plus written over the bandwidth of a plain copy, which reads and writes too.
"""

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.peaks import copy_bytes_per_second
from benchmarks.gpu.shapes import STEPS, decode_bytes, decode_sizes, large_model, one_shard
from engine.inference.cache import KeyValueCache
from engine.inference.model import Shard

_LEAST_SHARE = 0.65
"""Of the copy bandwidth, at batch 1."""


def run(bench: Bench) -> None:
    """Report copy bandwidth, then seconds a token and share of it for each batch."""
    bandwidth = copy_bytes_per_second(bench)
    shard = one_shard(bench, large_model(bench), torch.bfloat16)
    for batch in decode_sizes(bench).batches:
        bench.attempt(f"batch {batch}", lambda batch=batch: measure(bench, shard, batch, bandwidth))  # type: ignore[misc]


def measure(bench: Bench, shard: Shard, batch: int, bandwidth: float) -> None:
    """Report one batch of greedy decoding after a prompt."""
    sizes = decode_sizes(bench)
    capacity = sizes.prompt + sizes.new_tokens
    cache = shard.new_cache(batch, capacity)
    seconds = decode_seconds(bench, shard, cache, batch, sizes.prompt, sizes.samples)
    # On a GPU attention covers the whole capacity; elsewhere what is filled, half of the new tokens on average.
    positions = capacity if bench.device.type == "cuda" else sizes.prompt + sizes.new_tokens // 2
    moved = decode_bytes(shard, batch, positions)
    name = f"batch {batch}"
    bench.figure(f"{name}: a token", [one * 1e3 for one in seconds], "ms")
    bench.figure(
        f"{name}: share of the copy bandwidth",
        [moved / one / bandwidth for one in seconds],
        bar=_LEAST_SHARE if batch == 1 else None,
        note=f"{moved / 1e9:.3g} GB a step",
    )


@torch.inference_mode()
def decode_seconds(
    bench: Bench, shard: Shard, cache: KeyValueCache, batch: int, prompt: int, samples: int
) -> list[float]:
    """Return seconds a token, sample by sample; each sample is of consecutive tokens, after two of warm-up."""
    tokens = torch.randint(0, shard.config.vocabulary, (batch, prompt), device=bench.device)
    cache.clear()
    state = [next_token(shard, tokens, cache)]

    def steps() -> None:
        for _ in range(STEPS):
            state[0] = next_token(shard, state[0][:, None], cache)

    for _ in range(2):  # the first records the graph
        steps()
    return [one / STEPS for one in bench.clock.seconds(steps, samples=samples, warm_up=0, calls=1).samples]


def next_token(shard: Shard, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Return the next token of each sequence, [batch]."""
    hidden = shard.forward(tokens, cache, last_only=True)
    return shard.greedy(shard.head(hidden)[:, -1])
