"""What an entry of the table of families says: keys of `config.json`, and where a checkpoint keeps each weight.

Key("num_key_value_heads", 8)                       # a key, and what its absence means
Stack("h.{}.", {"ln_1": ("input_norm",), ...})      # the tensors of a layer, and the roles in each
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PAGE = "docs/architectures.md"
REQUIRED = object()


@dataclass(frozen=True)
class Key:
    """A key of `config.json`. default: where it is absent; REQUIRED: it must be there. others: names that win less.

    values: what each value means for us; another value is refused.
    """

    name: str
    default: Any = REQUIRED
    values: Mapping[Any, Any] | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Where a checkpoint keeps a stack of layers. Names are without ".weight" and ".bias".

    layers: what stands before the names of a layer, "{}" is its number. names: tensor of a layer -> the roles that it
    holds, one after the other. norm: the final one. relative: of layer 0. ungated: a name's end, and what it is where
    no product is gated.
    """

    layers: str
    names: Mapping[str, tuple[str, ...]]
    norm: str = ""
    relative: str = ""
    ungated: tuple[str, str] | None = None


@dataclass(frozen=True)
class Family:
    """What an entry says.

    options: fields of ModelConfig. Beyond those: "scaled_embedding" (by the root of the hidden size) and
    "scaled_head" (by its inverse). computed: keys that must have one of these values, the first being that of an absent
    key. equal: keys that must be absent or equal to an option. slides: which layers look back `window` tokens only.
    plan: the splits of transformers' own plan for tensor parallelism that mean the same as ours.
    prefix: what stands before the names of all but the head; a file may have one of `prefixes` instead. tables: slot
    of an embedding or its norm -> tensor. head: the head's name, which has no prefix; heads: what else it is called.
    transposed: weights of the layers lie [in, out]. by_head: fused tensors whose rows go head by head.
    head_in_embedding: a file without the head has the embedding for it, whatever the configuration says.
    renamed: ends of names in old files -> what they are now. unused: tensors that are not computed, as patterns.
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
    theta_key: str = "rope_theta"
    share_key: str = ""
    rotary_share: float = 1.0
    slides: Literal["none", "all", "upper"] = "none"
    window: int | None = 4096
    max_window_layers: int = 28
    transposed: bool = False
    by_head: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    head_in_embedding: bool = False
    unused: tuple[str, ...] = field(default=("*rotary_emb.inv_freq",))
