"""A measurement of two ranks whose first one tells live streams how it goes, for the tests of the streams."""

from pathlib import Path
from typing import Any

import torch

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.paths import JobPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.train import TrainWorkload
from engine.context import Context
from engine.training.live import LiveStreams, open_live

LOSSES = [4.0, 3.5, 3.25]


def context_of(
    folder: Path, sinks: tuple[str, ...], rank: int = 0, measuring_pass: Any = "timed", nodes: int = 1
) -> Context:
    cell = Cell(model="m", workload=TrainWorkload(steps=3), layout=Layout(dp=2), nodes=nodes)
    job = Job(
        name="job",
        study="a study",
        measuring_pass=measuring_pass,
        measuring=Measuring(live=sinks, prometheus_port=0),
        measurements=(Measurement(cell=cell, repeat=1, attempt=1),),
        ranks_per_node=2 // nodes,
        timeout_seconds=60,
        inputs=str(folder),
        cache=str(folder),
    )
    paths = JobPaths(folder / "jobs" / "job")
    paths.folder.mkdir(parents=True, exist_ok=True)
    return Context(job, paths, rank, 2, torch.device("cpu"), None, lambda: None)


def opened(folder: Path, *sinks: str) -> LiveStreams:
    context = context_of(folder, sinks)
    return open_live(context.job.measurements[0], context)


def tell(live: LiveStreams, step: int, loss: float) -> None:
    live.tell(
        step=step, seconds=0.5, tokens=1024, loss=loss, gradient_norm=1.5, learning_rate=1e-3, exposed_seconds=0.1
    )
