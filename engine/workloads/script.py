"""The script workload: one measurement on one node, and a part of the record for each of its ranks.

Unlike the other workloads it runs in no rank of ours: `engine.agents.script_agent`, one process on each node, calls it.
The parts are written here when the script has ended: what the ranks left decides, never an exit code alone.
"""

import math
import socket
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from configs.common.base import utc_now
from configs.common.failure_kinds import PEER_LOST
from configs.common.printable import plural_noun
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.records.record import Failure, Figure, RankPart, Status
from engine.planner.accelerators import local_accelerators
from engine.profiling.gpu import GpuSampler
from engine.rank.host_usage import machine_busy_seconds, measured_environment
from engine.scripts.commands import NodePlace, script_interpreter
from engine.scripts.node_run import NodeEnd, NodeRun
from engine.scripts.series import NoFiguresError, StepSeries, missing_figures, untimed
from engine.scripts.signs import RankEnd

_KILLED = "SIGKILL"
WritePart = Callable[[RankPart, dict[str, np.ndarray], JobPaths], None]


@dataclass
class FirstFailure:
    """The failure that came first on this node, with its rank; None: all ranks completed."""

    rank: int | None = None
    failure: RankEnd | None = None


@dataclass(frozen=True)
class _NodeFigures:
    """What was measured of a node while its ranks ran. common: figures of the whole node; gpu: of each device."""

    started_at: str
    cores: int
    common: dict[str, Figure]
    gpu: list[dict[str, Figure]]


def run(
    measurement: Measurement, job: Job, paths: JobPaths, place: NodePlace, cores: list[int], write_part: WritePart
) -> FirstFailure:
    """Measure the script and write the parts of this node's ranks. Raises ValueError where it could not be started."""
    started_at, busy = utc_now(), machine_busy_seconds(cores)
    devices = local_accelerators() if place.gpus else ()
    samplers = [GpuSampler(index, device.uuid) for index, device in enumerate(devices[: place.ranks_per_node])]
    running = NodeRun(measurement, job, paths, place)
    try:
        for sampler in samplers:
            sampler.__enter__()
        end = running.watch()
        for sampler in samplers:
            sampler.__exit__(None, None, None)
        after = machine_busy_seconds(cores)
        common: dict[str, Figure] = {
            "measurement_seconds": end.wall_seconds,
            "machine_cores": len(cores),
            "cpu_busy_seconds": None if busy is None or after is None else after - busy,
        }
        if running.launcher_seconds is not None:
            common["children_cpu_seconds"] = running.launcher_seconds
        gpu = [{"device": device.name, **sampler.figures()} for device, sampler in zip(devices, samplers, strict=False)]
        figures = _NodeFigures(started_at, len(cores), common, gpu)
        return _write_parts(measurement, job, running, end, figures, write_part)
    finally:
        running.close()


def _write_parts(
    measurement: Measurement,
    job: Job,
    running: NodeRun,
    end: NodeEnd,
    node: _NodeFigures,
    write_part: WritePart,
) -> FirstFailure:
    """Parts of all ranks; a rank that the kernel may have killed gets none, since the node's launcher knows why."""
    found, failures = _all_series(running, end, job)
    first = end.first if end.first in failures else next(iter(failures), None)
    environment = _environment(running, job, node.cores)
    for place, rank in enumerate(running.place.ranks):
        failure = failures.get(rank)
        if failure is not None and failure.kind == _KILLED:
            continue
        figures: dict[str, Figure] = {"cpu_seconds": running.cpu_seconds(rank)}
        figures["measurement_seconds"] = node.common["measurement_seconds"]
        figures |= node.common if place == 0 else {}
        figures |= node.gpu[place] if place < len(node.gpu) else {}
        if job.measuring_pass == "memory" and rank in running.peaks:
            figures |= {"peak_memory_bytes": running.peaks[rank]}
            figures |= {"baseline_memory_bytes": None, "memory_growth_bytes": None}
        series = found.get(rank)
        samples: dict[str, np.ndarray] = {}
        if series is not None and failure is None:
            units = running.work.units_per_step(running.cell.layout)
            samples = {name: np.array(column) for name, column in series.columns(units).items()}
            figures |= {"steps": len(series), "units_per_step": units, **series.own_figures()}
            figures |= {"stopped_early": end.stopped, "device_clock": series.device_clock}
            figures |= {"aborted_in_teardown": True} if rank in running.aborted else {}
        part = RankPart(
            measurement=measurement.name,
            rank=rank,
            host=socket.gethostname(),
            status=failure.status if failure else Status.COMPLETED,
            started_at=node.started_at,
            finished_at=utc_now(),
            failure=_failure(failure, rank, running),
            environment=environment if rank == running.place.ranks[0] else {},
            figures=figures,
        )
        write_part(part, samples, running.paths)
    return FirstFailure() if first is None else FirstFailure(first, failures[first])


