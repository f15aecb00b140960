"""Defects as they happen in distributed engines, to be planted on a rank of `correctness_runs`.

    verdict = case.verdict(Setting(tp=2), DEFECTS["missing all-reduce"])

Each says for which models and settings it can happen at all.
"""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from correctness_runs import Defect, Rank, Setting
from engine.llama_config import LlamaConfig
from engine.parallel.grid import Grid

Tensors = dict[str, Tensor]
_LAYER = "model.layers.1."

DEFECTS: dict[str, Defect] = {}


def _always(config: LlamaConfig, setting: Setting) -> bool:
    return True


def _tensor_parallel(config: LlamaConfig, setting: Setting) -> bool:
    return setting.tp > 1


def _batched(config: LlamaConfig, setting: Setting) -> bool:
    return setting.batch // setting.pp > 1


def _on_tensors(name: str, possible: Callable[[LlamaConfig, Setting], bool] = _always) -> Any:
    def add(function: Callable[[Tensors, Grid, LlamaConfig], None]) -> None:
        DEFECTS[name] = Defect(name, on_tensors=function, possible=possible)

    return add


def _on_rank(name: str, possible: Callable[[LlamaConfig, Setting], bool] = _always) -> Any:
    def add(function: Callable[[Rank], None]) -> None:
        DEFECTS[name] = Defect(name, on_rank=function, possible=possible)

    return add


def _on_config(name: str, possible: Callable[[LlamaConfig, Setting], bool] = _always) -> Any:
    def add(function: Callable[[LlamaConfig], LlamaConfig]) -> None:
        DEFECTS[name] = Defect(name, on_config=function, possible=possible)

    return add


# Weights


