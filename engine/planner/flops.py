"""FLOPs of a model: executed FLOPs of a step, and model FLOPs as used in MFU.

    forward_flops(architecture, batch=8, tokens=2048).total             # exact, of matrix products
    training_flops(architecture, batch=8, tokens=2048, recompute="blocks")
    recomputed_share(architecture, selective=True)                      # of the blocks' products, by checkpointing
    model_flops(architecture, tokens=8 * 2048, sequence_length=2048)    # the numerator of MFU

**Executed** FLOPs count two for each multiply-add of each matrix product, as `torch.utils.flop_counter` does; other
operators (norms, softmax, rotary positions, the optimizer) are excluded. **Model** FLOPs are PaLM's convention
(arXiv 2204.02311, appendix B): 6 for each parameter and 12 x layers x heads x head_dim x sequence length, for each
token; no masking and no recomputation, tables of embeddings included. MPT's published MFU uses this convention.
"""

from dataclasses import dataclass
from typing import Literal

from engine.planner.architecture import Architecture

Recompute = Literal["none", "attention", "blocks"]
FUSED_QUERY_KEY_VALUE = ("gpt2", "gpt_neox", "bloom", "mpt", "falcon", "phi3")
FUSED_GATE_UP = ("phi3", "glm4")
"""Families that multiply these weights at once, in transformers 5."""
FUSED_BACKWARD = 2.5
"""Products of fused attention's backward pass for each of its forward's: five for two, as the scores are computed again
(FlashAttention, arXiv 2205.14135).
"""
_NORM_AFTER_BLOCK = ("bart", "gemma2", "gemma3_text", "olmo2", "glm4")
"""Families beside encoders of text whose block ends with a norm, which saves the last product's output."""


@dataclass(frozen=True)
class Flops:
    """FLOPs by kind of product.

    `blocks`: weights of blocks; `other`: head, classifier, projections outside of blocks.
    """

    blocks: float
    attention: float
    other: float

    @property
    def total(self) -> float:
        """FLOPs of all products."""
        return self.blocks + self.attention + self.other


def forward_flops(
    architecture: Architecture,
    batch: int,
    tokens: int,
    *,
    past: int = 0,
    source: int | None = None,
    encode: bool = True,
    logits: int | None = None,
    causal: bool = False,
) -> Flops:
    """Count one forward pass over `batch` sequences of `tokens` new tokens each, with `past` tokens in the cache.

    source: tokens of the encoder of an encoder-decoder (by default as many as `tokens`), which `encode` runs too.
    logits: tokens of a sequence whose logits are computed; None: all (training), 1: the last (generation).
    causal: whether the kernel skips masked scores (FlashAttention); else every score is computed.
    """
    source = source if source is not None else tokens
    passes = {"main": batch * tokens, "source": batch * source if encode else 0}
    blocks = other = 0.0
    for weight in architecture.weights:
        times = batch if weight.per_sequence else passes[weight.stream]
        if weight.role == "head" and logits is not None:
            times = batch * logits
        flops = 2.0 * weight.size * weight.products * weight.share * times
        blocks, other = (blocks + flops, other) if weight.block else (blocks, other + flops)
    return Flops(blocks, batch * _attention_flops(architecture, tokens, past, source, encode, causal), other)


def training_flops(
    architecture: Architecture,
    batch: int,
    tokens: int,
    *,
    source: int | None = None,
    causal: bool = False,
    fused: bool = False,
    recompute: Recompute = "none",
) -> Flops:
    """Count forward and backward: each product has two in the backward pass.

    fused: an attention kernel that stores no scores recomputes them in its backward pass (FlashAttention, arXiv
    2205.14135): five products for the forward's two. recompute: `attention` (arXiv 2205.05198, selective) or whole
    `blocks` (full checkpointing) once more.
    """
    forward = forward_flops(architecture, batch, tokens, source=source, causal=causal)
    again = 1 if recompute == "blocks" else 0
    attention_again = 1 if recompute != "none" else 0
    backward_attention = FUSED_BACKWARD if fused else 2
    return Flops(
        forward.blocks * (3 + again),
        forward.attention * (1 + backward_attention + attention_again),
        forward.other * 3,
    )


