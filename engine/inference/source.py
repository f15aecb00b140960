"""Keys and values of cross attention: computed from an encoder's last states once per request, then constant.

    source = Source(config, share, batch, crossing)      # part of a `KeyValueCache`
    source.take(states, padding)
    keys, values, mask = source.seen(batch)              # for torch's attention
    source.attention(batch).run(layer, queries, 0)       # for the native kernel

The memory grows with the longest source so far and is reused by shorter ones.
"""

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from engine.kernels.attention import DecodeAttention, has_decode_attention, stored_width
from engine.kernels.linear import PackedLinear
from engine.models.sharding import Share

_GRAIN = 64  # positions: the memory grows in steps of this size


class Source:
    """Cross-attention keys and values of one rank's heads of one stage's layers, for at most `batch` sequences."""

    def __init__(self, config: ModelConfig, share: Share, batch: int, crossing: list[PackedLinear]) -> None:
        """crossing: each layer's product that computes the keys, then the values, of a state."""
        self._config, self._share, self._batch, self._crossing = config, share, batch, crossing
        self.length = 0
        self._store: Tensor | None = None
        self._padding: Tensor | None = None
        self._mask: Tensor | None = None
        self._attentions: dict[int, DecodeAttention] = {}

    @property
    def form(self) -> tuple[int, bool]:
        """Values that operators depend on besides the data: the source's length, and whether it has padding."""
        return self.length, self._padding is not None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 0 if self._store is None else self._store.nbytes

    def take(self, states: Tensor, padding: Tensor | None) -> bool:
        """Compute keys and values of states [batch, length, hidden]; return whether they moved to other memory.

        padding [batch]: number of padding positions at the left of each row.
        """
        batch, length, _ = states.shape
        assert batch <= self._batch, f"{batch} rows exceed the cache's {self._batch}"
        kv_heads, width = len(self._share.kv_heads), self._config.head_dim
        moved = self._store is None or self._store.shape[-2] < length
        if self._store is None or moved:
            capacity = -(-length // _GRAIN) * _GRAIN
            shape = (2, len(self._crossing), self._batch, kv_heads, capacity, stored_width(width, states))
            self._store = torch.zeros(shape, dtype=states.dtype, device=states.device)
            self._attentions.clear()
        self.length = length
        for place, product in enumerate(self._crossing):
            merged = product(states).view(batch, length, 2, kv_heads, width)
            self._store[:, place, :batch, :, :length, :width].copy_(merged.permute(2, 0, 3, 1, 4))
        self._note(padding, batch, states.device)
        return moved

    def seen(self, batch: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]:
        """Return each layer's keys and values [batch, kv_heads, length, head_dim], and the mask without padding."""
        assert self._store is not None, "no source has been set"
        store = self._store[:, :, :batch, :, : self.length, : self._config.head_dim]
        return store[0].unbind(), store[1].unbind(), None if self._mask is None else self._mask[:batch]

    def attention(self, batch: int) -> DecodeAttention:
        """Return the native kernel over the first `batch` sequences, ready for a step."""
        assert self._store is not None, "no source has been set"
        attention = self._attentions.get(batch)
        if attention is None:
            assert has_decode_attention(self._store)
            queries, scale = len(self._share.heads), self._config.attention_scale
            width = self._config.head_dim
            strides = (queries * width, 0)
            attention = DecodeAttention(self._store, batch, queries, scale, strides=strides, fixed=True, width=width)
            self._attentions[batch] = attention
        attention.begin(self.length - 1, self._padding)
        return attention

    def _note(self, padding: Tensor | None, batch: int, device: torch.device) -> None:
        """Store the padding; the mask [batch, 1, 1, length] keeps its address as long as its form is unchanged."""
        self._padding = padding
        if padding is None:
            self._mask = None
            return
        mask = (torch.arange(self.length, device=device) >= padding[:, None])[:, None, None]
        if self._mask is not None and self._mask.shape == mask.shape:
            self._mask.copy_(mask)
        else:
            self._mask = mask
