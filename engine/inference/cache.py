"""Static key-value cache: one rank's heads of one stage's layers, allocated once.

    cache = shard.new_cache(batch=4, capacity=512)
    cache.set_source(states, padding)     # only before an encoder-decoder's decoder
    shard.forward(tokens, cache)          # fills it and advances `length`
    cache.clear()                         # before the next requests

A cache also holds data that depends on positions only (cosines and sines, or biases by distance), so that a decode step
looks them up instead of computing them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from engine.inference.positions import biased, table_rows
from engine.inference.source import Source
from engine.kernels.attention import DecodeAttention, bias_table, has_decode_attention, stored_width
from engine.kernels.gpu import has_gpu_attention
from engine.kernels.linear import PackedLinear
from engine.kernels.paged import PagedAttention
from engine.models.llama import visible
from engine.models.sharding import Share

if TYPE_CHECKING:  # they need Triton
    from engine.kernels.attention_gpu import GpuAttention, StepPlaces


@dataclass(slots=True)
class Views:
    """The visible part of a cache, by layer: [batch, kv_heads, seen, head_dim] each.

    mask: visible positions of each query, or a bias added to the scores; None: causal (for a source: all).
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor | None


@dataclass(slots=True)
class CacheStep:
    """Cache views and position data of a forward pass.

    angles: cosines and sines [1 or batch, length, 1, head_dim]; None without rotation. rows [batch, length]: of the
    table of learned positions. key_slots, value_slots: destinations of each layer's new keys and values, [batch,
    kv_heads, length, head_dim]; or, with a `position` [1], the whole cache, written at that position.
    views: by a layer's window. source: keys and values of cross attention.
    """

    angles: tuple[Tensor, Tensor] | None
    rows: Tensor | None
    key_slots: tuple[Tensor, ...]
    value_slots: tuple[Tensor, ...]
    views: dict[int | None, Views]
    position: Tensor | None = None
    source: Views | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's new keys and values [batch, kv_heads, length, head_dim] to their slots."""
        if self.position is None:
            self.key_slots[layer].copy_(keys)
            self.value_slots[layer].copy_(values)
        else:
            self.key_slots[layer].index_copy_(2, self.position, keys)
            self.value_slots[layer].index_copy_(2, self.position, values)


@dataclass(slots=True)
class KernelStep:
    """New positions of sequences, with attention by the native kernels. windows: by layer, 0 for none.

    rows [batch, 1]: of the table of learned positions, always in the same memory. source: cross attention's kernel.
    """

    attention: DecodeAttention | PagedAttention
    windows: list[int]
    rows: Tensor | None
    source: DecodeAttention | None


@dataclass(slots=True)
class GpuStep:
    """New tokens with attention by the kernels for GPUs. windows: by layer, 0 for none. rows: as of a `KernelStep`."""

    attention: "GpuAttention"
    places: "StepPlaces"
    windows: list[int]
    rows: Tensor | None

    def attend(self, place: int, turned: Tensor, values: Tensor, queries: int, scale: float | None) -> Tensor:
        """Keep new keys and values of layer `place`, and attend: [batch, length, queries x head_dim].

        turned [batch, length, queries + kv_heads, head_dim] before rotation; values [batch, length, kv_heads,
        head_dim]. The attention has its own numbers of queries and scale.
        """
        batch, length = turned.shape[:2]
        heads, kept = turned.flatten(0, 1), values.flatten(0, 1)
        return self.attention.run(place, heads, kept, self.windows[place], self.places).view(batch, length, -1)


@dataclass(frozen=True, slots=True)
class CachePositions:
    """Position data of a stack's attention, on the cache's device.

    frequencies: radians per position of each pair of a head. by_distance [heads, capacity]: bias added to scores.
    """

    frequencies: Tensor | None = None
    by_distance: Tensor | None = None


