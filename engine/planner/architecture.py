"""A model's architecture as the planner sees it: its weights, one by one, and what attention keeps.

    architecture = read_architecture(config, "llama-2-7b")      # config: a Hugging Face config.json
    architecture.parameters                                     # exact

Everything else (bytes, FLOPs, shards) is arithmetic on the list of weights.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

Kind = Literal["decoder", "encoder", "encoder_decoder", "vision"]
Role = Literal["embedding", "matrix", "vector", "head"]
Stream = Literal["main", "source"]


@dataclass(frozen=True)
class Weight:
    """One tensor of parameters and how many like it the model has.

    role: `embedding` is looked up and not multiplied, `matrix` multiplies every token, `head` multiplies tokens to
    logits (a tied head has copies=0: it owns no bytes, it still computes), `vector` is a norm or a bias.
    split: the dimension that tensor parallelism shards, None where each rank holds all of it; `groups` limits how
    finely (key and value projections: the number of their heads).
    share: of tokens that pass through it (1; experts: experts_per_token / experts).
    uses: how many times the model multiplies a token with it, where that is not `copies` (layers that share).
    per_sequence: multiplies one vector of a sequence (a pooler, a classifier), not each token.
    stream: whose tokens: `source` are those of an encoder-decoder's encoder (and the keys and values that the
    decoder makes of its output), `main` all others.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    role: Role
    split: int | None = None
    groups: int | None = None
    share: float = 1.0
    block: bool = True  # part of a repeated block, else of the model's root
    uses: int | None = None
    per_sequence: bool = False
    stream: Stream = "main"

    @property
    def products(self) -> int:
        """How many matrix products with one token (or sequence) it takes part in; 0 for tables and vectors."""
        if self.role not in ("matrix", "head"):
            return 0
        if self.uses is not None:
            return self.uses
        return max(self.copies, 1) if self.role == "head" else self.copies

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
    head_dim is that of queries and keys; value_dim that of values where it is another.
    counted: the class of transformers whose parameters these are; the head follows from it.
    vocabulary is 0 for a model that reads no words.
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
    value_dim: int | None = None
    counted: str = ""

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, shared ones once."""
        return sum(weight.size * weight.copies for weight in self.weights)

    @cached_property
    def multiplied(self) -> float:
        """Parameters that one token is multiplied with, the head's included and tables left out."""
        return sum(weight.size * weight.products * weight.share for weight in self.weights if not weight.per_sequence)

    @cached_property
    def active_parameters(self) -> float:
        """What a token meets, as often as it does, tables included: the N of "6 N" FLOPs a token.

        Of experts only those that it goes to; layers that share their weights each.
        """
        return sum(
            weight.size * weight.share * (weight.copies if weight.uses is None else weight.uses)
            for weight in self.weights
        )

    def rank_parameters(self, tp: int = 1) -> int:
        """Elements on the fullest of `tp` tensor-parallel ranks, all layers."""
        return sum(weight.shard(tp) * weight.copies for weight in self.weights)

    def attended(self, layer: int, tokens: int) -> int:
        """Tokens that a layer's attention sees at most."""
        window = self.windows[layer] if self.windows else None
        return tokens if window is None else min(window, tokens)

    def cache_elements(self, tokens: int, tp: int = 1) -> int:
        """Keys and values that one sequence of `tokens` keeps over all layers, on the fullest of `tp` ranks.

        Heads that are fewer than ranks are held more than once; a latent cache has no heads and is held by each rank.
        An encoder keeps none. An encoder-decoder's decoder keeps its own; see `cross_cache_elements` for the other.
        """
        if not self.windows:
            return self.decoder_layers * tokens * self._per_token(tp)
        start = self.layers - self.decoder_layers
        return sum(self.attended(start + layer, tokens) for layer in range(self.decoder_layers)) * self._per_token(tp)

    def cross_cache_elements(self, source_tokens: int, tp: int = 1) -> int:
        """Keys and values of the source that the decoder of an encoder-decoder keeps for one sequence; else 0."""
        if self.kind != "encoder_decoder":
            return 0
        return self.decoder_layers * source_tokens * self._per_token(tp)

    def _per_token(self, tp: int) -> int:
        if self.kv_elements_per_token is not None:
            return self.kv_elements_per_token
        return -(-self.kv_heads // tp) * (self.head_dim + (self.value_dim or self.head_dim))

    def with_positions(self, rows: int) -> "Architecture":
        """The same with a learned table of so many rows; the same where there is no table."""
        if not self.positions:
            return self
        weights = tuple(
            replace(weight, shape=(rows, *weight.shape[1:])) if weight.name == "positions" else weight
            for weight in self.weights
        )
        return replace(self, weights=weights, positions=rows, max_positions=rows)
