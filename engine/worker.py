"""A rank: visits the cells of its launch and writes its own part of every record.

Started by torchrun on each rank. A part is on disk before the next visit begins and before any teardown,
so that whatever ends this process takes at most the visit that was going on.

    python -m engine.worker JOB_JSON      (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR... in the environment)
"""

import gc
import importlib
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.failures import classify, log_line, one_line, report
from engine.joining import make_context
from engine.processes import Place, ProgressFile, die_with_parent, leave, pin, place_from_environment, redirect_output
from engine.profiling.nsys import UNDER_NSYS, run_under_nsys

if TYPE_CHECKING:
    from configs.job import Job, Visit
    from configs.paths import JobPaths
    from configs.record import Failure, Figure, RankPart
    from engine.context import Context, Outcome, Samples, Workload

# Module with a function `run(visit, context) -> Outcome`, by kind of workload.
WORKLOADS = {
    "generate": "engine.generate",
    "seq2seq": "engine.seq2seq",
    "encode": "engine.encode",
    "train": "engine.training.workload",
    "noop": "engine.noop",
    "communication": "engine.communication",
    "preflight": "engine.preflight",
}


class PartNotWrittenError(Exception):
    """The rank's own part could not be put on disk: nothing that it measures from here on can be kept."""


class Meter:
    """CPU time, storage traffic and wall time from its creation on; the first rank of a node tells of its cores."""

    def __init__(self, place: Place) -> None:
        from configs.base import utc_now
        from engine import measure

        self._place = place
        self.started_at = utc_now()
        self._busy = measure.machine_busy_seconds(place.allowed) if place.local_rank == 0 else None
        self._storage = measure.storage_bytes()
        self._cpu = measure.process_cpu_seconds()
        self._began = time.perf_counter()

    def figures(self) -> "dict[str, Figure]":
        """Figures of the visit up to now; `cpu_busy_seconds` is of all processes on the job's cores."""
        from engine import measure

        visit_seconds = time.perf_counter() - self._began
        cpu_seconds = measure.process_cpu_seconds() - self._cpu
        storage = measure.storage_bytes()
        figures: dict[str, Figure] = {
            "visit_seconds": visit_seconds,
            "cpu_seconds": cpu_seconds,
            "cpu_utilization": cpu_seconds / visit_seconds / len(self._place.cores),
            "threads": self._place.threads,
            "io_read_bytes": storage.read - self._storage.read if storage and self._storage else None,
            "io_write_bytes": storage.written - self._storage.written if storage and self._storage else None,
        }
        if self._place.local_rank == 0:
            busy = measure.machine_busy_seconds(self._place.allowed)
            figures["machine_cores"] = len(self._place.allowed)
            figures["cpu_busy_seconds"] = None if busy is None or self._busy is None else busy - self._busy
        return figures


def load_workload(kind: str) -> "Workload":
    """The function that makes visits of this kind of workload."""
    workload: Workload = importlib.import_module(WORKLOADS[kind]).run
    return workload


def write_part(part: "RankPart", samples: "Samples", paths: "JobPaths") -> None:
    """Samples first, so that a part that exists has its samples. Raises PartNotWrittenError."""
    import numpy as np

    from configs.base import write_atomically

    target = paths.samples(part.visit, part.rank)
    try:
        if samples:
            archive = io.BytesIO()
            np.savez(archive, allow_pickle=False, **samples)
            write_atomically(target, archive.getvalue())
        target = paths.part(part.visit, part.rank)
        write_atomically(target, part.model_dump_json())
    except OSError as error:
        raise PartNotWrittenError(f"{error.strerror or error} (while writing {target})") from error


def make_visit(
    visit: "Visit", context: "Context", place: Place, environment: dict[str, Any], workload: "Workload"
) -> "Failure | None":
    """Run one visit and put its part on disk; what was raised is in the part, logged and returned."""
    import socket

    from configs.base import utc_now
    from configs.record import Failure, RankPart, Status

    meter = Meter(place)
    common = {
        "visit": visit.name,
        "rank": place.rank,
        "host": socket.gethostname(),
        "started_at": meter.started_at,
        "environment": environment,
    }
    failure: Failure | None = None
    outcome: Outcome | None = None
    try:
        outcome, memory = run_workload(visit, context, workload)
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
        report(f"visit {visit.name}: {status}")
        if place.world_size > 1:
            keep_flight_recorder(visit, context)
        if status is Status.OUT_OF_MEMORY:
            context.kept.clear()
    write_part(part, outcome.samples if outcome and not failure else {}, context.paths)
    if not failure:
        log_line(f"visit {visit.name} ({visit.cell.label}): completed in {part.figures['visit_seconds']:.2f} s")
    return failure


def keep_flight_recorder(visit: "Visit", context: "Context") -> None:
    """Leave what this rank's groups did last beside its part; that must not hide why the visit failed."""
    from engine.parallel import flight

    try:
        flight.dump(context.paths.flight_recorder(visit.name, context.rank))
    except Exception:
        report("the flight recorder could not be kept")


