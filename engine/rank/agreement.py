"""Agreement among ranks, outside of timed work: when to stop, and whether to continue.

Ranks that decided alone would run different numbers of passes, and deadlock. On one rank every function returns at once
and needs no process group.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from engine.context import Context

_Result = TypeVar("_Result")


def max_over_ranks_of(value: float, context: Context) -> float:
    """Return the maximum of all ranks' values."""
    if context.world_size == 1:
        return value
    shared = torch.tensor(value, dtype=torch.float64, device=context.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.item()


def total(values: torch.Tensor, context: Context) -> torch.Tensor:
    """Return the sum over all ranks, element by element."""
    if context.world_size == 1:
        return values
    shared = values.to(context.device, copy=True)
    dist.all_reduce(shared, op=dist.ReduceOp.SUM)
    return shared.to(values.device)


def raise_on_all_ranks(work: Callable[[], _Result], context: Context) -> _Result:
    """Run work on every rank; if it raises ValueError, OSError or FloatingPointError on one rank, every rank raises.

    An error in one rank's share of the input thus ends the cell at once on all of them.
    """
    result: list[_Result] = []
    problem: Exception | None = None
    try:
        result.append(work())
    except (ValueError, OSError, FloatingPointError) as error:
        problem = error
    if context.world_size > 1:
        problems: list[tuple[bool, str] | None] = [None] * context.world_size
        dist.all_gather_object(problems, (isinstance(problem, FloatingPointError), str(problem)) if problem else None)
        others = [each for each in problems if each is not None]
        if problem is None and others:
            not_finite, text = others[0]
            raise FloatingPointError(text) if not_finite else ValueError(text)
    if problem is not None:
        raise problem
    return result[0]