class KeyValueCache:
    """Keys and values of `batch` sequences of at most `capacity` positions."""

    def __init__(
        self,
        config: ModelConfig,
        share: Share,
        layers: range,
        batch: int,
        capacity: int,
        positions: CachePositions,
        like: Tensor,
        crossing: list[PackedLinear],
    ) -> None:
        """Allocate for these layers and heads, in the dtype and on the device of `like`.

        crossing: each layer's product that computes keys and values of a source; empty without cross attention.
        """
        self.batch, self.capacity = batch, capacity
        self._windows = [config.windows[layer] for layer in layers]
        self._kernel_windows = [window or 0 for window in self._windows]
        self._config, self._share = config, share
        # One tensor for all layers: a step creates its views with one call instead of one per layer. Rows may be wider
        # than heads for the native kernel; the rest stays zero.
        width = stored_width(config.head_dim, like)
        make = torch.empty if width == config.head_dim else torch.zeros
        shape = (2, len(layers), batch, len(share.kv_heads), capacity, width)
        self.store = make(shape, dtype=like.dtype, device=like.device)
        self._heads = self.store[..., : config.head_dim]
        self.angles = (
            None if positions.frequencies is None else position_angles(positions.frequencies, capacity, like.dtype)
        )
        self._by_distance = positions.by_distance
        self.length = 0
        self.source = Source(config, share, batch, crossing) if crossing else None
        # Storage for `engine.inference.graphs` and `engine.inference.recorded`.
        self.static_steps: dict[Any, Callable[..., Tensor]] = {}
        self.recordings: dict[Any, Any] = {}
        self._attentions: dict[int, DecodeAttention] | None = {} if has_decode_attention(self.store) else None
        self._kernel_bias: Tensor | None = None
        if self._attentions is not None and self._by_distance is not None:
            self._kernel_bias = bias_table(self._by_distance)
        self._rows = torch.zeros((batch, 1), dtype=torch.int64) if config.positions == "learned" else None
        self._padding: Tensor | None = None
        self._filled: Tensor | None = None
        self._on_gpu: GpuAttention | None = None
        group = len(share.heads) // len(share.kv_heads)
        own = has_gpu_attention(like.device, like.dtype, width, group)
        if own and self._by_distance is None and self.source is None:
            tables = torch.arange(batch, dtype=torch.int32, device=like.device)[:, None]  # each row is one block
            self._on_gpu = gpu_attention(self.store, share, config, self.angles, tables)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.store.nbytes + (0 if self.source is None else self.source.nbytes)

    def clear(self) -> None:
        """Reset the length; data beyond `length` is never read."""
        self.length = 0
        self._padding = self._filled = None

    def set_source(self, states: Tensor, padding: Tensor | None) -> None:
        """Set the encoder's last states [batch, length, hidden], once per request, on every stage.

        padding [batch]: number of padding positions at the left of each row.
        """
        assert self.source is not None, "these layers look at no source"
        form = self.source.form
        moved = self.source.take(states, padding)
        # Recordings over other memory are invalid; the native kernels get the new form, a graph does not.
        if moved:
            self.recordings.clear()
        if moved or self.source.form != form:
            self.static_steps.clear()

    def step(self, batch: int, length: int, padding: Tensor | None) -> CacheStep | KernelStep:
        """Return a step of `length` more positions of the first `batch` sequences; the caller advances the length.

        padding [batch]: number of padding positions at the left of each row.
        """
        past, end = self.length, self.length + length
        assert end <= self.capacity and batch <= self.batch, f"{end} positions of {batch} rows exceed the cache"
        if length == 1 and self._attentions is not None:
            return self._kernel_step(batch, padding)
        store = self._heads if batch == self.batch else self._heads[:, :, :batch]
        slots = store[..., past:end, :]
        if padding is not None:
            self._note(padding)
        views = {window: self._views(store, past, end, padding, window) for window in set(self._windows)}
        return CacheStep(
            self._angles_of(past, end, padding),
            None if self._rows is None else self._table_rows(past, length, padding, batch),
            slots[0].unbind(),
            slots[1].unbind(),
            views,
            source=self._source_views(batch),
        )

    def static_step(self, batch: int, position: Tensor, padding: Tensor | None) -> CacheStep | GpuStep:
        """Return a step of one more position of the first `batch` sequences, at `position` [1], with
        position-independent operations.

        For recorded steps: nothing here depends on `length`. Data beyond the position is read and masked, so it must be
        finite.
        """
        store = self._heads[:, :, :batch]
        own = position if padding is None else (position - padding).clamp_(min=0)
        rows = None if self._rows is None else (own + self._config.position_offset)[:, None].expand(batch, 1)
        if self._on_gpu is not None:
            first = torch.zeros_like(position) if padding is None else padding
            sequences = torch.arange(batch, device=store.device)
            each = [one.expand(batch).to(torch.int32) for one in (sequences, position, own, first)]
            return GpuStep(self._on_gpu, self._on_gpu.decode_places(*each), self._kernel_windows, rows)
        places = torch.arange(self.capacity, device=store.device)
        angles = None
        if self.angles is not None:
            angles = self.angles[0][own][:, None, None], self.angles[1][own][:, None, None]
        bias = None
        if self._by_distance is not None:
            bias = self._by_distance[:, (position - places).clamp_(min=0)][None, :, None]
        keys, values = store[0].unbind(), store[1].unbind()
        views = {}
        for window in set(self._windows):
            mask = (places <= position)[None]
            if window is not None:
                mask = mask & (places > position - window)
            if padding is not None:
                mask = mask & (places >= padding[:, None])
            mask = mask[:, None, None]
            views[window] = Views(keys, values, mask if bias is None else biased(bias, mask))
        return CacheStep(angles, rows, keys, values, views, position, self._source_views(batch))

    def _kernel_step(self, batch: int, padding: Tensor | None) -> KernelStep:
        assert self._attentions is not None
        attention = self._attentions.get(batch)
        if attention is None:
            attention = self._attentions[batch] = self._new_attention(batch)
        attention.begin(self.length, padding)
        rows = None
        if self._rows is not None:
            rows = self._rows[:batch]
            # A new token is never padding.
            rows.fill_(self.length + self._config.position_offset)
            if padding is not None:
                rows.sub_(padding[:, None])
        source = None if self.source is None else self.source.attention(batch)
        return KernelStep(attention, self._kernel_windows, rows, source)

    def _new_attention(self, batch: int) -> DecodeAttention:
        queries, kv_heads, width = len(self._share.heads), len(self._share.kv_heads), self._config.head_dim
        stored = (queries + 2 * kv_heads) * width
        # Normalised heads are in a separate tensor, without the values.
        turned = (queries + kv_heads) * width if self._config.head_norms else stored
        scale = self._config.attention_scale
        strides = (turned, stored)
        return DecodeAttention(self.store, batch, queries, scale, self.angles, strides, self._kernel_bias, width=width)

    def _angles_of(self, past: int, end: int, padding: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if self.angles is None:
            return None
        cos, sin = self.angles
        if padding is None:
            return cos[None, past:end, None], sin[None, past:end, None]
        positions = (torch.arange(past, end, device=cos.device) - padding[:, None]).clamp_(min=0)
        return cos[positions][:, :, None], sin[positions][:, :, None]

    def _table_rows(self, past: int, length: int, padding: Tensor | None, batch: int) -> Tensor:
        return table_rows(past, length, padding, self._config.position_offset, batch, self.store.device)

    def _source_views(self, batch: int) -> Views | None:
        return None if self.source is None else Views(*self.source.seen(batch))

    def _views(self, store: Tensor, past: int, end: int, padding: Tensor | None, window: int | None) -> Views:
        start = 0
        if end - past > 1:
            mask = visible(past, end - past, padding, window, store.device)
        else:
            # A single query sees the last `window` positions: slicing needs no mask.
            start = max(0, end - window) if window is not None else 0
            mask = None if self._filled is None else self._filled[:, :, :, start:end]
        if self._by_distance is not None:
            mask = self._biased(past, start, end, mask)
        seen = store[..., start:end, :]
        return Views(seen[0].unbind(), seen[1].unbind(), mask)

    def _biased(self, past: int, start: int, end: int, mask: Tensor | None) -> Tensor:
        """Return the mask combined with the bias by distance; an additive mask is not causal, so it masks too."""
        assert self._by_distance is not None
        device = self.store.device
        distances = torch.arange(past, end, device=device)[:, None] - torch.arange(start, end, device=device)
        if mask is None:
            mask = (distances >= 0)[None, None]
        return biased(self._by_distance[:, distances.clamp_(min=0)][None], mask)

    def _note(self, padding: Tensor) -> None:
        """Store which positions are not padding, [batch, 1, 1, capacity], for the duration of the requests."""
        if padding is not self._padding:
            self._padding = padding
            positions = torch.arange(self.capacity, device=padding.device)
            self._filled = (positions >= padding[:, None])[:, None, None]


def gpu_attention(
    store: Tensor, share: Share, config: ModelConfig, angles: tuple[Tensor, Tensor] | None, tables: Tensor
) -> "GpuAttention":
    """Return the attention of the kernels for GPUs over a cache."""
    from engine.kernels.attention_gpu import GpuAttention

    return GpuAttention(store, len(share.heads), config.attention_scale, angles, tables)


def position_angles(frequencies: Tensor, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [capacity, head_dim]; in float32 until they are rounded once, as in the reference."""
    positions = torch.arange(capacity, device=frequencies.device)
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)
