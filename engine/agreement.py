"""What ranks must agree on, outside of anything timed: how long to go on, and whether to go on at all.

Ranks that decided alone would make different numbers of passes, and wait for each other for ever.
On one rank every function returns at once and needs no process group.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.context import Context

Result = TypeVar("Result")


def largest(value: float, context: Context) -> float:
    """The largest of all ranks' values."""
    if context.world_size == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=context.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.item()


def total(values: torch.Tensor, context: Context) -> torch.Tensor:
    """The sum over all ranks, element by element."""
    if context.world_size == 1:
        return values
    shared = values.to(context.device, copy=True)
    dist.all_reduce(shared, op=dist.ReduceOp.SUM)
    return shared.to(values.device)


def together(work: Callable[[], Result], context: Context) -> Result:
    """Do work on every rank; where it raises ValueError or OSError on one rank, every rank raises.

    So that a mistake in one rank's share of the input ends the cell at once on all of them.
    """
    result: list[Result] = []
    problem: Exception | None = None
    try:
        result.append(work())
    except (ValueError, OSError) as error:
        problem = error
    if context.world_size > 1:
        problems: list[str | None] = [None] * context.world_size
        dist.all_gather_object(problems, str(problem) if problem else None)
        others = [text for text in problems if text is not None]
        if problem is None and others:
            raise ValueError(others[0])
    if problem is not None:
        raise problem
    return result[0]
