"""Sums over ranks that are left out, come too early or are rounded."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.support.answers.correctness_runs import Rank
from tests.support.planted_defects.planting import on_rank, tensor_parallel


class _SkippingGroup:
    """A communicator that leaves out one all-reduce of each forward pass."""

    transport = "planted"  # so that all sums are all-reduces, whatever their size

    def __init__(self, group: Any, place: int, calls: int, broken: Callable[[Tensor], Tensor]) -> None:
        self._group, self._place, self._calls, self._broken, self._count = group, place, calls, broken, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        place, self._count = self._count % self._calls, self._count + 1
        if place == self._place:
            return self._broken(tensor)
        return self._group.all_reduce(tensor)


def _calls(rank: Rank) -> int:
    return 2 * len(rank.shard.layers) + rank.grid.is_first_stage


@on_rank("missing all-reduce", tensor_parallel)
def _missing(rank: Rank) -> None:
    calls = _calls(rank)
    rank.shard.group = _SkippingGroup(rank.shard.group, calls - 1, calls, lambda tensor: tensor)  # type: ignore[assignment]


@on_rank("all-reduce in 16 bits", lambda config, setting: setting.tp > 1 and setting.dtype == "float32")
def _coarse(rank: Rank) -> None:
    calls, group = _calls(rank), rank.shard.group

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.copy_(group.all_reduce(tensor.bfloat16()).to(tensor.dtype))

    rank.shard.group = _SkippingGroup(group, calls - 2, calls, rounded)  # type: ignore[assignment]


@on_rank("all-reduce gives the mean", tensor_parallel)
def _mean(rank: Rank) -> None:
    calls, group, tp = _calls(rank), rank.shard.group, rank.grid.tp
    rank.shard.group = _SkippingGroup(group, calls - 2, calls, lambda t: group.all_reduce(t).div_(tp))  # type: ignore[assignment]


@on_rank("an all-reduce reads one rank's buffer too early", tensor_parallel)
def _race(rank: Rank) -> None:
    """A quarter of the values of one sum lacks the last rank's part, now and then."""
    calls, group, counter = _calls(rank), rank.shard.group, [0]

    def early(tensor: Tensor) -> Tensor:
        counter[0] += 1
        own = tensor.clone()
        if counter[0] % 7 == 0 and rank.grid.tp_rank == rank.grid.tp - 1:
            own.view(-1)[: own.numel() // 4] = 0
        return tensor.copy_(group.all_reduce(own))

    rank.shard.group = _SkippingGroup(group, calls - 1, calls, early)  # type: ignore[assignment]