def run_workload(visit: "Visit", context: "Context", workload: "Workload") -> "tuple[Outcome, dict[str, Figure]]":
    """The workload's outcome; in the memory pass also what it took of memory at most.

    A workload that loads a model begins the peak anew after that, and gives the loading's own as a figure.
    """
    if context.measuring_pass == "profile":
        from engine.profiling.record import profiled_visit

        return profiled_visit(visit, context, workload), {}
    if context.measuring_pass == "perf":
        from engine.profiling.perf import perf_visit

        return perf_visit(visit, context, workload), {}
    if context.measuring_pass == "nsys":
        from engine.profiling.nsys import nsys_visit

        return nsys_visit(visit, context, workload), {}
    if not context.memory_pass:
        return timed_visit(visit, context, workload)
    import torch

    from engine import measure

    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    measure.reset_peak_memory()
    before = torch.cuda.memory_allocated(context.device) if on_gpu else measure.resident_memory_bytes()
    outcome = workload(visit, context)
    host_peak = measure.peak_memory_bytes()
    peak = torch.cuda.max_memory_allocated(context.device) if on_gpu else host_peak
    figures: dict[str, Figure] = {
        "peak_memory_bytes": peak,
        "baseline_memory_bytes": before,
        "memory_growth_bytes": None if peak is None or before is None else peak - before,
    }
    if on_gpu:
        figures["peak_host_memory_bytes"] = host_peak
    return outcome, figures


def timed_visit(visit: "Visit", context: "Context", workload: "Workload") -> "tuple[Outcome, dict[str, Figure]]":
    """The workload's outcome; on a GPU also what its clocks, power and temperature were meanwhile."""
    if context.device.type != "cuda":
        return workload(visit, context), {}
    from engine.profiling.gpu import GpuSampler

    with GpuSampler(context.device.index or 0) as sampler:
        outcome = workload(visit, context)
    return outcome, sampler.figures()


def visit_and_tell(
    visit: "Visit",
    context: "Context",
    place: Place,
    environment: dict[str, Any],
    workload: "Workload",
    progress: ProgressFile,
) -> int:
    """One visit with its progress. Returns an exit code other than 0 where the launch cannot go on.

    A group of ranks is not consistent any more after an exception on one of them; one rank alone is.
    """
    progress.say("visit", visit.name)
    try:
        failure = make_visit(visit, context, place, environment, workload)
    except PartNotWrittenError as error:
        report(f"visit {visit.name}: its part is lost")
        progress.say("failed", visit.name, kind="OSError", message=one_line(error))
        return 1
    if failure is not None and place.world_size > 1:
        progress.say("failed", visit.name, kind=failure.kind, message=failure.message)
        return 1
    if failure is not None:
        gc.collect()
    progress.say("ready")
    return 0


def run_timed(job: "Job", paths: "JobPaths", place: Place, progress: ProgressFile) -> int:
    """All visits in this process, in the job's order, with one process group."""
    context, environment = make_context(job, paths, place)
    workload = load_workload(job.cell.workload.kind)
    progress.say("ready")
    for visit in job.visits:
        if code := visit_and_tell(visit, context, place, environment, workload, progress):
            return code
    if place.world_size > 1:
        import torch.distributed as dist

        context.barrier()  # nobody tears down while a peer still has a part to write
        context.communicators.close()
        dist.destroy_process_group()
    return 0


def run_memory(job: "Job", paths: "JobPaths", place: Place, progress: ProgressFile) -> int:
    """Each visit in a fresh child: a process that has run a larger cell hides a smaller one's peak.

    The parent has the libraries and nothing else: no CUDA, no threads, no process group may exist when it forks.
    """
    import numpy  # noqa: F401  # what every child needs is imported once
    import torch  # noqa: F401

    import engine.context  # noqa: F401

    workload = load_workload(job.cell.workload.kind)
    if job.cell.layout.strategy.startswith("zero"):
        from engine.training.zero.start import preload

        preload()
    parent = os.getpid()
    for visit in job.visits:
        progress.say("visit", visit.name)
        pid = os.fork()
        if pid == 0:
            leave(_memory_child(visit, job, paths, place, progress, workload, parent))
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            message = f"the process that measured memory was ended by {name}"
            progress.say("failed", visit.name, kind=name, message=message)
            return 1
        if os.WEXITSTATUS(status):
            return 1  # the child has said why
        progress.say("ready")
    return 0


def _memory_child(
    visit: "Visit",
    job: "Job",
    paths: "JobPaths",
    place: Place,
    progress: ProgressFile,
    workload: "Workload",
    parent: int,
) -> int:
    die_with_parent(parent)
    try:
        context, environment = make_context(job, paths, place, prefix=visit.name)
        return visit_and_tell(visit, context, place, environment, workload, progress)
    except Exception as error:
        report(f"visit {visit.name}: could not begin")
        progress.say("failed", visit.name, kind=classify(error, place.world_size)[1], message=one_line(error))
        return 1


def main(arguments: list[str]) -> int:
    """Run the launch's part that is this rank's. Returns the exit code."""
    if UNDER_NSYS not in os.environ:  # its parent then is nsys, which ends with the rank that it replaced
        die_with_parent()
    if len(arguments) != 1:
        print("usage: python -m engine.worker JOB_JSON", file=sys.stderr)
        return 2
    path = Path(arguments[0]).resolve()
    from configs.job import Job
    from configs.paths import JobPaths

    place = place_from_environment()
    paths = JobPaths(path.parent)
    redirect_output(paths.rank_log(place.rank))
    progress = ProgressFile(paths.progress(place.rank), place.rank)
    try:
        job = Job.model_validate_json(path.read_bytes()).located(paths.folder)
        paths.parts.mkdir(exist_ok=True)
        if job.measuring_pass == "nsys":
            run_under_nsys(job, path, paths, place)
        pin(place, job.cell.cores_per_rank)
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
