"""Types of the family table's entries: keys of `config.json`, and the location of each weight in a checkpoint.

Key("num_key_value_heads", 8)                       # a key, and its default
Stack("h.{}.", {"ln_1": ("input_norm",), ...})      # the tensors of a layer, and the roles in each
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PAGE = "docs/reference/architectures.md"
REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """A key of `config.json`. default: used if absent; REQUIRED: it must be present. others: fallback names.

    values: our value for each accepted value; others are rejected.
    """

    name: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Location of a stack of layers in a checkpoint. Names are without ".weight" and ".bias".

    layers: prefix of a layer's names, "{}" is its number. names: tensor of a layer -> the roles that it holds, in
    order. norm: the final one. relative: of layer 0. ungated: suffix of a name, and its replacement without a gate.
    """

    layers: str
    names: Mapping[str, tuple[str, ...]]
    norm: str = ""
    relative: str = ""
    ungated: tuple[str, str] | None = None


@dataclass(frozen=True)
class Family:
    """One entry of the family table.

    options: fields of ModelConfig. Beyond those: "scaled_embedding" (by the root of the hidden size) and "scaled_head"
    (by its inverse). computed: keys that must have one of these values, the first being that of an absent key. equal:
    keys that must be absent or equal to an option. gate_keys: of the parts of the activation's name. rope_keys: further
    keys of rotary positions. slides: which layers attend to `window` tokens only, where no layer_types are given;
    layer_types: whether that key is read. harmless: patterns of keys that change no result, beyond
    `configs.families.keys.HARMLESS`. prefix: prefix of all names except the head's; a file may use one of `prefixes`
    instead. tables: slot of an embedding or its norm -> tensor. head: the head's name, which has no prefix; heads:
    alternative names. transposed: layer weights are stored [in, out]. by_head: fused tensors whose rows are ordered by
    head. embeddings: copies of the embedding, one of which may stand in a file in its place. head_in_embedding: without
    a head tensor the embedding is used, regardless of the configuration. renamed: suffixes of names in old files ->
    current names. unused: patterns of tensors that are ignored.
    """

    options: Mapping[str, Any]
    stacks: Mapping[str, Stack]
    tables: Mapping[str, str]
    prefix: str = "model."
    prefixes: tuple[str, ...] = ("",)
    head: str = "lm_head"
    heads: tuple[str, ...] = ()
    computed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    gate_keys: tuple[str, ...] = ()
    theta_key: str = "rope_theta"
    share_key: str = ""
    rotary_share: float = 1.0
    rope_keys: tuple[str, ...] = ("partial_rotary_factor",)
    slides: Literal["none", "all", "upper"] = "none"
    layer_types: bool = False
    window: int | None = 4096
    max_window_layers: int = 28
    transposed: bool = False
    by_head: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    head_in_embedding: bool = False
    unused: tuple[str, ...] = field(default=("*rotary_emb.inv_freq",))
    harmless: tuple[str, ...] = ()
