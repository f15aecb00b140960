"""Worker of a rank: measures the cells of its launch and writes its part of every record.

Started by torchrun on each rank. A part is on disk before the next measurement begins and before any teardown, so that
a crash loses at most the current measurement.

    python -m engine.worker JOB_JSON      (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR... in the environment)
"""

import gc
import importlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.profiling.nsys import UNDER_NSYS, run_under_nsys
from engine.rank.binding import bind, devices_of_ranks
from engine.rank.failures import classify, log_line, one_line, report
from engine.rank.joining import DeviceError, make_context
from engine.rank.processes import (
    ProgressFile,
    RankPlace,
    die_with_parent,
    leave,
    place_from_environment,
    redirect_output,
)

if TYPE_CHECKING:
    from configs.plans.job import Job, Measurement
    from configs.plans.paths import JobPaths
    from configs.records.record import Failure, Figure, RankPart
    from configs.spec.cell import Cell
    from engine.context import Context, RankResult, Samples, WorkloadFunction

# Module with a function `run(measurement, context) -> Outcome`, by kind of workload; then of the cells of other
# engines.
WORKLOADS = {
    "generate": "engine.workloads.generate",
    "seq2seq": "engine.workloads.seq2seq",
    "encode": "engine.workloads.encode",
    "train": "engine.workloads.train",
    "serve": "engine.workloads.serve",
    "script": "engine.workloads.script",
    "noop": "engine.workloads.noop",
    "communication": "engine.workloads.communication",
    "preflight": "engine.workloads.preflight",
}
OTHER_ENGINES = "engine.workloads.other_engines"


class PartNotWrittenError(Exception):
    """The rank's part could not be written to disk, so no further measurement can be kept."""


def load_workload(cell: "Cell") -> "WorkloadFunction":
    """Return the function that measures cells of this kind of workload on this engine."""
    from configs.workloads import descriptor_of

    own = cell.engine == "rankwise" or descriptor_of(cell.workload).starts_server
    module = WORKLOADS[cell.workload.kind] if own else OTHER_ENGINES
    workload: WorkloadFunction = importlib.import_module(module).run
    return workload


def write_part(part: "RankPart", samples: "Samples", paths: "JobPaths") -> None:
    """Write a rank's part, samples first, so that a part that exists has its samples. Raises PartNotWrittenError."""
    import numpy as np

    from configs.common.base import write_atomically

    target = paths.samples(part.measurement, part.rank)
    try:
        if samples:
            archive = io.BytesIO()
            np.savez(archive, allow_pickle=False, **samples)
            write_atomically(target, archive.getvalue())
        target = paths.part(part.measurement, part.rank)
        write_atomically(target, part.model_dump_json())
    except OSError as error:
        raise PartNotWrittenError(f"{error.strerror or error} (while writing {target})") from error


def make_measurement(
    measurement: "Measurement",
    context: "Context",
    place: RankPlace,
    environment: dict[str, Any],
    workload: "WorkloadFunction",
) -> "Failure | None":
    """Run one measurement and write its part; an exception is recorded in the part, logged and returned."""
    import socket

    from configs.common.base import utc_now
    from configs.records.record import Failure, RankPart, Status
    from engine.rank.measurement_meter import MeasurementMeter

    meter = MeasurementMeter(place)
    common = {
        "measurement": measurement.name,
        "rank": place.rank,
        "host": socket.gethostname(),
        "started_at": meter.started_at,
        "environment": environment,
    }
    failure: Failure | None = None
    outcome: RankResult | None = None
    try:
        outcome, memory = run_workload(measurement, context, workload)
        figures = {**outcome.figures, **meter.figures(), **memory}
        part = RankPart(**common, status=Status.COMPLETED, finished_at=utc_now(), figures=figures)
    except Exception as error:
        status, kind = classify(error, place.world_size)
        log = context.paths.rank_log(place.rank)
        failure = Failure(
            message=one_line(error),
            rank=place.rank,
            kind=kind,
            log=str(log.relative_to(context.paths.folder.parent.parent)),
        )
        part = RankPart(**common, status=status, finished_at=utc_now(), failure=failure)
        report(f"measurement {measurement.name}: {status}")
        if place.world_size > 1:
            keep_flight_recorder(measurement, context)
        if status is Status.OUT_OF_MEMORY:
            context.kept.clear()
    write_part(part, outcome.samples if outcome and not failure else {}, context.paths)
    if not failure:
        log_line(
            f"measurement {measurement.name} ({measurement.cell.label}): completed in "
            f"{part.figures['measurement_seconds']:.2f} s"
        )
    return failure


