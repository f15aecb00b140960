"""Llama-family decoder in plain PyTorch, unsharded, for training.

Implemented here instead of imported from transformers: the engine starts in half the time, and all measured code is in
this repository. transformers is the reference for correctness (`tests/engine/models/test_llama.py` compares the two).
Parameters have the names of a Hugging Face checkpoint. Inference has a sharded implementation
(`engine.inference.model`), which uses the positions and attention of this module.

    model = Llama(ModelConfig.parse(config))
    logits = model(tokens)
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.families.config import ModelConfig
from configs.families.rope import Rope


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32, as in transformers."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        # The product comes after the cast, with the same rounding as the reference.
        return self.weight * wide.to(hidden.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        queries, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden, shared, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden, bias=config.output_bias)
        self.q_norm = RmsNorm(config.head_dim, config.norm_epsilon) if config.head_norms else None
        self.k_norm = RmsNorm(config.head_dim, config.norm_epsilon) if config.head_norms else None

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, length, _ = hidden.shape
        queries = self._heads(self.q_proj(hidden))
        keys = self._heads(self.k_proj(hidden))
        values = self._heads(self.v_proj(hidden))
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        cos, sin = (table.to(queries.dtype) for table in rotary)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        mixed = attend(queries, keys, values, mask)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:2], -1, self.config.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.feed_forward, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden, config.feed_forward, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.feed_forward, config.hidden, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RmsNorm(config.hidden, config.norm_epsilon)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_epsilon)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Decoder(nn.Module):
    """Embedding, layers and the last norm: `model` in a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # `nn.Embedding(...)` would initialise weights, which on the meta device imports all of torch._dynamo: 1.2 s of
        # every launch. Weights are always assigned after the model is built.
        unset = torch.empty(config.vocabulary, config.hidden)
        self.embed_tokens = nn.Embedding.from_pretrained(unset, freeze=False)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.layers)])
        self.norm = RmsNorm(config.hidden, config.norm_epsilon)


class Llama(nn.Module):
    """The whole language model; a tied head has no separate parameter."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tied else nn.Linear(config.hidden, config.vocabulary, bias=False)
        # Not a buffer and never on the meta device, on which models are built before their weights are read.
        assert config.rope is not None
        self.frequencies = rotary_frequencies(config.rope, config.head_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of the next token after each of `tokens` [batch, length]."""
        length, device = tokens.shape[1], tokens.device
        rotary = self._rotary(length, device)
        masks = {window: visible(0, length, None, window, device) for window in set(self.config.windows)}
        hidden: Tensor = self.model.embed_tokens(tokens)
        for layer, window in zip(self.model.layers, self.config.windows, strict=True):
            hidden = layer(hidden, rotary, masks[window])
        hidden = self.model.norm(hidden)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden, head)

    def _rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines in float32, [1, 1, length, head_dim]."""
        if self.frequencies.device != device:
            self.frequencies = self.frequencies.to(device)
        angles = torch.arange(length, device=device)[:, None].float() * self.frequencies
        angles = angles.repeat(1, 2)[None, None]
        return angles.cos(), angles.sin()


def rotary_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position of each rotated pair of `head_dim` elements, [head_dim / 2] in float32, on the CPU.

    `llama3` divides low frequencies by `factor`, keeps high ones and interpolates between (the scheme of Llama 3.1, as
    transformers computes it).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    wavelengths = 2 * math.pi / frequencies
    slow, fast = wavelengths > rope.original_positions / low, wavelengths < rope.original_positions / high
    share = (rope.original_positions / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, blended))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of [.., head_dim] by its angle."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def visible(past: int, length: int, padding: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """Return the attention mask, [1 or batch, 1, length, past + length]; None if the kernel needs none.

    window: attended tokens, itself included; None for all.
    """
    if window is not None and past + length <= window:
        window = None
    if padding is None and window is None and (past == 0 or length == 1):
        return None
    keys = torch.arange(past + length, device=device)
    queries = torch.arange(past, past + length, device=device)[:, None]
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if padding is None:
        return seen[None, None]
    # A padding position attends to itself: a row without any key would be NaN, and NaN survives a weight of zero.
    return ((seen[None] & (keys >= padding[:, None, None])) | (keys == queries)[None])[:, None]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Compute attention [batch, heads, length, head_dim]; without a mask, causal or over everything.

    mask: True for visible keys, or a bias added to the scores; shared by all heads, or one for each. scale of the
    scores: None for head_dim ** -0.5.
    """
    batch, heads, length, head_dim = queries.shape
    groups = heads // keys.shape[1]
    if length == 1:
        # The heads of a group are treated as positions of one query, without repetition: 4 to 8 times faster in
        # bfloat16 on a CPU than enable_gqa.
        grouped = queries.reshape(batch, keys.shape[1], groups, head_dim)
        if mask is not None and mask.shape[1] == heads:
            mask = mask.reshape(mask.shape[0], keys.shape[1], groups, -1)
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return mixed.reshape(batch, heads, 1, head_dim)
    return functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=groups > 1, scale=scale
    )
