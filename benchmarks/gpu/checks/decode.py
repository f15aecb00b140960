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
_KERNELS_TOLD = 8


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
    positions = sizes.prompt + sizes.new_tokens // 2  # what is filled, half of the new tokens on average
    moved = decode_bytes(shard, batch, positions)
    name = f"batch {batch}"
    bench.figure(f"{name}: a token", [one * 1e3 for one in seconds], "ms")
    bench.figure(
        f"{name}: share of the copy bandwidth",
        [moved / one / bandwidth for one in seconds],
        bar=_LEAST_SHARE if batch == 1 else None,
        note=f"{moved / 1e9:.3g} GB a step",
    )
    if bench.device.type == "cuda":
        bench.attempt(f"{name}: kernels", lambda: _kernels(bench, shard, cache, batch))


@torch.inference_mode()
def _kernels(bench: Bench, shard: Shard, cache: KeyValueCache, batch: int) -> None:
    """Report where the time of a token goes, by the names of kernels."""
    cache.length -= STEPS
    chosen = torch.zeros((batch, 1), dtype=torch.int64, device=bench.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            next_token(shard, chosen, cache)
        bench.clock.synchronise()
    rows = [(row.key, row.self_device_time_total / STEPS, row.count / STEPS) for row in profile.key_averages()]
    rows.sort(key=lambda row: -row[1])
    bench.seen(f"batch {batch}: kernels of a token", sum(row[2] for row in rows), note=f"{len(rows)} different")
    for key, taken, count in rows[:_KERNELS_TOLD]:
        bench.seen(f"batch {batch}: {key[:60]}", taken, "us", note=f"{count:g} a token")


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