def refuse_all(job: "Job", paths: "JobPaths", place: RankPlace, progress: ProgressFile, error: Exception) -> int:
    """Write the reason why this node cannot make the launch's measurements into a part of each. Returns 1."""
    import socket

    from configs.common.base import utc_now
    from configs.records.record import Failure, RankPart

    report("no measurement can be made here")
    status, kind = classify(error, place.world_size)
    log = str(paths.rank_log(place.rank).relative_to(paths.folder.parent.parent))
    now, failure = utc_now(), Failure(message=one_line(error), rank=place.rank, kind=kind, log=log)
    common = {"rank": place.rank, "host": socket.gethostname(), "status": status, "failure": failure}
    for measurement in job.measurements:
        part = RankPart(**common, measurement=measurement.name, started_at=now, finished_at=now)
        write_part(part, {}, paths)
    progress.say("failed", job.measurements[0].name, kind=kind, message=failure.message)
    return 1


def keep_flight_recorder(measurement: "Measurement", context: "Context") -> None:
    """Write this rank's flight recorder beside its part; failures here must not hide the original error."""
    from engine.parallel import flight_recorder as flight

    try:
        flight.dump(context.paths.flight_recorder(measurement.name, context.rank))
    except Exception:
        report("the flight recorder could not be kept")


def run_workload(
    measurement: "Measurement", context: "Context", workload: "WorkloadFunction"
) -> "tuple[RankResult, dict[str, Figure]]":
    """Return the workload's outcome; in the memory pass also its peak memory.

    After loading a model, a workload resets the peak, and reports that of the loading as a figure.
    """
    if context.measuring_pass == "profile":
        from engine.profiling.record import profiled_measurement

        return profiled_measurement(measurement, context, workload), {}
    if context.measuring_pass == "perf":
        from engine.profiling.perf import perf_measurement

        return perf_measurement(measurement, context, workload), {}
    if context.measuring_pass == "nsys":
        from engine.profiling.nsys import nsys_measurement

        return nsys_measurement(measurement, context, workload), {}
    if not context.memory_pass:
        return timed_measurement(measurement, context, workload)
    import torch

    from engine.rank import host_usage

    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    host_usage.reset_peak_memory()
    before = torch.cuda.memory_allocated(context.device) if on_gpu else host_usage.resident_memory_bytes()
    outcome = workload(measurement, context)
    host_peak = host_usage.peak_memory_bytes()
    peak = torch.cuda.max_memory_allocated(context.device) if on_gpu else host_peak
    figures: dict[str, Figure] = {
        "peak_memory_bytes": peak,
        "baseline_memory_bytes": before,
        "memory_growth_bytes": None if peak is None or before is None else peak - before,
    }
    if on_gpu:
        figures["peak_host_memory_bytes"] = host_peak
    return outcome, figures


def timed_measurement(
    measurement: "Measurement", context: "Context", workload: "WorkloadFunction"
) -> "tuple[RankResult, dict[str, Figure]]":
    """Return the workload's outcome; on a GPU also its name, clocks, power and temperature."""
    if context.device.type != "cuda":
        return workload(measurement, context), {}
    import torch

    from engine.profiling.gpu import GpuSampler

    name = torch.cuda.get_device_name(context.device)
    with GpuSampler(context.device.index or 0) as sampler:
        outcome = workload(measurement, context)
    return outcome, {"device": name} | sampler.figures()


def measure_and_report(
    measurement: "Measurement",
    context: "Context",
    place: RankPlace,
    environment: dict[str, Any],
    workload: "WorkloadFunction",
    progress: ProgressFile,
) -> int:
    """Run one measurement with its progress. Returns a non-zero exit code if the launch cannot continue.

    A group of ranks is inconsistent after an exception on one of them; a single rank is not.
    """
    progress.say("measurement", measurement.name)
    try:
        failure = make_measurement(measurement, context, place, environment, workload)
    except PartNotWrittenError as error:
        report(f"measurement {measurement.name}: its part is lost")
        progress.say("failed", measurement.name, kind="OSError", message=one_line(error))
        return 1
    if failure is not None and place.world_size > 1:
        progress.say("failed", measurement.name, kind=failure.kind, message=failure.message)
        return 1
    if failure is not None:
        gc.collect()
    progress.say("ready")
    return 0


