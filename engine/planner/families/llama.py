"""Decoders of the Llama kind: RMSNorm, rotary positions, gated feed-forward; and those with experts.

Llama, Mistral, Mixtral, Qwen2, Qwen3 (and with experts), gpt-oss, Gemma, Gemma 2, Gemma 3 (text), Phi-3 and 4,
Granite, OLMo 2, SmolLM3, GLM-4 (0414). They differ in biases, norms and windows: a row of `VARIANTS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from engine.planner.architecture import Architecture, Weight
from engine.planner.families.parts import (
    Fields,
    WeightTuple,
    attention,
    decoder_classes,
    feed_forward,
    gated_decoder,
    linear,
    norm,
    table,
    text_head,
)


def _every_layer(fields: Fields, layers: int) -> list[bool]:
    return [True] * layers


def _every_second_layer(fields: Fields, layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(layers)]


def _all_but_each_sixth(fields: Fields, layers: int) -> list[bool]:
    pattern = fields.number("sliding_window_pattern", default=6)
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _upper_layers(fields: Fields, layers: int) -> list[bool]:
    if not fields.flag("use_sliding_window", False):
        return [False] * layers
    first = fields.optional("max_window_layers", smallest=0)
    return [layer >= (28 if first is None else first) for layer in range(layers)]


def _every_layer_if_used(fields: Fields, layers: int) -> list[bool]:
    """Qwen3's experts have no max_window_layers in transformers."""
    return [fields.flag("use_sliding_window", False)] * layers


def _without_rotation_if_used(fields: Fields, layers: int) -> list[bool]:
    """SmolLM3 slides where it does not rotate."""
    interval, told = fields.number("no_rope_layer_interval", default=4), fields.entries("no_rope_layers")
    rotated = told or [(layer + 1) % interval != 0 for layer in range(layers)]
    return [not flag for flag in rotated]


@dataclass(frozen=True)
class _Variant:
    """Properties of one family. Defaults are those of transformers' configuration classes.

    qkv_bias: of queries, keys and values only; None: `attention_bias` decides, for the output too unless output_bias is
    False.
    slides: layers with a sliding window, if the configuration has no `layer_types`.
    window: default window in tokens; null in the configuration means no window.
    """

    stem: str
    activation: str = "silu"
    tied: bool = False
    qkv_bias: bool | None = None
    attention_bias: bool = False  # default of that key
    output_bias: bool = True
    mlp_bias: bool = False  # whether there is a key `mlp_bias`
    block_norms: int = 2
    query_key_norms: bool = False  # of each head
    whole_query_key_norms: bool = False  # of all heads together
    sinks: bool = False  # a learned logit for each head, beside the scores
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden / heads
    positions: int = 2048
    slides: Callable[[Fields, int], list[bool]] | None = None
    window: int | None = None
    experts: tuple[int, int] | None = None  # how many there are, and to how many a token goes
    classes: tuple[str, str, str] | None = None  # None: derived from the stem


_GEMMA = "gelu_pytorch_tanh"
VARIANTS = {
    "llama": _Variant("Llama", mlp_bias=True),
    "mistral": _Variant("Mistral", qkv_bias=False, kv_heads=8, positions=131072, slides=_every_layer, window=4096),
    "mixtral": _Variant("Mixtral", qkv_bias=False, kv_heads=8, positions=131072, slides=_every_layer, experts=(8, 2)),
    "qwen2": _Variant("Qwen2", qkv_bias=True, kv_heads=32, positions=32768, slides=_upper_layers, window=4096),
    "qwen3": _Variant(
        "Qwen3", query_key_norms=True, kv_heads=32, head_dim=128, positions=32768, slides=_upper_layers, window=4096
    ),
    "qwen3_moe": _Variant(
        "Qwen3Moe",
        query_key_norms=True,
        kv_heads=4,
        positions=32768,
        slides=_every_layer_if_used,
        window=4096,
        experts=(128, 8),
    ),
    "gpt_oss": _Variant(
        "GptOss",
        kv_heads=8,
        head_dim=64,
        positions=131072,
        attention_bias=True,
        mlp_bias=True,
        sinks=True,
        slides=_every_second_layer,
        window=128,
        experts=(128, 4),
    ),
    "gemma": _Variant("Gemma", _GEMMA, tied=True, kv_heads=16, head_dim=256, positions=8192),
    "gemma2": _Variant(
        "Gemma2",
        _GEMMA,
        tied=True,
        block_norms=4,
        kv_heads=4,
        head_dim=256,
        positions=8192,
        slides=_every_second_layer,
        window=4096,
    ),
    "gemma3_text": _Variant(
        "Gemma3",
        _GEMMA,
        tied=True,
        block_norms=4,
        query_key_norms=True,
        kv_heads=4,
        head_dim=256,
        positions=131072,
        slides=_all_but_each_sixth,
        window=4096,
        classes=("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3TextForSequenceClassification"),
    ),
    "phi3": _Variant("Phi3", qkv_bias=False, positions=4096, slides=_every_layer),
    "granite": _Variant("Granite", mlp_bias=True, classes=("GraniteForCausalLM", "GraniteModel", "GraniteModel")),
    "olmo2": _Variant("Olmo2", whole_query_key_norms=True),
    "smollm3": _Variant(
        "SmolLM3", tied=True, mlp_bias=True, kv_heads=4, positions=32768, slides=_without_rotation_if_used
    ),
    "glm4": _Variant(
        "Glm4", attention_bias=True, output_bias=False, block_norms=4, kv_heads=2, head_dim=128, positions=131072
    ),
}


