"""Tensors of a checkpoint: name, shape and contained roles. No torch.

    for tensor in stored_weights(config):
        tensor.name, tensor.shape, [held.slot for held in tensor.held]
    names = names_in_file(config, header)          # our name -> the file's name, with any class prefix

A slot is the canonical form of a weight: "decoder.3.query.weight", [out, in]. A fused tensor holds several.
"""

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from configs.families.family import Family, Stack
from configs.families.sizes import ModelSizes
from configs.families.table import FAMILIES

StackName = Literal["encoder", "decoder"]
WeightSplit = Literal["rows", "columns", "whole", "words", "heads"]


@dataclass(frozen=True)
class WeightRole:
    """The kind of a layer's weight. rows, columns: its sizes; split: how ranks share it; bias: the option."""

    rows: Literal["queries", "shared", "feed_forward", "hidden", "head_dim"]
    columns: Literal["queries", "feed_forward", "hidden"] | None
    split: WeightSplit
    bias: Literal["qkv_bias", "output_bias", "mlp_bias", "norm_bias", "none"]


_INTO_HEADS = WeightRole("queries", "hidden", "rows", "qkv_bias")
_INTO_SHARED = WeightRole("shared", "hidden", "rows", "qkv_bias")
_OUT_OF_HEADS = WeightRole("hidden", "queries", "columns", "output_bias")
_NORM = WeightRole("hidden", None, "whole", "norm_bias")
_HEAD_NORM = WeightRole("head_dim", None, "whole", "none")
_INTO_FEED = WeightRole("feed_forward", "hidden", "rows", "mlp_bias")
ROLES: dict[str, WeightRole] = {
    "input_norm": _NORM,
    "query": _INTO_HEADS,
    "key": _INTO_SHARED,
    "value": _INTO_SHARED,
    "query_norm": _HEAD_NORM,
    "key_norm": _HEAD_NORM,
    "output": _OUT_OF_HEADS,
    "post_norm": _NORM,
    "gate": _INTO_FEED,
    "up": _INTO_FEED,
    "down": WeightRole("hidden", "feed_forward", "columns", "mlp_bias"),
    "cross_norm": _NORM,
    "cross_query": _INTO_HEADS,
    "cross_key": _INTO_SHARED,
    "cross_value": _INTO_SHARED,
    "cross_output": _OUT_OF_HEADS,
}
"""Split of each role over ranks: queries, keys, values, gate and up by rows, the products after them by columns."""


@dataclass(frozen=True)
class SlotPlace:
    """A slot in a tensor: its role, and its first row in the tensor (as [out, in])."""

    slot: str
    role: str
    start: int
    rows: int


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of a checkpoint. layer: None outside the layers. by_head: its rows are ordered by head first."""

    name: str
    shape: tuple[int, ...]
    stack: str
    layer: int | None
    held: tuple[SlotPlace, ...]
    transposed: bool = False
    by_head: bool = False


def tensor_shapes(config: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a checkpoint by its name; a tied head has none of its own."""
    return {tensor.name: tensor.shape for tensor in stored_weights(config)}


def layer_stacks(config: ModelSizes) -> dict[StackName, int]:
    """Layers of each of the model's stacks, in the order in which they are computed."""
    if config.kind == "encoder_decoder":
        return {"encoder": config.encoder_layers, "decoder": config.layers}
    return {"encoder" if config.kind == "encoder" else "decoder": config.layers}


def stored_weights(config: ModelSizes) -> Iterator[StoredWeight]:
    """Each tensor of a checkpoint that is read, in the order of the computation."""
    family = FAMILIES[config.family]
    yield from _tables(config, family)
    for stack, layers in layer_stacks(config).items():
        place = family.stacks[stack]
        for layer in range(layers):
            yield from layer_weights(config, stack, layer)
        if place.norm and config.final_norm:
            yield from _norm(config, family.prefix + place.norm, f"{stack}.norm")
    if config.kind != "encoder" and not config.tied:
        yield _table(f"{family.head}.weight", "head.weight", (config.vocabulary, config.hidden))
        if config.head_bias:
            yield _table(f"{family.head}.bias", "head.bias", (config.vocabulary,))


def layer_weights(config: ModelSizes, stack: StackName, layer: int) -> Iterator[StoredWeight]:
    """The tensors of one layer; the relative positions of a stack belong to its layer 0."""
    family = FAMILIES[config.family]
    place = family.stacks[stack]
    prefix = family.prefix + place.layers.format(layer)
    for name, roles in place.names.items():
        present = tuple(role for role in roles if _has(config, role))
        if not present:
            continue
        sizes = [_size(config, ROLES[role].rows) for role in present]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        columns = ROLES[present[0]].columns
        stored = prefix + _name(config, place, name)
        linear = columns is not None
        for kind in ("weight", "bias"):
            if kind == "bias" and not _biased(config, present[0]):
                continue
            shape: tuple[int, ...] = (sum(sizes),)
            if kind == "weight" and columns is not None:
                shape = (sum(sizes), _size(config, columns))
            turned = family.transposed and linear and kind == "weight"
            yield StoredWeight(
                name=f"{stored}.{kind}",
                shape=shape[::-1] if turned else shape,
                stack=stack,
                layer=layer,
                held=tuple(
                    SlotPlace(f"{stack}.{layer}.{role}.{kind}", role, start, size)
                    for role, start, size in zip(present, starts, sizes, strict=True)
                ),
                transposed=turned,
                by_head=name in family.by_head,
            )
    if layer == 0 and config.positions == "relative":
        held = SlotPlace(f"{stack}.relative.weight", "relative", 0, config.heads)
        shape = (config.relative_buckets, config.heads)
        yield StoredWeight(f"{family.prefix}{place.relative}.weight", shape, stack, None, (held,), transposed=True)


