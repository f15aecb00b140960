"""Power, clocks and throttling while the 8B shape decodes, and energy a token; from the driver's counters (NVML)."""

import time

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks.decode import next_token
from benchmarks.gpu.shapes import large_model, one_shard
from engine.profiling.gpu import GpuSampler

_ABSENT = "not told here"


@torch.inference_mode()
def run(bench: Bench) -> None:
    """Report the sampler's figures and joules a token, at batch 1 and 64."""
    shard = one_shard(bench, large_model(bench), torch.bfloat16)
    prompt, seconds = (16, 0.5) if bench.rehearsal else (512, 5.0)
    for batch in (1, 4) if bench.rehearsal else (1, 64):
        cache = shard.new_cache(batch, prompt + 128)
        tokens = torch.randint(0, shard.config.vocabulary, (batch, prompt), device=bench.device)
        made = 0
        with GpuSampler(0) as sampler:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                cache.clear()
                chosen = next_token(shard, tokens, cache)
                for _ in range(120):
                    chosen = next_token(shard, chosen[:, None], cache)
                bench.clock.synchronise()
                made += 121 * batch
        figures = sampler.figures()
        joules = figures["gpu_energy_joules"]
        for name, value in figures.items():
            text = value if isinstance(value, float | int) and not isinstance(value, bool) else str(value)
            bench.seen(f"batch {batch}: {name}", _ABSENT if value is None else text)
        each = joules / made if isinstance(joules, float) else _ABSENT
        bench.seen(f"batch {batch}: energy a token, the prompt's passes included", each, "J")
