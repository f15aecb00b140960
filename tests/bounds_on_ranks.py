"""What the ranks of the tests of bounds do: count steps whose seconds are told, and ask when to stop."""

from pathlib import Path
from typing import Any

import torch

from configs.cell import Cell, Layout
from configs.job import Job, Measuring, Visit
from configs.paths import JobPaths
from configs.training import TrainWorkload
from engine import agreement
from engine.context import Context
from engine.training import bounds
from engine.training.bounds import Bounds, Done


def context_of(work: TrainWorkload, world_size: int = 1, measuring_pass: Any = "timed", **rules: Any) -> Context:
    """A context that has a group of so many ranks, or none."""
    cell = Cell(model="m", workload=work, layout=Layout(dp=world_size))
    job = Job(
        name="job", study="s", measuring_pass=measuring_pass, measuring=Measuring.model_validate(rules),
        visits=(Visit(cell=cell, repeat=0, attempt=1),), ranks_per_node=world_size, timeout_seconds=60, inputs="",
        cache="",
    )  # fmt: skip
    return Context(job, JobPaths(Path()), 0, world_size, torch.device("cpu"), None, lambda: None)


def steps_until(
    context: Context, work: TrainWorkload, step_seconds: float, losses: list[float] | None = None, earlier: int = 0
) -> int:
    """Steps of this attempt until the bounds are reached, each of so many seconds. losses: after each step."""
    ends, here, warmup = Bounds(work, context), 0, context.job.measuring.warmup
    while here < 10_000:
        loss = losses[here - 1] if losses and 0 < here <= len(losses) else None
        measured = max(0, here - warmup) * step_seconds
        done = Done(earlier + here, here, (earlier + here) * step_seconds, measured, loss)
        if ends.reached(done):
            return here
        here += 1
    return here


def stop_together(rank: int, work: TrainWorkload, step_seconds: list[float], least_seconds: float) -> tuple[int, int]:
    """Steps of a rank that takes so long for each, and how often it asked the others."""
    context, asked = context_of(work, len(step_seconds), least_seconds=least_seconds, warmup=2), 0
    plain = agreement.largest

    def counted(value: float, within: Context) -> float:
        nonlocal asked
        asked += 1
        return plain(value, within)

    setattr(bounds, "largest", counted)  # noqa: B010
    try:
        return steps_until(context, work, step_seconds[rank]), asked
    finally:
        setattr(bounds, "largest", plain)  # noqa: B010
