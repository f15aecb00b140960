"""A model's architecture as the planner sees it: its weights, one by one, and what attention keeps.

    architecture = read_architecture(config, "llama-2-7b")      # config: a Hugging Face config.json
    architecture.parameters                                     # exact

Everything else (bytes, FLOPs, shards) is arithmetic on the list of weights.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

Kind = Literal["decoder", "encoder", "encoder_decoder", "vision"]
Role = Literal["embedding", "matrix", "vector", "head"]


@dataclass(frozen=True)
class Weight:
    """One tensor of parameters and how many like it the model has.

    role: `embedding` is looked up and not multiplied, `matrix` multiplies every token, `head` multiplies tokens to
    logits (a tied head has copies=0: it owns no bytes, it still computes), `vector` is a norm or a bias.
    split: the dimension that tensor parallelism shards, None where each rank holds all of it; `groups` limits how
    finely (key and value projections: the number of their heads).
    share: of tokens that pass through it (1; experts: experts_per_token / experts).
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    role: Role
    split: int | None = None
    groups: int | None = None
    share: float = 1.0
    block: bool = True  # part of a repeated block, else of the model's root

    @property
    def size(self) -> int:
        """Elements of one copy."""
        return prod(self.shape)

    def shard(self, tp: int) -> int:
        """Elements of one copy that the fullest of `tp` ranks holds."""
        if self.split is None or tp == 1:
            return self.size
        units = self.groups or self.shape[self.split]
        return -(-units // tp) * (self.size // units)


@dataclass(frozen=True)
class Architecture:
    """`layers` counts blocks of a decoder, or of encoder and decoder together; `decoder_layers` is 0 for an encoder.

    windows: tokens that a layer's attention looks back, by layer (None: all); empty: all layers look at all.
    positions: rows of a learned table, 0 without one.
    """

    name: str
    kind: Kind
    model_type: str
    layers: int
    decoder_layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    gated: bool
    activation: str
    norm: Literal["layernorm", "rmsnorm"]
    tied: bool
    weights: tuple[Weight, ...]
    windows: tuple[int | None, ...] = ()
    max_positions: int | None = None
    experts: int = 1
    experts_per_token: int = 1
    kv_elements_per_token: int | None = (
        None  # a layer's cache, where it is not 2 x kv_heads x head_dim (latent attention)
    )

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, shared ones once."""
        return sum(weight.size * weight.copies for weight in self.weights)

    @cached_property
    def multiplied(self) -> float:
        """Parameters that one token is multiplied with, the head's included and tables left out."""
        return sum(
            weight.size * max(weight.copies, 1 if weight.role == "head" else 0) * weight.share
            for weight in self.weights
            if weight.role in ("matrix", "head")
        )

    @cached_property
    def block_parameters(self) -> int:
        """Of one block (of the largest kind there is: experts count all)."""
        return sum(weight.size * weight.copies for weight in self.weights if weight.block) // max(self.layers, 1)

    def rank_parameters(self, tp: int = 1) -> int:
        """Elements on the fullest of `tp` tensor-parallel ranks, all layers."""
        return sum(weight.shard(tp) * weight.copies for weight in self.weights)

    def attended(self, layer: int, tokens: int) -> int:
        """Tokens that a layer's attention sees at most."""
        window = self.windows[layer] if self.windows else None
        return tokens if window is None else min(window, tokens)
