"""Attention of new tokens over a key-value cache on a GPU, paged or contiguous, in Triton.

    attention = GpuAttention(store, queries, scale, angles, tables)         # once per cache
    places = attention.step_places(sequences, positions)                    # once per step
    mixed = attention.run(layer, heads, values, window, places)             # once per layer

Three kernels a layer. The first rotates the new queries and keys and writes keys and values to their blocks. The second
attends with tiles of a sequence's tokens; long contexts are divided into parts that run side by side (split keys and
values, as in Flash-Decoding, Dao et al., 2023), which the third puts together. Softmax is computed online in float32
(Milakov and Gimelshein, arXiv 1805.02867). A position is read from device memory, so that a CUDA graph of a step is
right for all later ones, and only positions that are visible are read.

A contiguous cache is one whose blocks are whole rows: sequence i has the one block i.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.operators_gpu import turned_pairs

_POSITIONS = 64
"""Of a tile: keys and values read at a time."""
_ROWS = 64
"""Queries of a tile where a sequence has many new tokens: tokens times the query heads of one key head."""
_LEAST_ROWS = 16  # of a product of tensor cores
_LEAST_PART = 256
_WANTED_PROGRAMS = 512
"""Several for each of the 132 processors of an H100."""
_LOG2_E = 1.4426950408889634


@triton.jit
def _store_kernel(
    heads, values, cosines, sines, keys, kept_values, queries_out, tables, sequences, places, turns,
    heads_stride, values_stride, table_stride, block, block_stride, head_stride, row_stride, width,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, ROTATES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of one new token: a query is rotated, a key rotated and kept, a value kept."""
    kind = queries_out.dtype.element_ty
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = width // 2
    pair = tl.arange(0, HALF)
    inside = pair < half
    place = tl.load(places + token)
    number = tl.load(tables + tl.load(sequences + token) * table_stride + place // block).to(tl.int64)
    row = number * block_stride + (place % block) * row_stride
    if head < QUERIES + KEYS:
        source = heads + token * heads_stride + head * width + pair
        low, high = tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0)
        if ROTATES:
            angle = tl.load(turns + token).to(tl.int64) * width + pair
            cos, sin = tl.load(cosines + angle, mask=inside, other=0.0), tl.load(sines + angle, mask=inside, other=0.0)
            low, high = turned_pairs(low, high, cos, sin, kind)
        if head < QUERIES:
            target = queries_out + (token * QUERIES + head) * width + pair
        else:
            target = keys + row + (head - QUERIES) * head_stride + pair
        tl.store(target, low, mask=inside)
        tl.store(target + half, high, mask=inside)
    else:
        own = head - QUERIES - KEYS
        source = values + token * values_stride + own * width + pair
        target = kept_values + row + own * head_stride + pair
        tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
        tl.store(target + half, tl.load(source + half, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["window", "tokens", "part_length"])
def _attend_kernel(
    queries, keys, values, out, partial, sums, tables, sequences, places, firsts, tiles,
    scale, window, table_stride, block, block_stride, head_stride, row_stride, width, tokens, part_length,
    KEYS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, POSITIONS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The queries of one key head and one tile of tokens, over one part of the positions. scale: times log2(e).

    WHOLE: this is the only part, and its result is final; else unscaled sums go to `partial`, and to `sums` the largest
    score and the sum of weights.
    """
    kind = out.dtype.element_ty
    begin, count = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    head, part = tl.program_id(1), tl.program_id(2)
    rows = tl.arange(0, ROWS)
    own = rows // GROUP
    inside = (own < count) & (own < TOKENS)
    token = (begin + own).to(tl.int64)
    place = tl.load(places + token, mask=inside, other=-1)
    first = tl.load(firsts + token, mask=inside, other=2147483647)
    if window > 0:
        first = tl.where(inside, tl.maximum(first, place - window + 1), first)
    end = tl.minimum((part + 1) * part_length, tl.max(place, axis=0) + 1)
    start = tl.maximum(part * part_length, tl.min(first, axis=0))
    columns = tl.arange(0, WIDTH)
    wide = columns < width
    heads = token * (KEYS * GROUP) + head * GROUP + rows % GROUP
    query = tl.load(
        queries + heads[:, None] * width + columns[None, :], mask=inside[:, None] & wide[None, :], other=0.0
    )
    table = tables + tl.load(sequences + begin) * table_stride
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    for at in range(start, end, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        known = position < end
        number = tl.load(table + position // block, mask=known, other=0).to(tl.int64)
        row = number * block_stride + head * head_stride + (position % block) * row_stride
        key = tl.load(keys + row[None, :] + columns[:, None], mask=known[None, :] & wide[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        seen = known[None, :] & (position[None, :] <= place[:, None]) & (position[None, :] >= first[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(largest, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - base[:, None])
        shrunk = tl.exp2(largest - base)
        total = total * shrunk + tl.sum(weight, axis=1)
        value = tl.load(values + row[:, None] + columns[None, :], mask=known[:, None] & wide[None, :], other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(weight.to(kind), value, input_precision="ieee")
        largest = higher
    kept = inside[:, None] & wide[None, :]
    if WHOLE:
        total = tl.where(inside, total, 1.0)
        tl.store(out + heads[:, None] * width + columns[None, :], (mixed / total[:, None]).to(kind), mask=kept)
    else:
        at = heads + part * tokens * (KEYS * GROUP)
        tl.store(partial + at[:, None] * width + columns[None, :], mixed, mask=kept)
        tl.store(sums + 2 * at, largest, mask=inside)
        tl.store(sums + 2 * at + 1, total, mask=inside)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _combine_kernel(partial, sums, out, width, tokens, parts, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """One head of one token: the parts' sums, weighted by the largest score of each."""
    heads = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    wide = columns < width
    largest, total = -float("inf"), 0.0
    mixed = tl.zeros((WIDTH,), tl.float32)
    for part in range(parts):
        at = heads + part * tokens * HEADS
        own, weights = tl.load(sums + 2 * at), tl.load(sums + 2 * at + 1)
        higher = tl.maximum(largest, own)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        before, now = tl.exp2(largest - base), tl.exp2(own - base)
        more = tl.load(partial + at * width + columns, mask=wide, other=0.0)
        mixed = mixed * before + more * now
        total = total * before + weights * now
        largest = higher
    tl.store(out + heads * width + columns, (mixed / total).to(out.dtype.element_ty), mask=wide)


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Where the new tokens of a step are; int32, on the device.

    sequences, places [tokens]: row of the table, and position in it. turns: position that a token is rotated by;
    firsts: the first that it sees. tiles [n, 2]: first token and count of each run of tokens of one sequence, of at
    most `tokens_together`. parts: of `part_length` positions each, that are worked on side by side.
    """

    sequences: Tensor
    places: Tensor
    turns: Tensor
    firsts: Tensor
    tiles: Tensor
    tokens_together: int
    parts: int
    part_length: int


class GpuAttention:
    """Attention over a cache `store` [2, layers, blocks, kv_heads, block, width] on a GPU."""

    def __init__(
        self, store: Tensor, queries: int, scale: float, angles: tuple[Tensor, Tensor] | None, tables: Tensor
    ) -> None:
        """queries: query heads of this rank. angles: cosines and sines [positions, width]; None: no rotation. tables:
        int32 [sequences, blocks of the longest] on the device, which the caller changes in place.
        """
        self._keys, self._values = store[0].unbind(), store[1].unbind()
        self._queries, self._scale, self._angles, self._tables = queries, scale * _LOG2_E, angles, tables
        self._block, self._max_length = store.shape[4], store.shape[4] * tables.shape[1]
        self._kv_heads, self._width = store.shape[3], store.shape[5]
        self._group = queries // self._kv_heads
        self._strides = self._keys[0].stride()[:3]  # of a block, a head, a position
        self._most_together = max(1, _ROWS // self._group)
        self._nothing = torch.zeros(1, dtype=torch.float32, device=store.device)

    def decode_places(self, sequences: Tensor, places: Tensor, turns: Tensor, firsts: Tensor) -> StepPlaces:
        """Return a step of one new token a sequence, for any positions: nothing is read from the device."""
        count = len(sequences)
        tokens = torch.arange(count, dtype=torch.int32, device=sequences.device)
        tiles = torch.stack((tokens, torch.ones_like(tokens)), dim=1)
        return StepPlaces(sequences, places, turns, firsts, tiles, 1, *self._parts(count, self._max_length))

    def step_places(self, sequences: Tensor, positions: Tensor) -> StepPlaces:
        """Return a step of any tokens, from host tensors int32 [tokens]; tokens of a sequence are consecutive."""
        device = self._tables.device
        runs = self._runs(sequences.tolist())
        together = 1 if len(runs) == len(sequences) else self._most_together
        placed = positions.to(device)
        parts = self._parts(len(runs), int(positions.max()) + 1)
        tiles = torch.tensor(runs, dtype=torch.int32).to(device)
        return StepPlaces(sequences.to(device), placed, placed, torch.zeros_like(placed), tiles, together, *parts)

    def _runs(self, sequences: list[int]) -> list[list[int]]:
        """Return first token and count of each tile."""
        runs: list[list[int]] = []
        for place, sequence in enumerate(sequences):
            if place and sequences[place - 1] == sequence and runs[-1][1] < self._most_together:
                runs[-1][1] += 1
            else:
                runs.append([place, 1])
        return runs

    def _parts(self, tiles: int, length: int) -> tuple[int, int]:
        """Return into how many parts to divide the positions of the longest sequence, and the length of each."""
        wanted = triton.cdiv(_WANTED_PROGRAMS, tiles * self._kv_heads)
        parts = max(1, min(wanted, triton.cdiv(length, _LEAST_PART)))
        each = triton.cdiv(triton.cdiv(length, parts), _POSITIONS) * _POSITIONS
        return triton.cdiv(length, each), each

    def run(self, layer: int, heads: Tensor, values: Tensor, window: int, step: StepPlaces) -> Tensor:
        """Keep the new keys and values of a layer, and attend: [tokens, queries x width].

        heads [tokens, queries + kv_heads, width] before rotation, values [tokens, kv_heads, width]; the last two axes
        are contiguous. window: positions that a token sees at most, 0 for all.
        """
        tokens, width, kv_heads = len(step.places), self._width, self._kv_heads
        keys, kept = self._keys[layer], self._values[layer]
        cos, sin = (self._nothing, self._nothing) if self._angles is None else self._angles
        turned = torch.empty((tokens, self._queries, width), dtype=keys.dtype, device=keys.device)
        places = (self._tables, step.sequences, step.places)
        strides = (self._tables.stride(0), self._block, *self._strides, width)
        _store_kernel[(tokens, self._queries + 2 * kv_heads)](
            heads, values, cos, sin, keys, kept, turned, *places, step.turns,
            heads.stride(0), values.stride(0), *strides,
            QUERIES=self._queries, KEYS=kv_heads, ROTATES=self._angles is not None,
            HALF=triton.next_power_of_2(width // 2), num_warps=1,
        )  # fmt: skip
        out = torch.empty_like(turned)
        partial = sums = self._nothing
        if step.parts > 1:
            partial = torch.empty((step.parts, *turned.shape), dtype=torch.float32, device=out.device)
            sums = torch.empty((step.parts, tokens, self._queries, 2), dtype=torch.float32, device=out.device)
        rows = max(_LEAST_ROWS, triton.next_power_of_2(step.tokens_together * self._group))
        stored = triton.next_power_of_2(width)
        _attend_kernel[(len(step.tiles), kv_heads, step.parts)](
            turned, keys, kept, out, partial, sums, *places, step.firsts, step.tiles,
            self._scale, window, *strides, tokens, step.part_length,
            KEYS=kv_heads, GROUP=self._group, TOKENS=step.tokens_together, ROWS=rows,
            WIDTH=stored, POSITIONS=_POSITIONS if stored <= 128 and keys.itemsize == 2 else _POSITIONS // 2,
            WHOLE=step.parts == 1, num_warps=4 if rows * stored <= 8192 else 8, num_stages=2,
        )  # fmt: skip
        if step.parts > 1:
            _combine_kernel[(tokens, self._queries)](
                partial, sums, out, width, tokens, step.parts,
                HEADS=self._queries, WIDTH=stored, num_warps=1,
            )  # fmt: skip
        return out.view(tokens, -1)
