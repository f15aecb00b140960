"""nsys pass: each rank runs as a child of NVIDIA's `nsys profile`, which writes one report a rank.

A rank replaces itself by nsys (exec) before large imports, so that torchrun still monitors it; nsys restarts the rank.
If every rank has a GPU, only the region marked by the workload is recorded, between cudaProfilerStart and
cudaProfilerStop (Nsight Systems user guide, `--capture-range=cudaProfilerApi`); elsewhere the whole rank is. A report
is written when its rank ends, so a launch of this pass makes one measurement (`configs.plans.packing`).

    run_under_nsys(job, job_json, paths, place)     # does not return in the first process; nothing in the second
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.plans.job import Job, Measurement
    from configs.plans.paths import JobPaths
    from engine.context import Context, RankResult, WorkloadFunction
    from engine.rank.processes import RankPlace

UNDER_NSYS = "RANKWISE_UNDER_NSYS"
"""Environment variable of a rank started by nsys."""


def run_under_nsys(job: "Job", job_json: Path, paths: "JobPaths", place: "RankPlace") -> None:
    """Replace this rank by `nsys profile` of itself; return at once if started by nsys. Raises OSError."""
    if os.environ.get(UNDER_NSYS):
        return
    report = paths.nsys_report(job.measurements[0].name, place.rank)
    command = ["nsys", "profile", "--output", str(report.with_suffix("")), "--force-overwrite", "true"]
    command += ["--trace", "cuda,nvtx,osrt"]
    on_gpus = job.target.device != "cpu"
    if on_gpus and gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) >= place.local_world_size:
        command += ["--capture-range", "cudaProfilerApi", "--capture-range-end", "stop"]
    rank = [sys.executable, "-u", "-m", "engine.worker", str(job_json)]
    os.execvpe(command[0], [*command, *rank], os.environ | {UNDER_NSYS: "1"})


def gpus(visible: str | None, devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs visible to a process, without the driver. visible: CUDA_VISIBLE_DEVICES."""
    there = sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    if visible is None:
        return there
    names = [name.strip() for name in visible.split(",") if name.strip()]
    # Those after an index that does not exist, such as -1, are hidden too (CUDA C++ Programming Guide).
    return min(there, len(list(takewhile(lambda name: not name.startswith("-"), names))))


def nsys_measurement(measurement: "Measurement", context: "Context", workload: "WorkloadFunction") -> "RankResult":
    """Run the workload; on a GPU the report holds its marked region.

    Raises NotImplementedError if the workload marks no region.
    """
    from engine.context import RankResult
    from engine.profiling.region import run_recorded

    seconds: list[float] = []
    outcome = run_recorded(measurement, context, workload, lambda: _recorded(context, seconds))
    return RankResult(outcome.figures | {"nsys_wall_seconds": seconds[0]})


@contextmanager
def _recorded(context: "Context", seconds: list[float]) -> Iterator[None]:
    """Record the region: ranks begin together; on a GPU nsys gets start and stop."""
    import torch

    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(context.device)
    context.barrier()
    if on_gpu:
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    yield
    if on_gpu:
        torch.cuda.synchronize(context.device)
    seconds.append(time.perf_counter() - began)
    if on_gpu:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
