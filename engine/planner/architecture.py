"""The planner's model of an architecture: the list of its weights and the size of its attention cache.

    architecture = read_architecture(config, "llama-2-7b")      # config: a Hugging Face config.json
    architecture.parameters                                     # exact

Bytes, FLOPs and shards are computed from the list of weights.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

ArchitectureKind = Literal["decoder", "encoder", "encoder_decoder", "vision"]
Role = Literal["embedding", "matrix", "vector", "head"]
TokenStream = Literal["main", "source"]


@dataclass(frozen=True)
class Weight:
    """One parameter tensor and the number of equal tensors in the model.

    role: `embedding` is looked up and not multiplied, `matrix` multiplies every token, `head` multiplies tokens to
    logits (a tied head has copies=0: it owns no bytes, it still computes), `vector` is a norm or a bias.
    split: the dimension that tensor parallelism shards, None where each rank holds all of it; `groups` limits how
    finely (key and value projections: the number of their heads).
    share: of tokens that pass through it (1; experts: experts_per_token / experts).
    uses: how many times the model multiplies a token with it, where that is not `copies` (layers that share).
    per_sequence: multiplies one vector of a sequence (a pooler, a classifier), not each token.
    stream: the tokens it multiplies: `source` for an encoder-decoder's encoder and for the cross-attention keys and
    values, `main` for all others.
    wide: in float32 where the model is in float16.
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
    stream: TokenStream = "main"
    wide: bool = False

    @property
    def products(self) -> int:
        """Matrix products per token (or sequence) that use this weight; 0 for tables and vectors."""
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
        """Return the elements of one copy on the fullest of `tp` ranks."""
        if self.split is None or tp == 1:
            return self.size
        units = self.groups or self.shape[self.split]
        return -(-units // tp) * (self.size // units)


@dataclass(frozen=True)
class Architecture:
    """`layers` counts blocks of a decoder, or of encoder and decoder together; `decoder_layers` is 0 for an encoder.

    windows: attention window in tokens, by layer (None: unlimited); empty: unlimited in all layers.
    positions: rows of a learned table, 0 without one.
    head_dim: of queries and keys; value_dim: of values, if different.
    max_positions: the most tokens of a sequence. by_distance: positions are distances (T5, ALiBi), so that a model was
    made for max_positions and takes more.
    counted: the transformers class whose parameters are counted; it determines the head.
    vocabulary: 0 for a model without text input.
    """

    name: str
    kind: ArchitectureKind
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
        None  # elements of a layer's cache per token, if not 2 x kv_heads x head_dim (latent attention)
    )
    value_dim: int | None = None
    counted: str = ""
    by_distance: bool = False

    @cached_property
    def parameters(self) -> int:
        """All parameters of the model; shared ones are counted once."""
        return sum(weight.size * weight.copies for weight in self.weights)

    @cached_property
    def active_parameters(self) -> float:
        """Parameters used per token, counted once per use, including tables: the N of "6 N" FLOPs a token.

        Only the routed experts count; layers with shared weights count each time.
        """
        return sum(
            weight.size * weight.share * (weight.copies if weight.uses is None else weight.uses)
            for weight in self.weights
        )

    @property
    def position_limit(self) -> int | None:
        """The most tokens of a sequence; None: no limit, or an unknown one."""
        return None if self.by_distance else self.max_positions

    @property
    def most_stages(self) -> int:
        """Stages of a pipeline at most: each has a layer, in an encoder-decoder one of both."""
        encoder = self.layers - self.decoder_layers
        return min(encoder, self.decoder_layers) if self.kind == "encoder_decoder" else self.layers

    def splits(self, tp: int) -> bool:
        """Return whether tensor parallelism can split the model equally over `tp` ranks."""
        shared = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and self.feed_forward % tp == 0 and shared

    def rank_parameters(self, tp: int = 1) -> int:
        """Return the elements on the fullest of `tp` tensor-parallel ranks, all layers."""
        return sum(weight.shard(tp) * weight.copies for weight in self.weights)

    def attended(self, layer: int, tokens: int) -> int:
        """Largest number of tokens that a layer attends to."""
        window = self.windows[layer] if self.windows else None
        return tokens if window is None else min(window, tokens)

    def cache_elements(self, tokens: int, tp: int = 1) -> int:
        """Cached keys and values of one sequence of `tokens` over all layers, on the fullest of `tp` ranks.

        If there are fewer heads than ranks, heads are replicated; a latent cache has no heads and is held by each rank.
        An encoder has none. For an encoder-decoder this is the decoder's self-attention cache; see
        `cross_cache_elements`.
        """
        if not self.windows:
            return self.decoder_layers * tokens * self._per_token(tp)
        start = self.layers - self.decoder_layers
        return sum(self.attended(start + layer, tokens) for layer in range(self.decoder_layers)) * self._per_token(tp)

    def cross_cache_elements(self, source_tokens: int, tp: int = 1) -> int:
        """Cached keys and values of the source (cross-attention) for one sequence of an encoder-decoder; else 0."""
        if self.kind != "encoder_decoder":
            return 0
        return self.decoder_layers * source_tokens * self._per_token(tp)

    def _per_token(self, tp: int) -> int:
        if self.kv_elements_per_token is not None:
            return self.kv_elements_per_token
        return -(-self.kv_heads // tp) * (self.head_dim + (self.value_dim or self.head_dim))

    def with_positions(self, rows: int) -> "Architecture":
        """Return the architecture with a position table of this many rows; unchanged if it has no table."""
        if not self.positions:
            return self
        weights = tuple(
            replace(weight, shape=(rows, *weight.shape[1:])) if weight.name == "positions" else weight
            for weight in self.weights
        )
        return replace(self, weights=weights, positions=rows, max_positions=rows)
