"""Defects of 16 bits alone, which no check in float32 can show."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from configs.families.config import ModelConfig
from tests.support.answers.correctness_runs import Rank, Setting
from tests.support.planted_defects.planting import change_steps, on_rank


def _in_16_bits(config: ModelConfig, setting: Setting) -> bool:
    return setting.dtype == "bfloat16"


@on_rank("cache in 8 bits", _in_16_bits)
def _eight_bits(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        cache.store.copy_(cache.store.to(torch.float8_e4m3fn))
        return step

    for cache in rank.replica._caches:
        cache.store.zero_()
    change_steps(rank, change)


@on_rank("products summed in 16 bits", _in_16_bits)
def _summed_in_16(rank: Rank) -> None:
    """What a kernel without a wide accumulator gives: each of 16 partial sums is rounded, one after the other."""
    for place, layer in enumerate(rank.shard.weights.layers):
        weight = rank.tensors[f"model.layers.{rank.shard.layers[place]}.mlp.down_proj.weight"]
        share = rank.shard.share.feed_forward
        own = weight[:, share.start : share.stop]
        bias = rank.tensors.get(f"model.layers.{rank.shard.layers[place]}.mlp.down_proj.bias")

        def product(x: Tensor, own: Tensor = own, bias: Any = bias) -> Tensor:
            out = torch.zeros((*x.shape[:-1], own.shape[0]), dtype=x.dtype)
            for start in range(0, x.shape[-1], 2):
                out = out + functional.linear(x[..., start : start + 2], own[:, start : start + 2])
            return out if bias is None or rank.grid.tp_rank else out + bias

        layer.down = product  # type: ignore[assignment]


@on_rank("positions in 16 bits", _in_16_bits)
def _positions_in_16(rank: Rank) -> None:
    for cache in rank.replica._caches:
        assert cache.angles is not None and rank.shard._frequencies is not None
        coarse = torch.arange(cache.capacity).bfloat16()[:, None].float() * rank.shard._frequencies
        coarse, dtype = coarse.bfloat16().float().repeat(1, 2), cache.angles[0].dtype
        cache.angles = coarse.cos().to(dtype), coarse.sin().to(dtype)


@on_rank("logits of the head in 8 bits", _in_16_bits)
def _coarse_logits(rank: Rank) -> None:
    original = rank.shard.full_logits
    rank.shard.full_logits = lambda local: (original(local) * 4).round() / 4  # type: ignore[method-assign]
