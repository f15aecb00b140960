"""Prefill of an 8B shape in bfloat16, 2k and 8k tokens: share of the matrix-product peak measured just before.

FLOPs are the planner's for the same pass (`engine.planner.flops`): products of the layers and of the last position's
logits, and causal attention.
"""

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.peaks import product_flops
from benchmarks.gpu.shapes import large_model, one_shard, prefill_lengths
from engine.inference.model import Shard
from engine.planner.families import read_architecture
from engine.planner.flops import forward_flops

_LEAST_SHARE = 0.60


def run(bench: Bench) -> None:
    """Report the peak, then seconds and share of it for each length."""
    peak = product_flops(bench, torch.bfloat16)
    config = large_model(bench)
    shard = one_shard(bench, config, torch.bfloat16)
    for length in prefill_lengths(bench):
        bench.attempt(f"{length} tokens", lambda length=length: _measure(bench, shard, config, length, peak))  # type: ignore[misc]


@torch.inference_mode()
def _measure(bench: Bench, shard: Shard, config: dict[str, object], length: int, peak: float) -> None:
    cache = shard.new_cache(1, length)
    tokens = torch.randint(0, shard.config.vocabulary, (1, length), device=bench.device)

    def prefill() -> None:
        cache.clear()
        shard.greedy(shard.head(shard.forward(tokens, cache, last_only=True))[:, -1])

    timed = bench.clock.seconds(prefill, samples=12, limit_seconds=8.0)
    work = forward_flops(read_architecture(config), 1, length, logits=1, causal=True).total
    bench.figure(f"{length} tokens: time to the first token", [one * 1e3 for one in timed.samples], "ms")
    bench.figure(
        f"{length} tokens: share of the product peak",
        [work / one / peak for one in timed.samples],
        bar=_LEAST_SHARE,
        note=f"{work / 1e12:.3g} TFLOP",
    )
