"""Limits of the device, measured in the same process just before what is held against them.

copy_bytes_per_second(bench)        # read plus written, of a plain copy
product_flops(bench, torch.bfloat16)
"""

import torch

from benchmarks.gpu.bench import Bench, free_memory


def copy_bytes_per_second(bench: Bench) -> float:
    """Return bytes read plus bytes written a second of a copy much larger than any cache; its best sample of 20.

    The best, because a limit is what the device can do: a slower sample is somebody else's doing.
    """
    size = (64 << 20) if bench.rehearsal else (4 << 30)
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    timed = bench.clock.seconds(lambda: target.copy_(source), limit_seconds=1.0)
    rate = 2 * size / min(timed.samples)
    bench.seen("copy bandwidth, read plus written", rate / 1e9, "GB/s")
    free_memory(bench.device)
    return rate


def product_flops(bench: Bench, dtype: torch.dtype) -> float:
    """Return FLOP/s of a square matrix product of random numbers, the best of some sizes; 2 n^3 operations each.

    Random numbers, because products of zeros draw less power and run faster.
    """
    sizes = (256, 512) if bench.rehearsal else (4096, 8192, 16384)
    best = 0.0
    for size in sizes:
        left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(left)
        timed = bench.clock.seconds(
            lambda left=left, right=right, out=out: torch.mm(left, right, out=out),  # type: ignore[misc]
            samples=12,
            limit_seconds=1.0,
        )
        best = max(best, 2 * size**3 / min(timed.samples))
    bench.seen(f"matrix product of {str(dtype).removeprefix('torch.')}, peak", best / 1e12, "TFLOP/s")
    free_memory(bench.device)
    return best
