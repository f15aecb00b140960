"""FLOPs of a model: executed FLOPs of a step, and model FLOPs as used in MFU.

    forward_flops(architecture, batch=8, tokens=2048).total             # exact, of matrix products
    training_flops(architecture, batch=8, tokens=2048, recompute="blocks")
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
    backward_attention = 2.5 if fused else 2
    return Flops(
        forward.blocks * (3 + again),
        forward.attention * (1 + backward_attention + attention_again),
        forward.other * 3,
    )


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
