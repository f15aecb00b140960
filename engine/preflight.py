"""The preflight workload: what each node computes and reads, and what every pair of nodes can exchange.

    rates of a rank        products of matrices (FLOP/s) and reads of memory (bytes/s), all ranks at once
    rates of a pair        all-reduces over the ranks of two nodes: seconds of a small one, bytes/s of a large one

Seconds, not minutes: it is to find nodes that are slow or broken, not to measure machines (`engine.calibrate` does
that). A figure is the median of several short windows, so that a neighbour's burst does not condemn a node, and one
that always computes beside us does. Pairs are measured in rounds in which every node has at most one partner, so
that all work at once, as they will in a study. Bandwidth is of the bus, as nccl-tests defines it (NVIDIA/nccl-tests,
doc/PERFORMANCE.md): 2 (n-1)/n of the size by time.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from configs.cell import PreflightWorkload
from configs.job import Visit
from configs.preflight import rounds_of_pairs
from engine.context import Context, Outcome
from engine.parallel.opening import connect
from engine.parallel.transports import Transport

_WINDOWS = 5
_CPU_SIZE, _GPU_SIZE = 512, 4096  # a product of some milliseconds
_CPU_READ_BYTES, _GPU_READ_BYTES = 64 << 20, 1 << 30  # far more than a cache holds
_SMALL_BYTES, _SMALL_CALLS = 1024, 20
_FIRST_BYTES, _LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 18, 256 << 20
_LARGE_SECONDS = 0.15  # an all-reduce of the large size should take about so long


def run(visit: Visit, context: Context) -> Outcome:
    """Measure one rank's node and its pairs.

    Figures: node (as Slurm calls it), gemm_flops_per_second, read_bytes_per_second. Columns, an entry for each pair
    that this rank's node is in: first_node, second_node (places of nodes in the job), latency_seconds,
    bytes_per_second.
    """
    work = visit.cell.workload
    assert isinstance(work, PreflightWorkload)
    window_seconds = work.seconds / _WINDOWS
    with torch.inference_mode():
        context.barrier()
        gemm = _gemm_rate(context, window_seconds)
        context.barrier()
        read = _read_rate(context, window_seconds)
        columns = _pairs(visit, context) if visit.cell.nodes > 1 else {}
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return Outcome({"node": node, "gemm_flops_per_second": gemm, "read_bytes_per_second": read}, columns)


def _gemm_rate(context: Context, window_seconds: float) -> float:
    size = _CPU_SIZE if context.device.type == "cpu" else _GPU_SIZE
    left, right = (torch.rand((size, size), device=context.device) for _ in range(2))
    return 2.0 * size**3 * _calls_per_second(lambda: left @ right, context, window_seconds)


def _read_rate(context: Context, window_seconds: float) -> float:
    size = _CPU_READ_BYTES if context.device.type == "cpu" else _GPU_READ_BYTES
    data = torch.ones(size // 4, device=context.device)
    return size * _calls_per_second(lambda: data.sum(), context, window_seconds)


def _calls_per_second(call: Callable[[], object], context: Context, window_seconds: float) -> float:
    """Median over the windows; each lasts its time at least, and is as long as its last call needs."""
    call()  # the first chooses kernels and allocates
    _finish(context)
    rates = []
    for _ in range(_WINDOWS):
        began, calls, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < window_seconds:
            call()
            _finish(context)
            calls += 1
            elapsed = time.perf_counter() - began
        rates.append(calls / elapsed)
    return statistics.median(rates)


def _finish(context: Context) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def _pairs(visit: Visit, context: Context) -> dict[str, np.ndarray]:
    """All rounds. Every rank helps to open every group, and waits at the end of each round for the others."""
    cell, a_node = visit.cell, context.job.ranks_per_node
    rounds = rounds_of_pairs(cell.nodes)
    ranks = {pair: _ranks_of(pair, a_node) for together in rounds for pair in together}
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    limit_seconds = context.job.measuring.group_timeout_seconds
    ways, _ = connect(list(ranks.values()), context.rank, context.device, backend, limit_seconds, "auto")
    found: list[tuple[int, int, float, float]] = []
    for together in rounds:
        context.barrier()
        for pair in together:
            if way := ways.get(ranks[pair]):
                found.append((*pair, *_exchange(way, len(ranks[pair]), context)))
    context.barrier()
    for way in ways.values():
        way.close()
    first, second, latency, rate = zip(*found, strict=True) if found else ((), (), (), ())
    return {
        "first_node": np.array(first, dtype=np.int32),
        "second_node": np.array(second, dtype=np.int32),
        "latency_seconds": np.array(latency),
        "bytes_per_second": np.array(rate),
    }


def _ranks_of(pair: tuple[int, int], a_node: int) -> tuple[int, ...]:
    return tuple(rank for node in pair for rank in range(node * a_node, (node + 1) * a_node))


def _exchange(way: Transport, ranks: int, context: Context) -> tuple[float, float]:
    """Seconds of a small all-reduce, and bytes/s of the bus in a large one, over the ranks of one pair."""
    small = torch.zeros(_SMALL_BYTES // 4, device=context.device)
    latency = _seconds(way, small, context, _SMALL_CALLS)
    # The slowest of the pair says how large "large" is: both must take the same size.
    guess = _seconds(way, torch.zeros(_FIRST_BYTES // 4, device=context.device), context, 1)
    shared = torch.tensor([guess / ranks], dtype=torch.float32, device=context.device)
    way.all_reduce(shared)  # the mean of the ranks'
    wanted = _FIRST_BYTES * _LARGE_SECONDS / float(shared)
    size = int(min(_MOST_BYTES, max(_LEAST_BYTES, wanted))) // 4 * 4
    large = torch.zeros(size // 4, device=context.device)
    seconds = _seconds(way, large, context, 1)
    return latency, 2 * (ranks - 1) / ranks * size / seconds


def _seconds(way: Transport, tensor: torch.Tensor, context: Context, calls: int) -> float:
    """Of one all-reduce: the median of the windows, after one that connects and allocates."""
    way.all_reduce(tensor)
    taken = []
    for _ in range(_WINDOWS):
        _finish(context)
        began = time.perf_counter()
        for _ in range(calls):
            way.all_reduce(tensor)
        _finish(context)
        taken.append((time.perf_counter() - began) / calls)
    return statistics.median(taken)