def names_in_file(config: ModelSizes, stored: Iterable[str]) -> dict[str, str]:
    """The file's own name for each of our tensors that it holds, by our name.

    A file's names carry the prefix of the class that saved it: "bert.encoder..." or "encoder...". A tied embedding may
    have the head's name alone.
    """
    family, names = FAMILIES[config.family], list(stored)
    expected = tensor_shapes(config)
    found = {}
    for name in names:
        ours = next((one for one in _our_names(family, name) if one in expected), None)
        if ours is not None:
            found[ours] = name
    head, table = f"{family.head}.weight", embedding_name(config)
    if table not in found:
        # Of tensors that share memory, `safetensors.torch.save_model` keeps the first by name.
        others = [f"{family.prefix}{one}.weight" for one in family.embeddings]
        others += sorted(head_names(config)) if config.tied else []
        kept = next((name for name in others if name in names), None)
        if kept is not None:
            found[table] = kept
    if family.head_in_embedding and head in expected and head not in found and table in found:
        found[head] = found[table]
    return found


def head_names(config: ModelSizes) -> set[str]:
    """Return the names that a head's tensor may have in a file; none for an encoder."""
    family = FAMILIES[config.family]
    return set() if config.kind == "encoder" else {f"{one}.weight" for one in (family.head, *family.heads)}


def embedding_name(config: ModelSizes) -> str:
    """Return our name of the embedding's tensor."""
    family = FAMILIES[config.family]
    return f"{family.prefix}{family.tables['embedding']}.weight"


def is_unused(config: ModelSizes, name: str) -> bool:
    """Whether a checkpoint may hold a tensor that is not computed: a head for another task, a mask, a table."""
    family = FAMILIES[config.family]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in family.unused)


def _our_names(family: Family, name: str) -> Iterator[str]:
    for old, new in family.renamed.items():
        if name.endswith(old):
            name = name.removesuffix(old) + new
    yield name
    for prefix in sorted(family.prefixes, key=len, reverse=True):
        if name.startswith(prefix):
            yield family.prefix + name.removeprefix(prefix)
    for head in family.heads:
        if name.startswith(f"{head}."):
            yield family.head + name.removeprefix(head)


def _tables(config: ModelSizes, family: Family) -> Iterator[StoredWeight]:
    rows = {
        "embedding": config.vocabulary,
        "positions": config.max_positions + config.position_offset,
        "types": config.token_types,
    }
    for slot, name in family.tables.items():
        if slot == "embedding_norm":
            yield from _norm(config, family.prefix + name, slot)
        elif rows[slot]:
            yield _table(f"{family.prefix}{name}.weight", f"{slot}.weight", (rows[slot], config.hidden))


def _norm(config: ModelSizes, name: str, slot: str) -> Iterator[StoredWeight]:
    for kind in ("weight", "bias") if config.norm_bias else ("weight",):
        yield _table(f"{name}.{kind}", f"{slot}.{kind}", (config.hidden,))


def _table(name: str, slot: str, shape: tuple[int, ...]) -> StoredWeight:
    """Return a tensor outside the layers: of its slot's stack, or of none."""
    stack, _, rest = slot.partition(".")
    of_stack = stack if rest.startswith("norm.") and stack != "embedding_norm" else ""
    return StoredWeight(name, shape, of_stack, None, (SlotPlace(slot, slot.rpartition(".")[0], 0, shape[0]),))


def _has(config: ModelSizes, role: str) -> bool:
    if role in ("query_norm", "key_norm"):
        return config.head_norms
    return config.gated or role != "gate"


def _biased(config: ModelSizes, role: str) -> bool:
    option = ROLES[role].bias
    return option != "none" and bool(getattr(config, option))


def _name(config: ModelSizes, place: Stack, name: str) -> str:
    if place.ungated is None or config.gated or not name.endswith(place.ungated[0]):
        return name
    return name.removesuffix(place.ungated[0]) + place.ungated[1]


def _size(config: ModelSizes, name: str) -> int:
    return {
        "queries": config.heads * config.head_dim,
        "shared": config.kv_heads * config.head_dim,
        "feed_forward": config.feed_forward,
        "hidden": config.hidden,
        "head_dim": config.head_dim,
    }[name]
