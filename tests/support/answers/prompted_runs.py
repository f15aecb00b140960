"""Whole measurements of prompted workloads on ranks of a pool; no transformers here unless a cell's engine is."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import MeasuringPass, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads import Workload
from engine.context import Context, RankResult
from engine.parallel.communicator import Communicators, open_communicators
from engine.parallel.grid import Grid
from engine.worker import load_workload
from tests.support.cluster.launches import launch, part

RULES = Measuring(min_seconds=0, min_passes=2, warmup=1)


def made_measurement(
    folder: Path, workload: Workload, measuring_pass: MeasuringPass = "timed", **cell: Any
) -> tuple[Measurement, Job]:
    """A measurement and its job; prompts lie in `folder`/inputs. cell: further fields of the cell."""
    measurement = Measurement(cell=Cell(model="m", workload=workload, **cell), repeat=0, attempt=1)
    job = Job(
        name="job",
        study="s",
        measuring_pass=measuring_pass,
        measuring=RULES,
        measurements=(measurement,),
        ranks_per_node=measurement.cell.layout.ranks,
        timeout_seconds=60,
        inputs=str(folder / "inputs"),
        cache=str(folder / "cache"),
    )
    return measurement, job


def made_context(folder: Path, manifest: ModelManifest, job: Job, rank: int = 0) -> Context:
    """The surroundings of a rank of the pool."""
    layout = job.measurements[0].cell.layout
    context = Context(job, JobPaths(folder), rank, layout.ranks, torch.device("cpu"), manifest, lambda: None)
    if layout.ranks > 1:
        import torch.distributed as dist

        context.barrier = dist.barrier
        context.communicators = _communicators(layout, rank)
    return context


_OPENED: dict[tuple[Layout, int], Communicators] = {}


def _communicators(layout: Layout, rank: int) -> Communicators:
    if (layout, rank) not in _OPENED:
        _OPENED[layout, rank] = open_communicators(Grid.of(layout, rank), torch.device("cpu"), "gloo", 60)
    return _OPENED[layout, rank]


def measurement_alone(folder: Path, manifest: ModelManifest, workload: Workload, **cell: Any) -> RankResult:
    """What one rank's measurement gives."""
    measurement, job = made_measurement(folder, workload, **cell)
    return load_workload(measurement.cell)(measurement, made_context(folder, manifest, job))


def launched(folder: Path, manifest: ModelManifest, workload: Workload, **cell: Any) -> list[dict[str, np.ndarray]]:
    """The samples of each rank of a launch as the product makes it: processes, groups and parts are the worker's."""
    measurement, job = made_measurement(folder, workload, **cell)
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    paths = JobPaths(folder / "jobs" / workload.kind)
    paths.folder.mkdir(parents=True)
    paths.job.write_text(job.model_copy(update={"manifest": str(folder / "manifest.json")}).model_dump_json())
    end = launch(paths)
    assert end.status is Status.COMPLETED, end
    found = []
    for rank in range(measurement.cell.layout.ranks):
        assert part(paths, measurement, rank).status is Status.COMPLETED
        path = paths.samples(measurement.name, rank)
        found.append(dict(np.load(path)) if path.is_file() else {})
    return found


def measurement_on_rank(
    rank: int, folder: str, manifest: str, workload: Workload, cell: dict[str, Any]
) -> dict[str, Any]:
    """What a rank's measurement gives: its figures and samples, or the error that it is refused with."""
    measurement, job = made_measurement(Path(folder), workload, **cell)
    context = made_context(Path(folder), ModelManifest.model_validate_json(manifest), job, rank)
    try:
        outcome = load_workload(measurement.cell)(measurement, context)
    except (ValueError, FloatingPointError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"figures": outcome.figures, "samples": outcome.samples}
