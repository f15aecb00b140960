"""The nsys pass: a rank runs as a child of NVIDIA's `nsys profile`, which leaves one report a rank.

A rank puts nsys in its own place (exec) before it has imported anything large, so that torchrun still watches it;
nsys starts the rank again. Where every rank has a GPU only the region that the workload marks is recorded, between
cudaProfilerStart and cudaProfilerStop (Nsight Systems user guide, `--capture-range=cudaProfilerApi`); elsewhere the
whole rank is. A report is written when its rank ends, so a launch of this pass makes one visit (`configs.packing`).

    run_under_nsys(job, job_json, paths, place)     # does not return in the first process; nothing in the second
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.job import Job, Visit
    from configs.paths import JobPaths
    from engine.context import Context, Outcome, Workload
    from engine.processes import Place

UNDER_NSYS = "RANKWISE_UNDER_NSYS"
"""In the environment of a rank that nsys has started."""


def run_under_nsys(job: "Job", job_json: Path, paths: "JobPaths", place: "Place") -> None:
    """Become `nsys profile` of this very rank; return at once where nsys has started it. Raises OSError."""
    if os.environ.get(UNDER_NSYS):
        return
    report = paths.nsys_report(job.visits[0].name, place.rank)
    command = ["nsys", "profile", "--output", str(report.with_suffix("")), "--force-overwrite", "true"]
    command += ["--trace", "cuda,nvtx,osrt"]
    if gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) >= place.local_world_size:
        command += ["--capture-range", "cudaProfilerApi", "--capture-range-end", "stop"]
    rank = [sys.executable, "-u", "-m", "engine.worker", str(job_json)]
    os.execvpe(command[0], [*command, *rank], os.environ | {UNDER_NSYS: "1"})


def gpus(visible: str | None, devices: Path = Path("/dev")) -> int:
    """How many GPUs of NVIDIA a process sees, without asking the driver. visible: CUDA_VISIBLE_DEVICES."""
    there = sum(1 for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    return there if visible is None else min(there, len([name for name in visible.split(",") if name.strip()]))


def nsys_visit(visit: "Visit", context: "Context", workload: "Workload") -> "Outcome":
    """Run the workload; on a GPU the region that it marks is what the report holds.

    Raises NotImplementedError where the workload marks nothing.
    """
    from engine.context import Outcome

    marked: list[float] = []

    @contextmanager
    def region() -> Iterator[None]:
        if marked:
            yield
            return
        with _recorded(context, marked):
            yield

    context.region = region
    try:
        outcome = workload(visit, context)
    finally:
        context.region = nullcontext
    if not marked:
        raise NotImplementedError(
            f"measuring.profiler: a {visit.cell.workload.kind} workload by engine {visit.cell.engine} marks nothing "
            "to record"
        )
    return Outcome(outcome.figures | {"nsys_wall_seconds": marked[0]})


@contextmanager
def _recorded(context: "Context", seconds: list[float]) -> Iterator[None]:
    """Ranks begin together; on a GPU nsys is told of begin and end."""
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
