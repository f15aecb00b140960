"""Keys and values of the tokens seen so far: one rank's heads of one stage's layers, allocated once.

    cache = shard.new_cache(batch=4, capacity=512)
    shard.forward(tokens, cache)          # fills it; `length` moves
    cache.clear()                         # begin anew with the next requests

A cache also holds what depends on nothing but its positions: the cosines and sines of each, so that a decode step
looks them up instead of computing them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.inference.sharding import Share
from engine.kernels.attention import DecodeAttention, has_decode_attention
from engine.llama import visible
from engine.models.config import ModelConfig


@dataclass(slots=True)
class Views:
    """The part of a cache that a layer's attention sees, by layer: [batch, kv_heads, seen, head_dim] each.

    mask: which of it each query sees; None for all of it up to the query itself.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None


@dataclass(slots=True)
class Step:
    """What a forward pass needs of the cache.

    cos, sin: [1 or batch, length, 1, head_dim]. key_slots, value_slots: where each layer's new keys and values go,
    [batch, kv_heads, length, head_dim]; or, with a `position` [1], all of the cache, of which that one is written.
    views: by a layer's window.
    """

    cos: Tensor
    sin: Tensor
    key_slots: tuple[Tensor, ...]
    value_slots: tuple[Tensor, ...]
    views: dict[int | None, Views]
    position: Tensor | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put a layer's new keys and values [batch, kv_heads, length, head_dim] in their places."""
        if self.position is None:
            self.key_slots[layer].copy_(keys)
            self.value_slots[layer].copy_(values)
        else:
            self.key_slots[layer].index_copy_(2, self.position, keys)
            self.value_slots[layer].index_copy_(2, self.position, values)


@dataclass(slots=True)
class KernelStep:
    """One more position of each sequence, attended to by our own kernel. starts: first position seen, by layer."""

    attention: DecodeAttention
    starts: list[int]


class KeyValueCache:
    """Keys and values of `batch` sequences of at most `capacity` positions."""

    def __init__(
        self,
        config: ModelConfig,
        share: Share,
        layers: range,
        batch: int,
        capacity: int,
        frequencies: Tensor,
        dtype: torch.dtype,
    ) -> None:
        """For these layers and heads. frequencies: radians a position of each pair of a head, on the cache's device."""
        self.batch, self.capacity = batch, capacity
        self._windows = [config.windows[layer] for layer in layers]
        self._config, self._share = config, share
        # One block for all layers: a step cuts it into views with one call instead of one call a layer.
        self.store = torch.empty(
            (2, len(layers), batch, len(share.kv_heads), capacity, config.head_dim),
            dtype=dtype,
            device=frequencies.device,
        )
        positions = torch.arange(capacity, device=frequencies.device)
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)
        # In float32 until they are rounded once, as in the reference.
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.length = 0
        # Where `engine.inference.graphs` keeps its own.
        self.static_steps: dict[tuple[int, bool], Callable[..., Tensor]] = {}
        self._attentions: dict[int, DecodeAttention] | None = {} if has_decode_attention(self.store) else None
        self._padding: Tensor | None = None
        self._filled: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.store.nbytes

    def clear(self) -> None:
        """Begin anew; what lies beyond `length` is never read."""
        self.length = 0
        self._padding = self._filled = None

    def step(self, batch: int, length: int, padding: Tensor | None) -> Step | KernelStep:
        """Room for `length` more positions of the first `batch` sequences; to move the cache's own is the caller's.

        padding [batch]: so many positions at the left of each row are filling.
        """
        past, end = self.length, self.length + length
        assert end <= self.capacity and batch <= self.batch, f"{end} positions of {batch} rows exceed the cache"
        if length == 1 and self._attentions is not None:
            return self._kernel_step(batch, padding)
        store = self.store if batch == self.batch else self.store[:, :, :batch]
        slots = store[..., past:end, :]
        if padding is None:
            cos, sin = self.cos[None, past:end, None], self.sin[None, past:end, None]
        else:
            self._note(padding)
            positions = (torch.arange(past, end, device=store.device) - padding[:, None]).clamp_(min=0)
            cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        views = {window: self._views(store, past, end, padding, window) for window in set(self._windows)}
        return Step(cos, sin, slots[0].unbind(), slots[1].unbind(), views)

    def static_step(self, batch: int, position: Tensor, padding: Tensor | None) -> Step:
        """One more position of the first `batch` sequences, at `position` [1]: the same operations wherever that is.

        For steps that are recorded once and repeated: nothing here depends on `length`. What lies beyond the position
        is read and masked, so it must be numbers.
        """
        store = self.store[:, :, :batch]
        places = torch.arange(self.capacity, device=store.device)
        if padding is None:
            cos, sin = self.cos[position][:, None, None], self.sin[position][:, None, None]
        else:
            positions = (position - padding).clamp_(min=0)
            cos, sin = self.cos[positions][:, None, None], self.sin[positions][:, None, None]
        keys, values = store[0].unbind(), store[1].unbind()
        views = {}
        for window in set(self._windows):
            mask = (places <= position)[None]
            if window is not None:
                mask = mask & (places > position - window)
            if padding is not None:
                mask = mask & (places >= padding[:, None])
            views[window] = Views(keys, values, mask[:, None, None])
        return Step(cos, sin, keys, values, views, position)

    def _kernel_step(self, batch: int, padding: Tensor | None) -> KernelStep:
        assert self._attentions is not None
        attention = self._attentions.get(batch)
        if attention is None:
            queries, kv_heads, width = len(self._share.heads), len(self._share.kv_heads), self._config.head_dim
            stored = (queries + 2 * kv_heads) * width
            # Heads that were normed first lie in a tensor of their own, without the values.
            turned = (queries + kv_heads) * width if self._config.head_norms else stored
            attention = DecodeAttention(self.store, self.cos, self.sin, queries, batch, turned, stored)
            self._attentions[batch] = attention
        attention.begin(self.length, padding)
        end = self.length + 1
        return KernelStep(attention, [0 if window is None else max(0, end - window) for window in self._windows])

    def _views(self, store: Tensor, past: int, end: int, padding: Tensor | None, window: int | None) -> Views:
        start = 0
        if end - past > 1:
            mask = visible(past, end - past, padding, window, store.device)
        else:
            # A single query sees the last `window` positions: cutting them out needs no mask.
            start = max(0, end - window) if window is not None else 0
            mask = None if self._filled is None else self._filled[:, :, :, start:end]
        seen = store[..., start:end, :]
        return Views(seen[0].unbind(), seen[1].unbind(), mask)

    def _note(self, padding: Tensor) -> None:
        """Keep which positions are no filling, [batch, 1, 1, capacity], for as long as the requests last."""
        if padding is not self._padding:
            self._padding = padding
            positions = torch.arange(self.capacity, device=padding.device)
            self._filled = (positions >= padding[:, None])[:, None, None]
