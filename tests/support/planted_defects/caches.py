"""Positions and cached keys and values that are not those they should be."""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from tests.support.answers.correctness_runs import Rank
from tests.support.planted_defects.planting import batched, change_steps, on_rank


@on_rank("rotary position off by one while decoding")
def _rotary(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        if length == 1:
            cos, sin = cache.angles
            here = (cos[None, None, None] - step.angles[0][..., None, :]).abs().sum(-1).argmin(-1)
            step.angles = cos[here - 1], sin[here - 1]
        return step

    change_steps(rank, change)


@on_rank("rotary position of the queries off by one")
def _query_position(rank: Rank) -> None:
    original = rank.shard._attention

    def attention(self: Any, hidden: Tensor, layer: Any, place: int, step: Any) -> Tensor:
        if place == 0 and hidden.shape[1] > 1:
            step = replace(step, angles=tuple(each.roll(1, 1) for each in step.angles))
        return original(hidden, layer, place, step)

    rank.shard._attention = types.MethodType(attention, rank.shard)  # type: ignore[method-assign]


def _no_write(row: slice, values: bool) -> Callable[[Any, Any, int, int], Any]:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        if length == 1:
            slots = list(step.value_slots if values else step.key_slots)
            slots[0] = _Lossy(slots[0], row)
            if values:
                step.value_slots = tuple(slots)
            else:
                step.key_slots = tuple(slots)
        return step

    return change


class _Lossy:
    """A slot of the cache of which some rows are not written."""

    def __init__(self, slot: Tensor, rows: slice) -> None:
        self._slot, self._rows = slot, rows

    def copy_(self, source: Tensor) -> None:
        kept = self._slot[self._rows].clone()
        self._slot.copy_(source)
        self._slot[self._rows] = kept


@on_rank("stale key in the cache")
def _stale_key(rank: Rank) -> None:
    for cache in rank.replica._caches:
        cache.store.zero_()
    change_steps(rank, _no_write(slice(None), values=False))


@on_rank("stale value in the cache, in one row of the batch")
def _stale_value(rank: Rank) -> None:
    for cache in rank.replica._caches:
        cache.store.zero_()
    change_steps(rank, _no_write(slice(0, 1), values=True))


@on_rank("cache written at the wrong position for one row", batched)
def _wrong_slot(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        if length == 1 and cache.length > 1:
            before = cache.store[0, 0, 0, :, cache.length - 1]
            slots = list(step.key_slots)
            slots[0] = _Elsewhere(slots[0], before)
            step.key_slots = tuple(slots)
        return step

    for cache in rank.replica._caches:
        cache.store.zero_()
    change_steps(rank, change)


class _Elsewhere:
    """A slot whose first row is written to another place."""

    def __init__(self, slot: Tensor, other: Tensor) -> None:
        self._slot, self._other = slot, other

    def copy_(self, source: Tensor) -> None:
        self._slot[1:] = source[1:]
        self._other.copy_(source[0, :, 0])


@on_rank("cache in 16 bits", lambda config, setting: setting.dtype == "float32")
def _coarse_cache(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        cache.store.copy_(cache.store.bfloat16())
        return step

    for cache in rank.replica._caches:
        cache.store.zero_()
    change_steps(rank, change)
