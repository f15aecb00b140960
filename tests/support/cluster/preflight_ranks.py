"""What one rank of a pool does as a rank of a preflight job."""

from pathlib import Path

import torch
import torch.distributed as dist

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.records.record import Figure
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.preflight import PreflightWorkload
from engine.context import Context
from engine.workloads.preflight import run


def trial(rank: int, nodes: int) -> tuple[dict[str, Figure], dict[str, list[float]]]:
    """Figures and columns of one rank; all ranks of the pool are shared out over so many nodes."""
    ranks = dist.get_world_size()
    cell = Cell(workload=PreflightWorkload(seconds=0.01), layout=Layout(dp=ranks), nodes=nodes)
    measurement = Measurement(cell=cell, repeat=0, attempt=1)
    job = Job(
        name="j",
        study="s",
        measuring_pass="timed",
        measuring=Measuring(group_timeout_seconds=20),
        measurements=(measurement,),
        ranks_per_node=ranks // nodes,
        timeout_seconds=60,
        inputs="/nowhere",
        cache="/nowhere",
    )
    context = Context(job, JobPaths(Path("/nowhere")), rank, ranks, torch.device("cpu"), None, dist.barrier)
    outcome = run(measurement, context)
    return outcome.figures, {name: column.tolist() for name, column in outcome.samples.items()}