@_on_tensors("swapped shard of one down projection", _tensor_parallel)
def _swapped(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    name = f"{_LAYER}mlp.down_proj.weight"
    tensors[name] = tensors[name].roll(config.feed_forward // grid.tp, 1)


@_on_tensors("swapped shard of one output projection on one rank", _tensor_parallel)
def _swapped_output(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    if grid.tp_rank == 0:
        name = f"{_LAYER}self_attn.o_proj.weight"
        tensors[name] = tensors[name].roll(config.heads * config.head_dim // grid.tp, 1)


@_on_tensors("one tensor scaled by 1.01")
def _scaled(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    tensors[f"{_LAYER}mlp.up_proj.weight"] *= 1.01


@_on_tensors("one tensor scaled by 1.01 on one rank", _tensor_parallel)
def _scaled_on_one(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    if grid.tp_rank == 1:
        tensors[f"{_LAYER}self_attn.v_proj.weight"] *= 1.01


@_on_tensors("one row of a tensor zero")
def _zero_row(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    tensors[f"{_LAYER}mlp.gate_proj.weight"][3] = 0


@_on_tensors("one element of a tensor wrong")
def _one_element(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    tensors[f"{_LAYER}self_attn.o_proj.weight"][5, 7] += 1.0


@_on_tensors("one tensor rounded to bfloat16")
def _rounded(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    name = f"{_LAYER}self_attn.q_proj.weight"
    tensors[name] = tensors[name].bfloat16().to(tensors[name].dtype)


@_on_tensors("norm weight of one layer left at one")
def _norm_weight(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    tensors[f"{_LAYER}post_attention_layernorm.weight"].fill_(1)


@_on_tensors("norm of the wrong layer")
def _norm_of_other(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    tensors[f"{_LAYER}input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"].clone()


@_on_tensors("key heads in the wrong order", lambda config, setting: config.kv_heads > 1)
def _key_heads(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    for kind in ("weight", "bias"):
        name = f"{_LAYER}self_attn.k_proj.{kind}"
        if name in tensors:
            tensors[name] = tensors[name].roll(config.head_dim, 0)


@_on_tensors("wrong key and value head on one rank", lambda c, setting: c.kv_heads > 1 and setting.tp > 1)
def _kv_head(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    if grid.tp_rank == 0:
        for part in ("k_proj", "v_proj"):
            for kind in ("weight", "bias"):
                name = f"{_LAYER}self_attn.{part}.{kind}"
                if name in tensors:
                    tensors[name] = tensors[name].roll(config.head_dim, 0)


@_on_tensors("queries paired with the wrong keys", lambda config, setting: 1 < config.kv_heads < config.heads)
def _grouping(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    # Interleaved instead of grouped: query head i uses key head i % kv_heads.
    order = torch.arange(config.heads).view(config.kv_heads, -1).t().flatten()
    weight = tensors[f"{_LAYER}self_attn.q_proj.weight"]
    heads = weight.view(config.heads, config.head_dim, -1)[order]
    tensors[f"{_LAYER}self_attn.q_proj.weight"] = heads.reshape(weight.shape).contiguous()


@_on_tensors("missing bias of queries, keys and values on one rank", lambda config, s: config.qkv_bias)
def _missing_bias(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    if grid.tp_rank == grid.tp - 1:
        tensors[f"{_LAYER}self_attn.q_proj.bias"].zero_()


@_on_tensors("bias added on every rank", lambda config, setting: config.output_bias and setting.tp > 1)
def _bias_twice(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    tensors[f"{_LAYER}self_attn.o_proj.bias"] *= grid.tp


@_on_tensors("two head rows exchanged at the border of two shards")
def _head_rows(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    border = config.vocabulary // 2
    tensors[name][[border - 1, border]] = tensors[name][[border, border - 1]]


@_on_tensors("head rows shifted by one on the last rank")
def _head_shift(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    border = config.vocabulary // 2
    tensors[name][border:] = tensors[name][border:].roll(1, 0)


@_on_tensors("norm of the query heads left out", lambda config, setting: config.head_norms)
def _head_norm(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    tensors[f"{_LAYER}self_attn.q_norm.weight"].fill_(1)


@_on_tensors("one layer skipped")
def _skipped(tensors: Tensors, grid: Grid, config: LlamaConfig) -> None:
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        for kind in ("weight", "bias"):
            if f"{_LAYER}{part}.{kind}" in tensors:
                tensors[f"{_LAYER}{part}.{kind}"].zero_()


# Configuration


@_on_config("epsilon of the norms ten times as large")
def _epsilon(config: LlamaConfig) -> LlamaConfig:
    return replace(config, norm_epsilon=config.norm_epsilon * 10)


@_on_config("wrong base of the rotary positions")
def _theta(config: LlamaConfig) -> LlamaConfig:
    return replace(config, rope=replace(config.rope, theta=config.rope.theta * 1.05))


@_on_config("sliding window one too long", lambda config, setting: any(config.windows))
def _window(config: LlamaConfig) -> LlamaConfig:
    return replace(config, windows=tuple(None if each is None else each + 1 for each in config.windows))


@_on_config("sliding window ignored in one layer", lambda config, setting: any(config.windows))
def _no_window(config: LlamaConfig) -> LlamaConfig:
    return replace(config, windows=(*config.windows[:-1], None))


# Computation


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


@_on_rank("missing all-reduce", _tensor_parallel)
def _missing(rank: Rank) -> None:
    calls = _calls(rank)
    rank.shard.group = _SkippingGroup(rank.shard.group, calls - 1, calls, lambda tensor: tensor)  # type: ignore[assignment]


@_on_rank("all-reduce in 16 bits", lambda config, setting: setting.tp > 1 and setting.dtype == "float32")
def _coarse(rank: Rank) -> None:
    calls, group = _calls(rank), rank.shard.group

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.copy_(group.all_reduce(tensor.bfloat16()).to(tensor.dtype))

    rank.shard.group = _SkippingGroup(group, calls - 2, calls, rounded)  # type: ignore[assignment]


@_on_rank("all-reduce gives the mean", _tensor_parallel)
def _mean(rank: Rank) -> None:
    calls, group, tp = _calls(rank), rank.shard.group, rank.grid.tp
    rank.shard.group = _SkippingGroup(group, calls - 2, calls, lambda t: group.all_reduce(t).div_(tp))  # type: ignore[assignment]


@_on_rank("an all-reduce reads one rank's buffer too early", _tensor_parallel)
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


def _steps(rank: Rank, change: Callable[[Any, Any, int, int], Any]) -> None:
    """Wrap each cache's step: change(cache, step, batch, length) -> step. Decoding then goes without its kernel."""
    for cache in rank.replica._caches:
        cache._attentions = None
        original = cache.step

        def step(batch: int, length: int, padding: Any, cache: Any = cache, original: Any = original) -> Any:
            return change(cache, original(batch, length, padding), batch, length)

        cache.step = step  # type: ignore[method-assign]


@_on_rank("rotary position off by one while decoding")
def _rotary(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        if length == 1:
            here = (cache.cos[None, None, None] - step.cos[..., None, :]).abs().sum(-1).argmin(-1)
            step.cos, step.sin = cache.cos[here - 1], cache.sin[here - 1]
        return step

    _steps(rank, change)


@_on_rank("rotary position of the queries off by one")
def _query_position(rank: Rank) -> None:
    original = rank.shard._attention

    def attention(self: Any, hidden: Tensor, layer: Any, place: int, step: Any) -> Tensor:
        if place == 0 and hidden.shape[1] > 1:
            step = replace(step, cos=step.cos.roll(1, 1), sin=step.sin.roll(1, 1))
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


@_on_rank("stale key in the cache")
def _stale_key(rank: Rank) -> None:
    for cache in rank.replica._caches:
        cache.store.zero_()
    _steps(rank, _no_write(slice(None), values=False))


@_on_rank("stale value in the cache, in one row of the batch")
def _stale_value(rank: Rank) -> None:
    for cache in rank.replica._caches:
        cache.store.zero_()
    _steps(rank, _no_write(slice(0, 1), values=True))


@_on_rank("cache written at the wrong position for one row", _batched)
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
    _steps(rank, change)


class _Elsewhere:
    """A slot whose first row is written to another place."""

    def __init__(self, slot: Tensor, other: Tensor) -> None:
        self._slot, self._other = slot, other

    def copy_(self, source: Tensor) -> None:
        self._slot[1:] = source[1:]
        self._other.copy_(source[0, :, 0])


@_on_rank("cache in 16 bits", lambda config, setting: setting.dtype == "float32")
def _coarse_cache(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        cache.store.copy_(cache.store.bfloat16())
        return step

    for cache in rank.replica._caches:
        cache.store.zero_()
    _steps(rank, change)


@_on_rank("softmax scale off by one per cent")
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


@_on_rank("residual wrong in one layer")
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


@_on_rank("mask off by one where a batch is filled up", _batched)
def _mask(rank: Rank) -> None:
    original = rank.shard.forward

    def forward(inputs: Tensor, cache: Any, padding: Any = None, last_only: bool = False) -> Tensor:
        return original(inputs, cache, None if padding is None else (padding - 1).clamp(min=0), last_only)

    rank.shard.forward = forward  # type: ignore[method-assign]


@_on_rank("filling seen while decoding", _batched)
def _seen_filling(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        if length == 1:
            step.views = {window: replace(views, mask=None) for window, views in step.views.items()}
        return step

    _steps(rank, change)


@_on_rank("head reads the wrong row of a prefill")
def _last_row(rank: Rank) -> None:
    original = rank.shard.forward

    def forward(inputs: Tensor, cache: Any, padding: Any = None, last_only: bool = False) -> Tensor:
        hidden = original(inputs, cache, padding, False)
        return hidden if not last_only or inputs.shape[1] < 3 else hidden[:, -2:-1]

    if rank.shard.last:
        rank.shard.forward = forward  # type: ignore[method-assign]


@_on_rank("activation of another kind")
def _activation(rank: Rank) -> None:
    layer = rank.shard.weights.layers[0]
    product = layer.gate_up

    def other(x: Tensor) -> Tensor:
        gate, up = product(x).chunk(2, dim=-1)
        # silu(x) = gelu-like(x): what is handed on makes silu give x * sigmoid(1.02 x).
        wanted = gate * torch.sigmoid(1.02 * gate)
        return torch.cat((gate, up * wanted / functional.silu(gate)), dim=-1)

    layer.gate_up = other  # type: ignore[assignment]


@_on_rank("norm in 16 bits", lambda config, setting: setting.dtype == "float32")
def _coarse_norm(rank: Rank) -> None:
    layer = rank.shard.weights.layers[0]
    product = layer.gate_up
    layer.gate_up = lambda x: product(x.bfloat16().to(x.dtype))  # type: ignore[assignment]


@_on_rank("logits of one word zero")
def _one_word(rank: Rank) -> None:
    original = rank.shard.full_logits

    def full_logits(local: Tensor) -> Tensor:
        logits = original(local).clone()
        logits[..., logits.shape[-1] // 3] = 0
        return logits

    rank.shard.full_logits = full_logits  # type: ignore[method-assign]


@_on_rank("a value that is no number")
def _nan(rank: Rank) -> None:
    original = rank.shard.full_logits

    def full_logits(local: Tensor) -> Tensor:
        logits = original(local).clone()
        logits[0, -1, 0] = float("nan")
        return logits

    rank.shard.full_logits = full_logits  # type: ignore[method-assign]


@_on_rank("greedy token without the offset of the rank's words", _tensor_parallel)
def _offset(rank: Rank) -> None:
    words = len(rank.shard.share.vocabulary)
    original = rank.shard.greedy
    rank.shard.greedy = lambda local: original(local) % words  # type: ignore[method-assign]


@_on_rank("second best token decoded once")
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
    "tokens exchanged between two rows", on_rank=_on_decoded(_exchanged), possible=_batched
)


@_on_rank("a rank of the replica decodes other tokens", _tensor_parallel)
def _disagreeing(rank: Rank) -> None:
    if rank.grid.tp_rank == 1:
        _on_decoded(lambda tokens: tokens.index_fill(1, torch.tensor([3]), 0))(rank)


@_on_rank(
    "caches of two micro-batches exchanged while decoding", lambda c, setting: setting.pp > 1 < setting.batch // 2
)
def _caches(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        others = [each for each in rank.replica._caches if each is not cache]
        if length == 1 and others:
            stop = cache.length + 1
            for views in step.views.values():
                start = stop - views.values[0].shape[2]
                views.values = others[0].store[1, :, :batch, :, start:stop].unbind()
        return step

    _steps(rank, change)


# Defects of 16 bits alone, which no check in float32 can show


def _in_16_bits(config: LlamaConfig, setting: Setting) -> bool:
    return setting.dtype == "bfloat16"


@_on_rank("cache in 8 bits", _in_16_bits)
def _eight_bits(rank: Rank) -> None:
    def change(cache: Any, step: Any, batch: int, length: int) -> Any:
        cache.store.copy_(cache.store.to(torch.float8_e4m3fn))
        return step

    for cache in rank.replica._caches:
        cache.store.zero_()
    _steps(rank, change)


@_on_rank("products summed in 16 bits", _in_16_bits)
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


@_on_rank("positions in 16 bits", _in_16_bits)
def _positions_in_16(rank: Rank) -> None:
    for cache in rank.replica._caches:
        angles = torch.arange(cache.capacity).bfloat16()[:, None].float() * rank.shard._frequencies
        cache.cos = angles.bfloat16().float().repeat(1, 2).cos().to(cache.cos.dtype)
        cache.sin = angles.bfloat16().float().repeat(1, 2).sin().to(cache.sin.dtype)


@_on_rank("logits of the head in 8 bits", _in_16_bits)
def _coarse_logits(rank: Rank) -> None:
    original = rank.shard.full_logits
    rank.shard.full_logits = lambda local: (original(local) * 4).round() / 4  # type: ignore[method-assign]
