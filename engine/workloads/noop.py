"""The noop workload: sleeps and allocates as configured, and injects real faults.

It times and tests the framework, not a model. Faults happen where real ones do: between two collectives.
"""

import mmap
import os
import resource
import signal
import time

import numpy as np

from configs.plans.job import Measurement
from configs.workloads.noop import NoopWorkload
from engine.context import Context, RankResult

_PIECE_BYTES = 16 * 2**20
_HEADROOM_BYTES = 64 * 2**20


def run(measurement: Measurement, context: Context) -> RankResult:
    """Run one pass without warm-up. Items are split over the ranks; each takes `seconds`."""
    work = measurement.cell.workload
    assert isinstance(work, NoopWorkload)
    share = work.items // context.world_size + (context.rank < work.items % context.world_size)
    context.barrier()
    if work.fault is not None and context.rank == work.fault_rank and measurement.attempt <= work.fault_attempts:
        _misbehave(work.fault)
    began = time.perf_counter()
    held = _touched(work.allocate_bytes)
    time.sleep(work.seconds * share)
    context.barrier()
    pass_seconds = time.perf_counter() - began
    del held
    return RankResult(figures={"items": share}, samples={"pass_seconds": np.array([pass_seconds])})


def _touched(size_bytes: int) -> np.ndarray:
    """Return memory that is really allocated: the kernel provides a page only when it is written."""
    memory = np.empty(size_bytes, dtype=np.uint8)
    memory[:: mmap.PAGESIZE] = 1
    return memory


def _misbehave(fault: str) -> None:
    if fault == "raise":
        raise RuntimeError("the noop workload was told to raise")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        while True:
            time.sleep(3600)
    _run_out_of_memory()


def _run_out_of_memory() -> None:
    """Allocate until Python raises MemoryError, under a separate limit so that the machine is safe."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * mmap.PAGESIZE
    limit = used_bytes + _HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if before[1] < 0 else min(limit, before[1]), before[1]))
    pieces: list[bytearray] = []
    try:
        while True:
            pieces.append(bytearray(_PIECE_BYTES))
    finally:
        pieces.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)
