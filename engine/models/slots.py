"""Map the tensors of a checkpoint to a rank's slots: what to read, and how to convert it to canonical form.

    for slot in wanted_slots(config, grid):
        slot.name, slot.piece       # "decoder.0.query.weight", Piece("...c_attn.weight", columns=(0, 32))
    slot.of(tensor)                 # the piece as [out, in] of this rank

A fused tensor is cut into several slots. If only a part of each head is rotated (GPT-NeoX, Phi), the rows of queries
and keys are permuted inside each head, so that rotated pairs are half a head apart, as with full rotation. A
permutation shared by queries and keys changes no score.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.families.config import ModelConfig
from configs.families.tensors import ROLES, SlotPlace, StoredWeight, WeightSplit, layer_stacks, stored_weights
from engine.loading import TensorSlice
from engine.models.sharding import Share
from engine.models.stages import own_layers
from engine.parallel.grid import Grid

_TURNED = ("query", "key", "query_norm", "key_norm")


@dataclass(frozen=True)
class Slot:
    """A weight of this rank in canonical form. piece: the part of the tensor, by our name, from which the slot is made.

    transposed: the piece is stored [in, out]. part: index and number of weights per head, if the tensor is ordered by
    head. turned: head_dim and its number of rotated elements. first_input: first column of this rank.
    """

    name: str
    piece: TensorSlice
    transposed: bool = False
    part: tuple[int, int] | None = None
    turned: tuple[int, int] | None = None
    head_dim: int = 0
    first_input: int = 0

    @property
    def as_stored(self) -> bool:
        """Whether the slot equals the piece as stored in the file."""
        return not self.transposed and self.part is None and self.turned is None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slot from its piece: [out, in] or [out]. A copy, unless the piece is the slot already."""
        if self.as_stored:
            return tensor
        if self.transposed:
            tensor = tensor.t()
        if self.part is not None:
            place, count = self.part
            tensor = tensor.reshape(-1, count, self.head_dim, *tensor.shape[1:])[:, place].flatten(0, 1)
        if self.turned is not None:
            head_dim, turning = self.turned
            heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
            tensor = heads[:, rotary_order(head_dim, turning)].flatten(0, 1)
        return tensor.clone(memory_format=torch.contiguous_format)


def rotary_order(head_dim: int, turning: int) -> list[int]:
    """Return the order of a head's stored elements that puts rotated pairs head_dim / 2 apart."""
    half, rest = turning // 2, list(range(turning, head_dim))
    first = list(range(half)) + rest[: head_dim // 2 - half]
    return first + list(range(half, turning)) + rest[head_dim // 2 - half :]


def wanted_slots(config: ModelConfig, grid: Grid) -> list[Slot]:
    """Return the slots of a rank, in the order of the computation.

    The bias of a product split by columns belongs to the first rank, so that it is added once. A tied embedding is
    read by the first stage and by the last, which use it as the head.
    """
    share = Share.of(config, grid.tp, grid.tp_rank)
    own: dict[str, range] = {stack: own_layers(config, grid, stack) for stack in layer_stacks(config)}
    slots: list[Slot] = []
    for weight in stored_weights(config):
        if weight.layer is not None:
            if weight.layer in own[weight.stack]:
                slots += _layer_slots(config, share, weight, first=grid.tp_rank == 0)
        else:
            slots += _other_slots(config, share, weight, grid)
    return slots


def wanted_pieces(config: ModelConfig, grid: Grid) -> list[TensorSlice]:
    """Return the pieces that a rank reads of a checkpoint, each once."""
    return list(dict.fromkeys(slot.piece for slot in wanted_slots(config, grid)))


def _other_slots(config: ModelConfig, share: Share, weight: StoredWeight, grid: Grid) -> Iterator[Slot]:
    """Yield slots of tensors outside the layers: tables first, norms and head last, relative positions everywhere."""
    [held] = weight.held
    if held.role == "relative":
        columns = _span(share.heads, config.heads)
        yield Slot(held.slot, TensorSlice(weight.name, columns=columns), transposed=True)
    elif held.slot in ("embedding.weight", "head.weight", "head.bias"):
        piece = TensorSlice(weight.name, rows=_span(share.vocabulary, config.vocabulary))
        if held.slot != "embedding.weight":
            if grid.is_last_stage:
                yield Slot(held.slot, piece)
            return
        if grid.is_first_stage:
            yield Slot(held.slot, piece)
        if grid.is_last_stage and config.tied and config.kind != "encoder":
            yield Slot("head.weight", piece)
    elif grid.is_last_stage if weight.stack else grid.is_first_stage:
        yield Slot(held.slot, TensorSlice(weight.name))


def _layer_slots(config: ModelConfig, share: Share, weight: StoredWeight, first: bool) -> Iterator[Slot]:
    kind = weight.held[0].slot.rpartition(".")[2]
    for place, held in enumerate(weight.held):
        role = ROLES[held.role]
        if role.split == "columns" and kind == "bias" and not first:
            continue
        rows, columns = _spans(config, share, role.split, held, weight, kind)
        turns = held.role in _TURNED and 0 < config.rotary_dim < config.head_dim
        yield Slot(
            name=held.slot,
            piece=TensorSlice(weight.name, rows=columns, columns=rows)
            if weight.transposed
            else TensorSlice(weight.name, rows=rows, columns=columns),
            transposed=weight.transposed,
            part=(place, len(weight.held)) if weight.by_head else None,
            turned=(config.head_dim, config.rotary_dim) if turns else None,
            head_dim=config.head_dim,
            first_input=columns[0] if columns else 0,
        )


def _spans(
    config: ModelConfig, share: Share, split: WeightSplit, held: SlotPlace, weight: StoredWeight, kind: str
) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return rows and columns of the tensor, as [out, in], that make up this rank's slot; None: all."""
    if split == "columns":
        if kind == "bias":
            return None, None
        feed = held.role == "down"
        part, count = (share.feed_forward, config.feed_forward) if feed else (share.heads, config.heads)
        return None, _span(part, count, 1 if feed else config.head_dim)
    if split != "rows":
        return None, None
    if held.role in ("gate", "up"):
        part, count, size = share.feed_forward, config.feed_forward, 1
    elif ROLES[held.role].rows == "queries":
        part, count, size = share.heads, config.heads, config.head_dim
    else:
        part, count, size = share.kv_heads, config.kv_heads, config.head_dim
    if weight.by_head:
        return _span(part, count, size * len(weight.held)), None
    own = _span(part, count, size)
    if len(weight.held) == 1:
        return own, None
    begin, end = own or (0, held.rows)
    return (held.start + begin, held.start + end), None


def _span(part: range, count: int, size: int = 1) -> tuple[int, int] | None:
    """Return the elements of a part of `count` items of `size` elements each; None for all of them."""
    return None if len(part) == count else (part.start * size, part.stop * size)