def read_llama_like(fields: Fields) -> Architecture:
    """Read an architecture of one of `VARIANTS`."""
    variant = VARIANTS[fields.model_type]
    hidden, layers, heads = (fields.number(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    inner, vocabulary = fields.number("intermediate_size"), fields.number("vocab_size")
    kv_heads = fields.number("num_key_value_heads", default=_default_kv_heads(fields, variant, heads))
    # null, as for the engine: an equal share of the hidden size; a missing key: the default.
    usual_dim = None if "head_dim" in fields.config else variant.head_dim
    head_dim = fields.number("head_dim", default=usual_dim or hidden // heads)
    tied = fields.flag("tie_word_embeddings", variant.tied)
    bias = fields.flag("attention_bias", variant.attention_bias) if variant.qkv_bias is None else variant.qkv_bias
    output_bias = bias and variant.output_bias if variant.qkv_bias is None else False
    counted, head = text_head(fields, variant.classes or decoder_classes(variant.stem), hidden, vocabulary, tied=tied)
    experts, used = _experts(fields, variant)
    weights = (
        *table("embedding", vocabulary, hidden, split=True),
        *attention(hidden, heads, head_dim, layers, kv_heads=kv_heads, bias=bias, output_bias=output_bias),
        *_query_key_norms(variant, heads, kv_heads, head_dim, layers),
        *((Weight("attention.sinks", (heads,), layers, "vector", 0),) if variant.sinks else ()),
        *_feed_forward(fields, variant, hidden, inner, layers),
        *norm("norm", hidden, variant.block_norms * layers, bias=False),
        *norm("final_norm", hidden, 1, bias=False, block=False),
        *head,
    )
    return gated_decoder(
        fields,
        layers=layers,
        hidden=hidden,
        feed_forward=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        activation=fields.word("hidden_activation", fields.word("hidden_act", variant.activation)),
        tied=tied,
        weights=weights,
        windows=_windows(fields, variant, layers),
        default_positions=variant.positions,
        experts=experts,
        experts_per_token=used,
        counted=counted,
    )


def _query_key_norms(variant: _Variant, heads: int, kv_heads: int, head_dim: int, layers: int) -> WeightTuple:
    if variant.whole_query_key_norms:
        return (
            *norm("attention.query_norm", heads * head_dim, layers, bias=False),
            *norm("attention.key_norm", kv_heads * head_dim, layers, bias=False),
        )
    return norm("attention.query_key_norm", head_dim, 2 * layers, bias=False) if variant.query_key_norms else ()


def _default_kv_heads(fields: Fields, variant: _Variant, heads: int) -> int:
    # null: transformers uses one per query head; a missing key: the default.
    return heads if variant.kv_heads is None or "num_key_value_heads" in fields.config else variant.kv_heads


def _experts(fields: Fields, variant: _Variant) -> tuple[int, int]:
    if variant.experts is None:
        return 1, 1
    there, used = variant.experts
    return (
        fields.number("num_local_experts", "num_experts", default=there),
        fields.number("num_experts_per_tok", default=used),
    )


def _feed_forward(fields: Fields, variant: _Variant, hidden: int, inner: int, layers: int) -> WeightTuple:
    if variant.experts is None:
        bias = variant.mlp_bias and fields.flag("mlp_bias", False)
        return feed_forward(hidden, inner, layers, gated=True, bias=bias)
    if fields.number("decoder_sparse_step", default=1) != 1 or fields.get("mlp_only_layers"):
        raise ValueError(
            f"{fields.name}: config.json: only models with experts in every layer are known to the planner"
        )
    experts, used = _experts(fields, variant)
    narrow = variant.stem not in ("Mixtral", "GptOss")
    expert_inner = fields.number("moe_intermediate_size", default=768 if narrow else inner)
    bias, share = variant.mlp_bias, used / experts
    return (
        *linear("mlp.router", experts, hidden, layers, bias=bias),
        *feed_forward(hidden, expert_inner, layers * experts, gated=True, bias=bias, prefix="expert_", share=share),
    )


_IF_USED = (_upper_layers, _every_layer_if_used, _without_rotation_if_used)


def _windows(fields: Fields, variant: _Variant, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens; empty if all layers are unlimited."""
    if variant.slides is None:
        return ()
    window = fields.optional("sliding_window") if "sliding_window" in fields.config else variant.window
    if variant.slides in _IF_USED and not fields.flag("use_sliding_window", False):
        window = None  # whatever layer_types says
    types = fields.entries("layer_types")
    if not types:
        slides = variant.slides(fields, layers)
    else:
        slides = [kind == "sliding_attention" for kind in types]
    if window is None or not any(slides):
        return ()
    return tuple(window if slide else None for slide in slides)
