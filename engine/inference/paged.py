"""Paged key-value cache: one rank's heads of one stage's layers, in blocks shared out among many sequences.

    cache = shard.new_paged_cache(PagedSizes(blocks=512, block=16, sequences=32, max_length=2048, max_tokens=160))
    cache.assign(sequences, places, blocks)                  # block `blocks[i]` holds positions of sequences[i]
    step = cache.step(sequences, positions)                  # the new tokens of a step, of any sequences
    hidden = shard.compute(tokens[None], step, last_only=False)

The tokens of a step form one row [1, tokens]: one token of each sequence that decodes, many of a prompt. A token
attends to its own sequence only, whose earlier positions lie in the blocks of the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from engine.inference.cache import GpuStep, KernelStep, gpu_attention, position_angles
from engine.kernels.attention import stored_width
from engine.kernels.gpu import has_gpu_attention
from engine.kernels.memory import huge_zeros
from engine.kernels.operators import rotate
from engine.kernels.paged import PagedAttention, has_paged_attention
from engine.models.llama import attend
from engine.models.sharding import Share

if TYPE_CHECKING:  # it needs Triton
    from engine.kernels.attention_gpu import GpuAttention


@dataclass(frozen=True)
class PagedSizes:
    """Sizes of a paged cache: blocks of `block` positions, sequences at once, their longest, tokens of a step."""

    blocks: int
    block: int
    sequences: int
    max_length: int
    max_tokens: int

    @property
    def blocks_of_longest(self) -> int:
        """Blocks of a sequence of the maximum length."""
        return -(-self.max_length // self.block)


@dataclass(slots=True)
class PagedStep:
    """New tokens of a step, with attention by operators of torch: a sequence at a time.

    rows [1, tokens]: of the table of learned positions. angles: cosines and sines [1, tokens, 1, head_dim].
    """

    cache: "PagedCache"
    sequences: Tensor
    positions: Tensor
    angles: tuple[Tensor, Tensor] | None
    rows: Tensor | None

    def attend(self, place: int, turned: Tensor, values: Tensor, queries: int, scale: float | None) -> Tensor:
        """Keep new keys and values of layer `place`, and attend: [1, tokens, queries x head_dim].

        turned [1, tokens, queries + kv_heads, head_dim] before rotation; values [1, tokens, kv_heads, head_dim].
        """
        if self.angles is not None:
            turned = rotate(turned, *self.angles)
        cache, tokens = self.cache, turned.shape[1]
        blocks = cache.blocks_of(self.sequences, self.positions)
        within = self.positions.long() % cache.sizes.block
        cache.keys[place][blocks, :, within] = turned[0, :, queries:]
        cache.values[place][blocks, :, within] = values[0]
        out = torch.empty((1, tokens, queries, turned.shape[-1]), dtype=turned.dtype, device=turned.device)
        for first, end in _runs(self.sequences.tolist()):
            out[:, first:end] = self._one(place, turned[:, first:end, :queries], first, scale)
        return out.view(1, tokens, -1)

    def _one(self, place: int, queries: Tensor, first: int, scale: float | None) -> Tensor:
        """Attend with consecutive tokens of one sequence, [1, length, queries, head_dim]."""
        cache, length = self.cache, queries.shape[1]
        past = int(self.positions[first])
        keys, values = cache.seen(place, int(self.sequences[first]), past + length)
        places = torch.arange(past + length, device=queries.device)
        own = torch.arange(past, past + length, device=queries.device)[:, None]
        mask = places <= own
        window = cache.windows[place]
        if window:
            mask &= places > own - window
        return attend(queries.transpose(1, 2), keys, values, mask[None, None], scale).transpose(1, 2)


class PagedCache:
    """Blocks of keys and values, and the table of each sequence's blocks."""

    def __init__(
        self,
        config: ModelConfig,
        share: Share,
        layers: range,
        sizes: PagedSizes,
        frequencies: Tensor | None,
        like: Tensor,
    ) -> None:
        """Allocate for these layers and heads, in the dtype and on the device of `like`."""
        self.sizes, self._config = sizes, config
        self.windows = [config.windows[layer] or 0 for layer in layers]
        width = stored_width(config.head_dim, like)
        shape = (2, len(layers), sizes.blocks, len(share.kv_heads), sizes.block, width)
        # Rows may be wider than heads for the native kernel; the rest stays zero.
        self.store = huge_zeros(shape, like.dtype, like.device)
        heads = self.store[..., : config.head_dim]
        self.keys, self.values = heads[0].unbind(), heads[1].unbind()
        # Where they are read: on the host, by our kernels for GPUs on the device.
        self.tables = torch.zeros((sizes.sequences, sizes.blocks_of_longest), dtype=torch.int32)
        length = sizes.blocks_of_longest * sizes.block
        self._angles = None if frequencies is None else position_angles(frequencies, length, like.dtype)
        # Always in the same memory: recorded steps read it.
        learned = config.positions == "learned"
        self._rows = torch.zeros((1, sizes.max_tokens), dtype=torch.int64, device=like.device) if learned else None
        self.recordings: dict[int, Any] = {}  # for `engine.inference.recorded`
        self.scaled_recordings: dict[bool, Any] | None = None  # likewise
        self.static_steps: dict[int, Callable[..., Tensor]] = {}  # for `engine.inference.graphs`
        self._kernel: PagedAttention | None = None
        if has_paged_attention(self.store):
            queries, kv_heads = len(share.heads), len(share.kv_heads)
            stored = (queries + 2 * kv_heads) * config.head_dim
            # Normalised heads are in a separate tensor, without the values.
            turned = (queries + kv_heads) * config.head_dim if config.head_norms else stored
            self._kernel = PagedAttention(
                self.store,
                queries,
                config.attention_scale,
                self._angles,
                (turned, stored),
                sizes.max_tokens,
                self.tables,
                config.head_dim,
            )
        self._on_gpu: GpuAttention | None = None
        if has_gpu_attention(like.device, like.dtype, width, len(share.heads) // len(share.kv_heads)):
            self.tables = self.tables.to(like.device)
            self._on_gpu = gpu_attention(self.store, share, config, self._angles, self.tables)

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's attention does not depend on the other tokens of a step."""
        return self._kernel is not None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.store.nbytes

    def assign(self, sequences: Tensor, places: Tensor, blocks: Tensor) -> None:
        """Set the numbers of blocks at places of the tables of sequences, int32 [n] each.

        On the host or on a GPU, where nothing is waited for.
        """
        rows, columns, numbers = (one.to(self.tables.device) for one in (sequences, places, blocks))
        self.tables[rows.long(), columns.long()] = numbers

    @property
    def has_static_steps(self) -> bool:
        """Whether `static_step` is there."""
        return self._on_gpu is not None

    def static_step(self, sequences: Tensor, positions: Tensor) -> GpuStep:
        """Return a step of one new token for each of `sequences`, with operations that depend on no value.

        Both int32 [tokens], on the device: for recorded steps, as `KeyValueCache.static_step`.
        """
        assert self._on_gpu is not None
        rows = None
        if self._rows is not None:
            rows = (positions.long() + self._config.position_offset)[None]
        places = self._on_gpu.decode_places(sequences, positions, positions, torch.zeros_like(positions))
        return GpuStep(self._on_gpu, places, self.windows, rows)

    def step(self, sequences: Tensor, positions: Tensor) -> "KernelStep | GpuStep | PagedStep":
        """Return a step of one new token for each of `sequences`, at `positions`, int32 [tokens].

        Tokens of one sequence are consecutive, in order.
        """
        rows = None
        if self._rows is not None:
            rows = self._rows[:, : len(positions)]
            rows.copy_(positions.long() + self._config.position_offset)
        if self._kernel is not None:
            self._kernel.begin(sequences, positions)
            return KernelStep(self._kernel, self.windows, rows, None)
        if self._on_gpu is not None:
            return GpuStep(self._on_gpu, self._on_gpu.step_places(sequences, positions), self.windows, rows)
        own = positions.long().to(self.store.device)
        angles = None
        if self._angles is not None:
            angles = self._angles[0][own][None, :, None], self._angles[1][own][None, :, None]
        return PagedStep(self, sequences, positions, angles, rows)

    def blocks_of(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """Return the block of each token's position, on the cache's device."""
        places = positions.long() // self.sizes.block
        return self.tables[sequences.long(), places].long().to(self.store.device)

    def seen(self, place: int, sequence: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a sequence's first `length` positions, [1, kv_heads, length, head_dim] each."""
        count = -(-length // self.sizes.block)
        blocks = self.tables[sequence, :count].long().to(self.store.device)
        found = []
        for part in (self.keys[place], self.values[place]):
            rows = part[blocks].transpose(0, 1).flatten(1, 2)
            found.append(rows[None, :, :length])
        return found[0], found[1]


def _runs(sequences: list[int]) -> list[tuple[int, int]]:
    """Return first and end of each run of equal numbers."""
    starts = [place for place, one in enumerate(sequences) if place == 0 or sequences[place - 1] != one]
    return list(zip(starts, [*starts[1:], len(sequences)], strict=True))
