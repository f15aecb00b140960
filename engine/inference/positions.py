"""Positions without rotation: relative biases and learned position tables.

    by_distance = causal_bias(table, buckets, furthest, capacity)      # [heads, capacity], of a decoder
    bias = bidirectional_bias(table, buckets, furthest, length)        # [1, heads, length, length], of an encoder
    rows = table_rows(past, length, padding, offset, batch, device)    # of learned positions

Relative positions are those of T5 (Raffel et al., arXiv 1910.10683, section 2.1): each head adds a learned number to a
score, one for each bucket of distances; near distances have a bucket each, far ones share logarithmically wider ones.
"""

import math

import torch
from torch import Tensor


def relative_bucket(offsets: Tensor, buckets: int, furthest: int, bidirectional: bool) -> Tensor:
    """Return the bucket of each offset, key position minus query position; `furthest` and beyond share the last one."""
    sides = torch.zeros_like(offsets)
    if bidirectional:
        buckets //= 2
        sides = (offsets > 0) * buckets
        distances = offsets.abs()
    else:
        distances = (-offsets).clamp(min=0)
    exact = buckets // 2
    # In float32 and in this order, as in the reference: rounding decides at bucket boundaries.
    far = torch.log(distances.float() / exact) / math.log(furthest / exact) * (buckets - exact)
    far = (exact + far.clamp(min=0).long()).clamp(max=buckets - 1)
    return sides + torch.where(distances < exact, distances, far)


def causal_bias(table: Tensor, buckets: int, furthest: int, capacity: int) -> Tensor:
    """Return the bias of each head by distance to earlier keys, [heads, capacity]; table: [heads, buckets]."""
    offsets = -torch.arange(capacity, device=table.device)
    return table[:, relative_bucket(offsets, buckets, furthest, bidirectional=False)]


def bidirectional_bias(table: Tensor, buckets: int, furthest: int, length: int) -> Tensor:
    """Return the biases of all pairs of positions: [1, heads, length, length], queries before keys."""
    offsets = torch.arange(1 - length, length, device=table.device)
    by_offset = table[:, relative_bucket(offsets, buckets, furthest, bidirectional=True)]
    places = torch.arange(length, device=table.device)
    return by_offset[:, places - places[:, None] + length - 1][None]


def biased(bias: Tensor, seen: Tensor | None) -> Tensor:
    """Return an attention mask that adds `bias` [1, heads, ..] to visible keys, and hides the others."""
    if seen is None:
        return bias
    return torch.where(seen, bias, torch.finfo(bias.dtype).min)


def table_rows(past: int, length: int, padding: Tensor | None, offset: int, batch: int, device: torch.device) -> Tensor:
    """Return rows of the position table [batch, length]; padding at the left gets the first row, without effect."""
    places = torch.arange(past, past + length, device=device)[None]
    if padding is not None:
        places = (places - padding[:, None]).clamp_(min=0)
    return (places + offset).expand(batch, length)
