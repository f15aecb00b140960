"""The preflight workload: compute and memory rates of each node, and network rates of every pair of nodes.

    rates of a rank        products of matrices (FLOP/s) and reads of memory (bytes/s), all ranks at once
    rates of a pair        all-reduces over the ranks of two nodes: seconds of a small one, bytes/s of a large one

It takes seconds, not minutes: its purpose is to detect slow or broken nodes, not to calibrate machines
(`engine.tools.calibrate` does that). A figure is the median of several short windows, so that a short burst by another
process does not fail a node, but a permanent load does. Pairs are measured in rounds in which every node has at most
one partner, so that all work at once, as in a study. Bandwidth is bus bandwidth as defined by nccl-tests
(NVIDIA/nccl-tests, doc/PERFORMANCE.md): 2 (n-1)/n of the size by time.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from configs.plans.job import Measurement
from configs.plans.preflight import SMALL_BYTES, rounds_of_pairs
from configs.workloads.preflight import PreflightWorkload
from engine.context import Context, RankResult
from engine.parallel.exchange_times import cold_products, message_seconds, sum_seconds
from engine.parallel.opening import connect
from engine.parallel.transports import Transport

_WINDOWS = 5
_CPU_SIZE, _GPU_SIZE = 512, 4096  # a product takes some milliseconds
_CPU_READ_BYTES, _GPU_READ_BYTES = 64 << 20, 1 << 30  # far larger than a cache
_SMALL_BYTES, _SMALL_CALLS = SMALL_BYTES, 20
_FIRST_BYTES, _LEAST_BYTES, _MOST_BYTES = 1 << 20, 1 << 18, 256 << 20
_LARGE_SECONDS = 0.15  # target duration of an all-reduce of the large size


def run(measurement: Measurement, context: Context) -> RankResult:
    """Measure one rank's node and its pairs.

    Figures: node (as the target names it), gemm_flops_per_second, read_bytes_per_second. Columns, an entry for each
    pair that this rank's node is in: first_node, second_node (indices of nodes in the job), latency_seconds,
    bytes_per_second, sum_seconds, message_seconds (both after work, on CPUs; 0 on GPUs).
    """
    work = measurement.cell.workload
    assert isinstance(work, PreflightWorkload)
    window_seconds = work.seconds / _WINDOWS
    with torch.inference_mode():
        context.barrier()
        gemm = _gemm_rate(context, window_seconds)
        context.barrier()
        read = _read_rate(context, window_seconds)
        columns = _pairs(measurement, context) if measurement.cell.nodes > 1 else {}
    node = os.environ.get("RANKWISE_NODE_NAME") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return RankResult({"node": node, "gemm_flops_per_second": gemm, "read_bytes_per_second": read}, columns)


def _gemm_rate(context: Context, window_seconds: float) -> float:
    size = _CPU_SIZE if context.device.type == "cpu" else _GPU_SIZE
    left, right = (torch.rand((size, size), device=context.device) for _ in range(2))
    return 2.0 * size**3 * _calls_per_second(lambda: left @ right, context, window_seconds)


def _read_rate(context: Context, window_seconds: float) -> float:
    size = _CPU_READ_BYTES if context.device.type == "cpu" else _GPU_READ_BYTES
    data = torch.ones(size // 4, device=context.device)
    return size * _calls_per_second(lambda: data.sum(), context, window_seconds)


def _calls_per_second(call: Callable[[], object], context: Context, window_seconds: float) -> float:
    """Return the median over the windows; each lasts at least its time, and ends with a complete call."""
    call()  # the first call selects kernels and allocates
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


def _pairs(measurement: Measurement, context: Context) -> dict[str, np.ndarray]:
    """Run all rounds. Every rank takes part in opening every group, and waits at the end of each round."""
    cell, a_node = measurement.cell, context.job.ranks_per_node
    rounds = rounds_of_pairs(cell.nodes)
    ranks = {pair: _ranks_of(pair, a_node) for together in rounds for pair in together}
    backend = "nccl" if context.device.type == "cuda" else "gloo"
    limit_seconds = context.job.measuring.group_timeout_seconds
    ways, _ = connect(list(ranks.values()), context.rank, context.device, backend, limit_seconds, "auto")
    found: list[tuple[int, int, float, float, float, float]] = []
    for together in rounds:
        context.barrier()
        for pair in together:
            if way := ways.get(ranks[pair]):
                found.append((*pair, *_exchange(way, len(ranks[pair]), context), *_in_steps(way, ranks[pair], context)))
    context.barrier()
    for way in ways.values():
        way.close()
    first, second, latency, rate, summed, message = zip(*found, strict=True) if found else ((),) * 6
    return {
        "first_node": np.array(first, dtype=np.int32),
        "second_node": np.array(second, dtype=np.int32),
        "latency_seconds": np.array(latency),
        "bytes_per_second": np.array(rate),
        "sum_seconds": np.array(summed),
        "message_seconds": np.array(message),
    }


def _ranks_of(pair: tuple[int, int], a_node: int) -> tuple[int, ...]:
    return tuple(rank for node in pair for rank in range(node * a_node, (node + 1) * a_node))


def _exchange(way: Transport, ranks: int, context: Context) -> tuple[float, float]:
    """Return seconds of a small all-reduce, and bus bytes/s of a large one, over the ranks of one pair."""
    small = torch.zeros(_SMALL_BYTES // 4, device=context.device)
    latency = _seconds(way, small, context, _SMALL_CALLS)
    # The slowest rank of the pair determines the large size, because all must use the same one.
    guess = _seconds(way, torch.zeros(_FIRST_BYTES // 4, device=context.device), context, 1)
    shared = torch.tensor([guess / ranks], dtype=torch.float32, device=context.device)
    way.all_reduce(shared)  # the mean of the ranks'
    wanted = _FIRST_BYTES * _LARGE_SECONDS / float(shared)
    size = int(min(_MOST_BYTES, max(_LEAST_BYTES, wanted))) // 4 * 4
    large = torch.zeros(size // 4, device=context.device)
    seconds = _seconds(way, large, context, 1)
    return latency, 2 * (ranks - 1) / ranks * size / seconds


def _in_steps(way: Transport, ranks: tuple[int, ...], context: Context) -> tuple[float, float]:
    """Return seconds of a small all-reduce and of a small message, as a decode step has them."""
    if context.device.type != "cpu":
        return 0.0, 0.0
    work, small = cold_products(), torch.zeros(_SMALL_BYTES // 4)
    summed = sum_seconds(way, small, work)
    ends = (0, len(ranks) // 2)  # the first rank of each node
    return summed, message_seconds(way, small, work, ends, ranks.index(context.rank))


def _seconds(way: Transport, tensor: torch.Tensor, context: Context, calls: int) -> float:
    """Return the seconds of one all-reduce: the median of the windows, after a warm-up."""
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
