"""Defects that begin at a position, in a row of a batch or at a decode step, and are nothing before.

They are not among `DEFECTS`, because most cases do not reach them.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from configs.families.config import ModelConfig
from tests.support.answers.correctness_runs import Defect, Rank
from tests.support.planted_defects.planting import change_steps

POSITION, ROW, STEP = 256, 5, 20


def _no_window(config: ModelConfig) -> ModelConfig:
    return replace(config, windows=(None,) * len(config.windows))


def _wrong_rotation(rank: Rank) -> None:
    """As of a table of angles that was made for fewer positions and begins again."""
    for cache in rank.replica._caches:
        assert cache.angles is not None
        cache.angles = tuple(_begun_again(table) for table in cache.angles)  # type: ignore[assignment]


def _begun_again(table: Tensor) -> Tensor:
    changed = table.clone()
    changed[POSITION:] = table[: max(0, len(table) - POSITION)]
    return changed


def _empty_row(rank: Rank) -> None:
    original = rank.shard.forward

    def forward(inputs: Tensor, *rest: Any, **named: Any) -> Tensor:
        hidden = original(inputs, *rest, **named)
        if len(hidden) > ROW:
            hidden = hidden.clone()
            hidden[ROW] = 0
        return hidden

    rank.shard.forward = forward  # type: ignore[method-assign]


class _Unwritten:
    """A slot of the cache that keeps what it had."""

    def copy_(self, source: Tensor) -> None:
        pass


def _lost_step(rank: Rank) -> None:
    counts: dict[int, int] = {}

    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        counts[id(cache)] = 0 if length > 1 else counts.get(id(cache), 0) + 1
        if counts[id(cache)] == STEP:
            step.key_slots = (_Unwritten(), *step.key_slots[1:])
        return step

    for cache in rank.replica._caches:
        cache.store.zero_()
    change_steps(rank, change)


FAR = {
    defect.name: defect
    for defect in (
        Defect("attention window dropped", on_config=_no_window),
        Defect("wrong rotation beyond a position", on_rank=_wrong_rotation),
        Defect("a row of the batch zeroed", on_rank=_empty_row),
        Defect("cache not written at a decode step", on_rank=_lost_step),
    )
}
