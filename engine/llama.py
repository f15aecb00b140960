"""A decoder of the Llama family in plain PyTorch: one code path for training and for inference.

Written here instead of taken from transformers, so that the engine starts in half the time and every
line that is measured is ours; transformers stays the reference that the answers are judged by
(`tests/test_engine_llama.py` compares the two). Parameters bear the names of a Hugging Face checkpoint.

    model = Llama(LlamaConfig.parse(config))
    logits = model(tokens)                                      # training, or teacher forcing
    cache = KeyValueCache(model.config, batch, capacity, dtype, device)
    logits = model(tokens, cache, last_only=True)               # prefill, then one token a call
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MODEL_TYPES = ("llama",)
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class LlamaConfig:
    """What of a `config.json` fixes the computation."""

    vocabulary: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    initializer_range: float

    @classmethod
    def parse(cls, data: dict[str, Any]) -> "LlamaConfig":
        """Read a `config.json`; absent keys have transformers' defaults for Llama.

        Raises ValueError, naming the key, for what this decoder does not compute.
        """
        kind = data.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(
                f"config.json: model_type {kind!r} is not implemented; use one of: {', '.join(MODEL_TYPES)}"
            )
        missing = [name for name in _REQUIRED if data.get(name) is None]
        if missing:
            raise ValueError(f"config.json: {missing[0]} is missing; a Llama model needs {', '.join(_REQUIRED)}")
        activation = data.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"config.json: hidden_act {activation!r} is not implemented; use silu")
        if data.get("quantization_config"):
            raise ValueError("config.json: quantization_config is not implemented; use the unquantised checkpoint")
        hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
        kv_heads = int(data.get("num_key_value_heads") or heads)
        if heads % kv_heads:
            raise ValueError(f"config.json: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
        return cls(
            vocabulary=int(data["vocab_size"]),
            hidden=hidden,
            feed_forward=int(data["intermediate_size"]),
            layers=int(data["num_hidden_layers"]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=int(data.get("head_dim") or hidden // heads),
            max_positions=int(data.get("max_position_embeddings", 2048)),
            norm_epsilon=float(data.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(data),
            attention_bias=bool(data.get("attention_bias", False)),
            mlp_bias=bool(data.get("mlp_bias", False)),
            tied=bool(data.get("tie_word_embeddings", False)),
            initializer_range=float(data.get("initializer_range", 0.02)),
        )


def _rope_theta(data: dict[str, Any]) -> float:
    """Base of the rotary frequencies: `rope_theta`, or where transformers 5 writes it, `rope_parameters`."""
    theta = data.get("rope_theta")
    for name in ("rope_parameters", "rope_scaling"):
        rope = data.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"config.json: {name}.rope_type {kind!r} is not implemented; use one of: default")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"config.json: {name}.partial_rotary_factor is not implemented; use 1.0")
        theta = rope.get("rope_theta", theta)
    return float(10000.0 if theta is None else theta)


class KeyValueCache:
    """Keys and values of the tokens seen so far, allocated once for `batch` x `capacity` positions."""

    def __init__(
        self, config: LlamaConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (batch, config.kv_heads, capacity, config.head_dim)
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.length = 0

    def clear(self) -> None:
        """Begin anew; what lies beyond `length` is never read."""
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add [batch, kv_heads, new, head_dim] of one layer; views of all so far. `length` is the model's to move."""
        batch, end = keys.shape[0], self.length + keys.shape[2]
        all_keys, all_values = self._keys[layer][:batch], self._values[layer][:batch]
        all_keys[:, :, self.length : end] = keys
        all_values[:, :, self.length : end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32, as transformers does."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        # The product comes after the cast: the rounding of the reference.
        return self.weight * wide.to(hidden.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        queries, shared, bias = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden, shared, bias=bias)
        self.v_proj = nn.Linear(config.hidden, shared, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden, bias=bias)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        batch, length, _ = hidden.shape
        queries = self._heads(self.q_proj(hidden))
        keys = self._heads(self.k_proj(hidden))
        values = self._heads(self.v_proj(hidden))
        cos, sin = (table.to(queries.dtype) for table in rotary)
        queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
        if cache is not None:
            keys, values = cache.append(self.layer, keys, values)
        mixed = _attend(queries, keys, values, mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.config.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.feed_forward, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.feed_forward, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.feed_forward, config.hidden, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RmsNorm(config.hidden, config.norm_epsilon)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_epsilon)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, mask, cache)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the last norm: what a checkpoint calls `model`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # `nn.Embedding(...)` would draw weights, on the meta device too, where that imports the whole of
        # torch._dynamo: 1.2 s of every launch. Weights are always assigned after the model is built.
        unset = torch.empty(config.vocabulary, config.hidden)
        self.embed_tokens = nn.Embedding.from_pretrained(unset, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList([Layer(config, layer) for layer in range(config.layers)])
        self.norm = RmsNorm(config.hidden, config.norm_epsilon)


class Llama(nn.Module):
    """The whole language model; a tied head has no parameter of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocabulary, bias=False)
        # No buffer and never on the meta device, on which models are built before their weights are read.
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        self.frequencies = 1.0 / (config.rope_theta**exponents)

    def forward(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        padding: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits [batch, length, vocabulary] of the next token after each of `tokens` [batch, length].

        cache: holds earlier tokens, takes up these. padding [batch]: so many positions at the left of each
        row are filling; their logits mean nothing and no other position sees them. last_only: only the
        last position's logits, [batch, 1, vocabulary].
        """
        past, length = (cache.length if cache is not None else 0), tokens.shape[1]
        rotary = self._rotary(past, length, padding, tokens.device)
        mask = _mask(past, length, padding, tokens.device)
        hidden: Tensor = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, rotary, mask, cache)
        if cache is not None:
            cache.length += length
        hidden = self.model.norm(hidden[:, -1:] if last_only else hidden)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden, head)

    def _rotary(self, past: int, length: int, padding: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines in float32, [1 or batch, 1, length, head_dim]."""
        if self.frequencies.device != device:
            self.frequencies = self.frequencies.to(device)
        positions = torch.arange(past, past + length, device=device)[None]
        if padding is not None:
            positions = (positions - padding[:, None]).clamp(min=0)
        angles = (positions[..., None].float() * self.frequencies).repeat(1, 1, 2)[:, None]
        return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _mask(past: int, length: int, padding: Tensor | None, device: torch.device) -> Tensor | None:
    """Which keys a query sees, [1 or batch, 1, length, past + length]; None where the kernel needs no telling."""
    if padding is None and (past == 0 or length == 1):
        return None
    keys = torch.arange(past + length, device=device)
    queries = torch.arange(past, past + length, device=device)[:, None]
    if padding is None:
        return (keys <= queries)[None, None]
    visible = (keys <= queries)[None] & (keys >= padding[:, None, None])
    # A filling position sees itself: a row without any key would be NaN, and NaN survives a weight of zero.
    return (visible | (keys == queries)[None])[:, None]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [batch, heads, length, head_dim]; without a mask, causal."""
    batch, heads, length, head_dim = queries.shape
    groups = heads // keys.shape[1]
    if length == 1:
        # The heads of a group as positions of one query: nothing is repeated, which is 4 to 8 times faster
        # in bfloat16 on a CPU than enable_gqa is.
        grouped = queries.reshape(batch, keys.shape[1], groups, head_dim)
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return mixed.reshape(batch, heads, 1, head_dim)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1
    )
