"""What the ranks of the tests of bounds do: count steps whose seconds are told, and ask when to stop."""

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
from engine.rank import agreement
from engine.training import bounds
from engine.training.bounds import StepBudget, TrainingProgress


def context_of(work: TrainWorkload, world_size: int = 1, measuring_pass: Any = "timed", **rules: Any) -> Context:
    """A context that has a group of so many ranks, or none."""
    cell = Cell(model="m", workload=work, layout=Layout(dp=world_size))
    job = Job(
        name="job",
        study="s",
        measuring_pass=measuring_pass,
        measuring=Measuring.model_validate(rules),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),),
        ranks_per_node=world_size,
        timeout_seconds=60,
        inputs="",
        cache="",
    )
    return Context(job, JobPaths(Path()), 0, world_size, torch.device("cpu"), None, lambda: None)


def steps_until(
    context: Context, work: TrainWorkload, step_seconds: float, losses: list[float] | None = None, earlier: int = 0
) -> int:
    """Steps of this attempt until the bounds are reached, each of so many seconds. losses: after each step."""
    ends, here, warmup = StepBudget(work, context), 0, context.job.measuring.warmup
    while here < 10_000:
        loss = losses[here - 1] if losses and 0 < here <= len(losses) else None
        measured = max(0, here - warmup) * step_seconds
        done = TrainingProgress(earlier + here, here, (earlier + here) * step_seconds, measured, loss)
        if ends.reached(done):
            return here
        here += 1
    return here


def stop_together(rank: int, work: TrainWorkload, step_seconds: list[float], min_seconds: float) -> tuple[int, int]:
    """Steps of a rank that takes so long for each, and how often it asked the others."""
    context, asked = context_of(work, len(step_seconds), min_seconds=min_seconds, warmup=2), 0
    plain = agreement.max_over_ranks_of

    def counted(value: float, within: Context) -> float:
        nonlocal asked
        asked += 1
        return plain(value, within)

    setattr(bounds, "max_over_ranks_of", counted)  # noqa: B010
    try:
        return steps_until(context, work, step_seconds[rank]), asked
    finally:
        setattr(bounds, "max_over_ranks_of", plain)  # noqa: B010
