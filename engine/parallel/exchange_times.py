"""Small exchanges as a step has them: each follows work, to which ranks come and from which they leave one by one.

    work = cold_products()
    sum_seconds(way, tensor, work)                 # what an all-reduce adds to the work before it
    message_seconds(way, tensor, work, (0, 1), 0)  # one way from the first to the second of two ranks, and back

In a tight loop ranks arrive together with their code and buffers in the caches, so that an all-reduce through shared
memory takes a microsecond; between products it takes ten or more. All ranks of the group call these functions together.
"""

import statistics
import time
from collections.abc import Callable

import torch

from engine.parallel.transports import Transport

_WINDOWS, _CALLS = 5, 10
_SIDE, _MATRICES = 1024, 8
"""Matrices of 4 MiB, 32 MiB in all: each product reads its weights from memory, as those of a decode step do."""
_LEAST_SECONDS = 1e-7  # a difference of two measured times may be negative


def cold_products() -> Callable[[], object]:
    """Return a product of one row with weights that no cache holds, about 0.1 ms on a core."""
    weights = [torch.full((_SIDE, _SIDE), 0.01) for _ in range(_MATRICES)]
    row, turn = torch.ones(_SIDE), 0

    def work() -> torch.Tensor:
        nonlocal turn
        turn = (turn + 1) % _MATRICES
        return torch.mv(weights[turn], row)

    return work


def sum_seconds(way: Transport, tensor: torch.Tensor, work: Callable[[], object]) -> float:
    """Return the seconds by which an all-reduce after each piece of work prolongs it: median of the windows."""

    def both() -> None:
        work()
        way.all_reduce(tensor)

    both()
    return _prolonged(way, both, work)


def message_seconds(
    way: Transport, tensor: torch.Tensor, work: Callable[[], object], ends: tuple[int, int], index: int
) -> float:
    """Return the seconds of a message between two ranks of the group, each of which works before it sends.

    index: of this rank in the group. Ranks that are no end only wait.
    """
    first, second = ends

    def there_and_back() -> None:
        if index == first:
            work()
            way.send(tensor, second)
            way.receive(tensor, second)
        elif index == second:
            way.receive(tensor, first)
            work()
            way.send(tensor, first)

    def work_of_both() -> None:
        if index in ends:
            work()
            work()

    there_and_back()
    return max(_LEAST_SECONDS, _prolonged(way, there_and_back, work_of_both) / 2)


def _prolonged(way: Transport, whole: Callable[[], object], part: Callable[[], object]) -> float:
    taken = [_seconds(way, whole) - _seconds(way, part) for _ in range(_WINDOWS)]
    return max(_LEAST_SECONDS, statistics.median(taken))


def _seconds(way: Transport, call: Callable[[], object]) -> float:
    """Return the seconds of one call, of several in a row; ranks begin together."""
    way.barrier()
    began = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - began) / _CALLS