def run_timed(job: "Job", paths: "JobPaths", place: RankPlace, progress: ProgressFile) -> int:
    """Run all measurements in this process, in the job's order, with one process group."""
    try:
        context, environment = make_context(job, paths, place)
    except DeviceError as error:
        return refuse_all(job, paths, place, progress, error)
    workload = load_workload(job.cell)
    progress.say("ready")
    with context.closing:
        for measurement in job.measurements:
            if code := measure_and_report(measurement, context, place, environment, workload, progress):
                return code
    if place.world_size > 1:
        import torch.distributed as dist

        context.barrier()  # no teardown while a peer still has a part to write
        if context.device.type == "cuda":
            context.kept.clear()  # recorded steps hold operations of NCCL, which has to outlive them
            gc.collect()
        context.communicators.close()
        dist.destroy_process_group()
    return 0


def run_memory(job: "Job", paths: "JobPaths", place: RankPlace, progress: ProgressFile) -> int:
    """Run each measurement in a fresh child, because a larger cell's peak would hide a smaller one's.

    The parent has only the libraries: no CUDA, no threads, no process group may exist when it forks.
    """
    import numpy  # noqa: F401  # what every child needs is imported once
    import torch  # noqa: F401

    import engine.context  # noqa: F401

    workload = load_workload(job.cell)
    if job.cell.layout.strategy.startswith("zero"):
        from engine.training.zero.start import preload_deepspeed

        preload_deepspeed()
    parent = os.getpid()
    for measurement in job.measurements:
        progress.say("measurement", measurement.name)
        pid = os.fork()
        if pid == 0:
            leave(_memory_child(measurement, job, paths, place, progress, workload, parent))
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            message = f"the process that measured memory was ended by {name}"
            progress.say("failed", measurement.name, kind=name, message=message)
            return 1
        if os.WEXITSTATUS(status):
            return 1  # the child has reported the reason
        progress.say("ready")
    return 0


def _memory_child(
    measurement: "Measurement",
    job: "Job",
    paths: "JobPaths",
    place: RankPlace,
    progress: ProgressFile,
    workload: "WorkloadFunction",
    parent: int,
) -> int:
    die_with_parent(parent)
    try:
        context, environment = make_context(job, paths, place, prefix=measurement.name)
        return measure_and_report(measurement, context, place, environment, workload, progress)
    except DeviceError as error:
        return refuse_all(job, paths, place, progress, error)
    except Exception as error:
        report(f"measurement {measurement.name}: could not begin")
        progress.say("failed", measurement.name, kind=classify(error, place.world_size)[1], message=one_line(error))
        return 1


def main(arguments: list[str]) -> int:
    """Run this rank's part of the launch. Returns the exit code."""
    if UNDER_NSYS not in os.environ:  # otherwise its parent is nsys, which ends with the rank that it replaced
        die_with_parent()
    if len(arguments) != 1:
        print("usage: python -m engine.worker JOB_JSON", file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    from configs.common.files.reading import PLAN_BYTES, read_model
    from configs.plans.job import Job
    from configs.plans.paths import JobPaths
    from configs.workloads import descriptor_of

    place = place_from_environment()
    paths = JobPaths(path.parent)
    redirect_output(paths.rank_log(place.rank))
    progress = ProgressFile(paths.progress(place.rank), place.rank)
    try:
        job = read_model(path, Job, PLAN_BYTES).located(paths.folder)
        paths.parts.mkdir(exist_ok=True)
        if job.measuring_pass == "nsys":
            run_under_nsys(job, path, paths, place)
        if not descriptor_of(job.cell.workload).starts_server:  # which has the cores of all ranks
            bind(place, job.cell.cores_per_rank, devices_of_ranks(place, job.target))
        run = run_memory if job.measuring_pass == "memory" else run_timed
        code = run(job, paths, place, progress)
    except Exception as error:
        report("the launch ends here")
        progress.say("failed", kind=_kind(error, place.world_size), message=one_line(error))
        return 1
    if code == 0:
        progress.say("finished")
    return code


def _kind(error: Exception, world_size: int) -> str:
    # Without torch there is no group, and so no peer to lose.
    return classify(error, world_size)[1] if "torch" in sys.modules else type(error).__name__


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