def _all_series(running: NodeRun, end: NodeEnd, job: Job) -> tuple[dict[int, StepSeries], dict[int, RankEnd]]:
    """Steps of the ranks that tell of any, and the failures: those of the processes, then those of the figures."""
    work, failures, found = running.work, dict(end.failures), {}
    asked = work.stop_after.steps if work.stop_after is not None else None
    for rank in running.ranks:
        if rank in failures and failures[rank].kind != PEER_LOST:
            continue
        if running.reader not in (None, rank):
            # Lines, files and wall time are those of the whole job. The node that reads them may have ended its ranks.
            if running.is_mute and rank in failures and work.stop_after is not None:
                del failures[rank]
            continue
        try:
            series = running.series(rank, end.wall_seconds)
            if not len(series):
                lines = running.lines
                told = (lines.seen, lines.broken, lines.why_broken) if lines else (0,)
                raise NoFiguresError(missing_figures(work, *told))
        except NoFiguresError as error:
            failures.setdefault(rank, RankEnd(Status.FAILED, "NoFigures", str(error)))
            continue
        except (OSError, ValueError) as error:
            failures.setdefault(rank, RankEnd(Status.FAILED, "NoFigures", f"samples cannot be read: {error}"))
            continue
        if rank in failures and asked is not None and len(series) >= asked:
            del failures[rank]  # a node that had made its steps ended, and this one had too
        bad = series.bad_loss()
        if bad is not None:
            failures[rank] = RankEnd(Status.FAILED, "NaNLoss", f"the loss of step {bad[0]:,} is {bad[1]}")
            continue
        warmup = job.measuring.warmup if work.warmup_steps is None else work.warmup_steps
        stated = work.units_per_step(running.cell.layout)
        timed = zip(series.seconds, series.units, strict=True)
        if stated is None and work.counted != "step" and any(took is not None and told is None for took, told in timed):
            message = (
                f"no {plural_noun(work.counted)} were told with a step. Set workload.tokens_per_step, or unit: step"
            )
            failures.setdefault(rank, RankEnd(Status.FAILED, "NoFigures", message))
            continue
        found[rank] = series.cut(0 if work.measure in ("wall", "json") else warmup, asked)
        if not any(value is not None and math.isfinite(value) for value in found[rank].seconds):
            message = untimed(len(series), len(found[rank]), running.lines is not None)
            failures.setdefault(rank, RankEnd(Status.FAILED, "NoFigures", message))
    return found, failures


def _failure(end: RankEnd | None, rank: int, running: NodeRun) -> Failure | None:
    if end is None:
        return None
    logged = rank if rank in running.ranks else running.ranks[0]
    log = str(running.paths.rank_log(logged).relative_to(running.paths.folder.parent.parent))
    return Failure(message=end.message[:600], rank=rank, kind=end.kind, log=log)


def _environment(running: NodeRun, job: Job, cores: int) -> dict[str, object]:
    environment = measured_environment([*job.cell.env, *running.work.environment], cores)
    environment |= {"launcher": running.work.launcher, "script_python": script_interpreter(running.work)}
    return environment
