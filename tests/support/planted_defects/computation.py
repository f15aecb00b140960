"""A layer, a mask or a choice of tokens computed otherwise."""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.answers.correctness_runs import Defect, Rank
from tests.support.planted_defects.planting import DEFECTS, batched, change_steps, on_rank, tensor_parallel


@on_rank("softmax scale off by one per cent")
def _scale(rank: Rank) -> None:
    head_dim, original = rank.shard.config.head_dim, rank.shard._attention

    def attention(self: Any, hidden: Tensor, layer: Any, place: int, step: Any) -> Tensor:
        if place:
            return original(hidden, layer, place, step)
        # Queries alone are scaled, which is what a wrong scale does.
        turned = len(self.share.heads) * head_dim
        product = layer.qkv

        def scaled(x: Tensor) -> Tensor:
            out = product(x).clone()
            out[..., :turned] *= 1.01
            return out

        return original(hidden, _with(layer, qkv=scaled), place, step)

    if rank.shard.config.head_norms:
        for layer in rank.shard.weights.layers[:1]:
            assert layer.query_norm is not None
            layer.query_norm = layer.query_norm * 1.01
    else:
        rank.shard._attention = types.MethodType(attention, rank.shard)  # type: ignore[method-assign]


def _with(layer: Any, **changes: Any) -> Any:
    return types.SimpleNamespace(
        **{name: getattr(layer, name) for name in layer.__slots__ if name not in changes}, **changes
    )


@on_rank("residual wrong in one layer")
def _no_residual(rank: Rank) -> None:
    layer = rank.shard.weights.layers[-1]
    shard, down = rank.shard, layer.down
    seen: list[Tensor] = []
    original = shard._attention

    def attention(self: Any, hidden: Tensor, found: Any, place: int, step: Any) -> Tensor:
        seen[:] = [hidden]
        return original(hidden, found, place, step)

    def without(x: Tensor) -> Tensor:
        return down(x) - seen[0] / rank.grid.tp

    shard._attention = types.MethodType(attention, shard)  # type: ignore[method-assign]
    layer.down = without  # type: ignore[assignment]


@on_rank("mask off by one where a batch is filled up", batched)
def _mask(rank: Rank) -> None:
    original = rank.shard.forward

    def forward(inputs: Tensor, cache: Any, padding: Any = None, last_only: bool = False) -> Tensor:
        return original(inputs, cache, None if padding is None else (padding - 1).clamp(min=0), last_only)

    rank.shard.forward = forward  # type: ignore[method-assign]


@on_rank("filling seen while decoding", batched)
def _seen_filling(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        if length == 1:
            step.views = {window: replace(views, mask=None) for window, views in step.views.items()}
        return step

    change_steps(rank, change)


@on_rank("head reads the wrong row of a prefill")
def _last_row(rank: Rank) -> None:
    original = rank.shard.forward

    def forward(inputs: Tensor, cache: Any, padding: Any = None, last_only: bool = False) -> Tensor:
        hidden = original(inputs, cache, padding, False)
        return hidden if not last_only or inputs.shape[1] < 3 else hidden[:, -2:-1]

    if rank.shard.last:
        rank.shard.forward = forward  # type: ignore[method-assign]


@on_rank("activation of another kind")
def _activation(rank: Rank) -> None:
    layer = rank.shard.weights.layers[0]
    product = layer.gate_up

    def other(x: Tensor) -> Tensor:
        gate, up = product(x).chunk(2, dim=-1)
        # silu(x) = gelu-like(x): what is handed on makes silu give x * sigmoid(1.02 x).
        wanted = gate * torch.sigmoid(1.02 * gate)
        return torch.cat((gate, up * wanted / functional.silu(gate)), dim=-1)

    layer.gate_up = other  # type: ignore[assignment]


@on_rank("norm in 16 bits", lambda config, setting: setting.dtype == "float32")
def _coarse_norm(rank: Rank) -> None:
    layer = rank.shard.weights.layers[0]
    product = layer.gate_up
    layer.gate_up = lambda x: product(x.bfloat16().to(x.dtype))  # type: ignore[assignment]


@on_rank("logits of one word zero")
def _one_word(rank: Rank) -> None:
    original = rank.shard.full_logits

    def full_logits(local: Tensor) -> Tensor:
        logits = original(local).clone()
        logits[..., logits.shape[-1] // 3] = 0
        return logits

    rank.shard.full_logits = full_logits  # type: ignore[method-assign]


@on_rank("a value that is no number")
def _nan(rank: Rank) -> None:
    original = rank.shard.full_logits

    def full_logits(local: Tensor) -> Tensor:
        logits = original(local).clone()
        logits[0, -1, 0] = float("nan")
        return logits

    rank.shard.full_logits = full_logits  # type: ignore[method-assign]


@on_rank("greedy token without the offset of the rank's words", tensor_parallel)
def _offset(rank: Rank) -> None:
    words = len(rank.shard.share.vocabulary)
    original = rank.shard.greedy
    rank.shard.greedy = lambda local: original(local) % words  # type: ignore[method-assign]


@on_rank("second best token decoded once")
def _second_best(rank: Rank) -> None:
    original, count = rank.shard.greedy, [0]

    def greedy(local: Tensor) -> Tensor:
        chosen = original(local)
        count[0] += 1
        return (chosen + 1) % rank.shard.config.vocabulary if count[0] == 5 else chosen

    rank.shard.greedy = greedy  # type: ignore[method-assign]


def _on_decoded(change: Callable[[Tensor], Tensor]) -> Callable[[Rank], None]:
    def plant(rank: Rank) -> None:
        original = rank.replica.decode

        def decode(batch: Any, new_tokens: int) -> Any:
            return [replace(each, tokens=change(each.tokens)) for each in original(batch, new_tokens)]

        rank.replica.decode = decode  # type: ignore[method-assign]

    return plant


def _exchanged(tokens: Tensor) -> Tensor:
    return tokens if len(tokens) < 2 else tokens[[1, 0, *range(2, len(tokens))]]


DEFECTS["tokens exchanged between two rows"] = Defect(
    "tokens exchanged between two rows", on_rank=_on_decoded(_exchanged), possible=batched
)


@on_rank("a rank of the replica decodes other tokens", tensor_parallel)
def _disagreeing(rank: Rank) -> None:
    if rank.grid.tp_rank == 1:
        _on_decoded(lambda tokens: tokens.index_fill(1, torch.tensor([3]), 0))(rank)


@on_rank("caches of two micro-batches exchanged while decoding", lambda c, setting: setting.pp > 1 < setting.batch // 2)
def _caches(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        others = [each for each in rank.replica._caches if each is not cache]
        if length == 1 and others:
            stop = cache.length + 1
            for views in step.views.values():
                start = stop - views.values[0].shape[2]
                views.values = others[0].store[1, :, :batch, :, start:stop].unbind()
        return step

    change_steps(rank, change)
