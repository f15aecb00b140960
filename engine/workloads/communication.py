"""The communication workload: times of collectives and point-to-point transfers by size.

A sample is the mean time of several calls in a row, as in nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md), on each
rank; the slowest rank counts. Sizes follow its convention: for all_gather and reduce_scatter those of the whole, of
which each rank has an equal part. A point-to-point transfer is half of a round trip, between rank i of the first half
and rank i of the second, all pairs at once: with two hosts it crosses between them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from configs.plans.job import Measurement
from configs.workloads.communication import Collective, CommunicationWorkload
from engine.context import Context, RankResult, Samples
from engine.models.weights import DTYPES
from engine.parallel.communicator import Communicator

OPERATIONS = get_args(Collective)
"""The column `operation` holds indices in this list."""

_SAMPLES = 3  # of each operation and size in a pass
_SAMPLE_SECONDS = 0.005  # a sample makes as many calls as fit, within limits
_LEAST_CALLS, _MOST_CALLS = 2, 50


@dataclass(frozen=True)
class _Probe:
    """One operation of one size.

    `trips`: transfers in a call; `call` is None on a rank that does not take part. `calls`: number per sample, equal on
    all ranks.
    """

    operation: int
    size_bytes: int
    trips: int
    call: Callable[[], object] | None
    calls: int = _LEAST_CALLS


def run(measurement: Measurement, context: Context) -> RankResult:
    """Measure one measurement.

    Columns, an entry for each sample: operation (index in OPERATIONS), size_bytes, call_seconds (NaN on a rank that
    does not take part); and pass_seconds.
    """
    work = measurement.cell.workload
    assert isinstance(work, CommunicationWorkload)
    group = context.communicators.tensor
    assert group.size > 1, "a communication cell has tp of 2 or more"
    dtype, device = DTYPES[measurement.cell.dtype], context.device
    with torch.inference_mode():
        probes = [_with_calls(probe, group, device) for probe in _probes(work, group, dtype, device)]
    outcome = RankResult(figures={"transport": group.transport, "num_probes": len(probes)})
    with torch.inference_mode():
        if context.measuring_pass != "timed":
            with context.profiled():
                _one_pass(probes, group, device)
            return outcome
        outcome.samples = _timed_passes(probes, group, context)
    outcome.figures["passes"] = len(outcome.samples["pass_seconds"])
    return outcome


def _timed_passes(probes: list[_Probe], group: Communicator, context: Context) -> Samples:
    rules = context.job.measuring
    for _ in range(rules.warmup):
        _one_pass(probes, group, context.device)
    walls: list[float] = []
    calls: list[float] = []
    while len(walls) < rules.min_passes or _largest(sum(walls), group, context.device) < rules.min_seconds:
        group.barrier()
        began = time.perf_counter()
        calls += _one_pass(probes, group, context.device)
        walls.append(time.perf_counter() - began)
    each = [probe for _ in walls for probe in probes for _ in range(_SAMPLES)]
    return {
        "pass_seconds": np.array(walls),
        "operation": np.array([probe.operation for probe in each], dtype=np.int8),
        "size_bytes": np.array([probe.size_bytes for probe in each], dtype=np.int64),
        "call_seconds": np.array(calls),
    }


def _with_calls(probe: _Probe, group: Communicator, device: torch.device) -> _Probe:
    """Return the probe with the number of calls that the slowest rank makes in a sample's time; the first ones warm
    up.
    """
    _sample(probe, device)
    group.barrier()
    seconds = _largest(_sample(probe, device), group, device) * probe.trips
    return replace(probe, calls=max(_LEAST_CALLS, min(_MOST_CALLS, int(_SAMPLE_SECONDS / seconds))))


def _largest(seconds: float, group: Communicator, device: torch.device) -> float:
    """Return the maximum over ranks with a value: all must do the same, and stop after the same pass."""
    return float(group.all_gather(torch.tensor(seconds, dtype=torch.float64, device=device)).nan_to_num(0.0).max())


def _one_pass(probes: list[_Probe], group: Communicator, device: torch.device) -> list[float]:
    """Run one pass; return seconds of a call for each sample."""
    found: list[float] = []
    for probe in probes:
        for _ in range(_SAMPLES):
            group.barrier()
            found.append(_sample(probe, device))
    return found


def _sample(probe: _Probe, device: torch.device) -> float:
    if probe.call is None:
        return float("nan")
    began = time.perf_counter()
    for _ in range(probe.calls):
        probe.call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / probe.calls / probe.trips


def _probes(
    work: CommunicationWorkload, group: Communicator, dtype: torch.dtype, device: torch.device
) -> Iterator[_Probe]:
    for operation in work.operations:
        for size in work.sizes_bytes:
            parts = group.size if operation in ("all_gather", "reduce_scatter") else 1
            count = max(1, size // dtype.itemsize // parts)
            # Written to: unwritten memory maps to a single page of zeros.
            tensor = torch.empty((parts, count), dtype=dtype, device=device).zero_()
            trips = 2 if operation == "point_to_point" else 1
            call = _call(operation, group, tensor)
            yield _Probe(OPERATIONS.index(operation), parts * count * dtype.itemsize, trips, call)


def _call(operation: Collective, group: Communicator, tensor: torch.Tensor) -> Callable[[], object] | None:
    """Return the timed call. `tensor` [parts, count] is the whole."""
    if operation == "all_reduce":
        return lambda: group.all_reduce(tensor)
    if operation == "all_gather":
        part = tensor[0].clone()
        return lambda: group.all_gather(part)
    if operation == "reduce_scatter":
        return lambda: group.reduce_scatter(tensor)
    if operation == "broadcast":
        return lambda: group.broadcast(tensor, 0)
    half = group.size // 2
    if group.index >= 2 * half:
        return None
    return _ping(group, tensor, group.index + half) if group.index < half else _pong(group, tensor, group.index - half)


def _ping(group: Communicator, tensor: torch.Tensor, peer: int) -> Callable[[], None]:
    def call() -> None:
        group.send(tensor, peer)
        group.receive(tensor, peer)

    return call


def _pong(group: Communicator, tensor: torch.Tensor, peer: int) -> Callable[[], None]:
    def call() -> None:
        group.receive(tensor, peer)
        group.send(tensor, peer)

    return call