def recomputed_share(architecture: Architecture, *, selective: bool) -> float:
    """Return the share of the blocks' products that activation checkpointing computes again.

    Selective (torchtitan's policy by operator): every second product of a block, from the second. Full: all of them.
    Neither computes a block's last product, as torch stops when all saved tensors are restored, unless a norm follows
    that saves its output.
    """
    again = whole = 0.0
    for products, layers in _products_of_blocks(architecture):
        norm_follows = architecture.kind == "encoder" or architecture.model_type in _NORM_AFTER_BLOCK
        needed = products if norm_follows else products[:-1]
        again += layers * sum(needed[1::2] if selective else needed)
        whole += layers * sum(products)
    return again / whole if whole else 0.0


def _products_of_blocks(architecture: Architecture) -> list[tuple[list[float], int]]:
    """Return the elements that a token multiplies in each product of a block, in order, and the number of blocks.

    One entry, or two for an encoder-decoder. Where layers differ, each has the products of all kinds.
    """
    encoders = architecture.layers - architecture.decoder_layers
    found: dict[bool, list[float]] = {True: [], False: []}
    # The second attention of a decoder precedes its feed-forward.
    ordered = sorted(architecture.weights, key=lambda one: 1 if "cross_" in one.name else 2 if "mlp" in one.name else 0)
    for weight in ordered:
        if not weight.block or weight.role != "matrix":
            continue
        of_encoder = weight.stream == "source" and "cross_" not in weight.name
        layers = max(1, encoders if of_encoder else architecture.decoder_layers or architecture.layers)
        count = max(1, round(weight.products / layers))
        products = found[of_encoder]
        if weight.name == "attention.key_value" and architecture.model_type in FUSED_QUERY_KEY_VALUE:
            products[-1] += count * weight.size
        elif weight.name == "mlp.gate_up" and architecture.model_type in FUSED_GATE_UP:
            products.append(count * weight.size)
        else:
            products += [weight.size * weight.share] * count
    both = ((found[True], encoders), (found[False], architecture.decoder_layers or architecture.layers))
    return [(products, layers) for products, layers in both if products]


def model_flops(architecture: Architecture, tokens: int, sequence_length: int) -> float:
    """Return the model FLOPs of training on this many tokens, by PaLM's convention; only the routed experts count.

    For an encoder-decoder `tokens` are those of one side, and both sides are equally long.
    """
    crossed = architecture.decoder_layers if architecture.kind == "encoder_decoder" else 0
    attentions = architecture.layers + crossed
    attended = 12.0 * attentions * architecture.heads * architecture.head_dim * sequence_length
    return tokens * (6.0 * architecture.active_parameters + attended)


def attention_pairs(tokens: int, past: int = 0, window: int | None = None, *, causal: bool = False) -> int:
    """Count the query-key pairs of one sequence and head: `tokens` queries, and as many keys after `past` ones.

    Not causal: all of them; a window shortens the past only. Causal: the pairs that the mask allows.
    """
    if not causal:
        return tokens * (tokens + (past if window is None else min(past, window - 1)))
    if window is None:
        return tokens * past + tokens * (tokens + 1) // 2
    growing = min(tokens, max(0, window - past))  # queries with less than a full window
    return growing * past + growing * (growing + 1) // 2 + (tokens - growing) * window


def prompt_attention_flops(architecture: Architecture, tokens: int) -> float:
    """Return the mean FLOPs of a prompt's token and query head in a decoder: what causal masks and windows leave.

    All layers together. A sequence's own tokens count half, as `tokens` squared over two is the area under the mask.
    """
    depth = architecture.head_dim + (architecture.value_dim or architecture.head_dim)
    attended = (architecture.attended(layer, tokens) for layer in range(architecture.layers))
    return 2.0 * depth * sum(seen * (1 - seen / (2 * tokens)) for seen in attended)


def _attention_flops(
    architecture: Architecture, tokens: int, past: int, source: int, encode: bool, causal: bool
) -> float:
    """Count scores and weighted values of one sequence, all layers."""
    a_pair = 2.0 * architecture.heads * (architecture.head_dim + (architecture.value_dim or architecture.head_dim))
    windows = architecture.windows or (None,) * architecture.layers
    if architecture.kind in ("encoder", "vision"):
        return a_pair * architecture.layers * tokens * tokens
    if architecture.kind == "decoder":
        return a_pair * sum(attention_pairs(tokens, past, window, causal=causal) for window in windows)
    encoder_layers = architecture.layers - architecture.decoder_layers
    own = attention_pairs(tokens, past, causal=causal) + tokens * source
    return a_pair * (architecture.decoder_layers * own + (encoder_layers * source * source if encode else 0))
