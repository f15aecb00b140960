"""Llama 4 (text): blocks with experts between dense ones, one expert a token beside a shared one, chunked attention.

Weights of `Llama4ForCausalLM` in transformers; layers without rotary positions attend to everything, the others to a
chunk of `attention_chunk_size` tokens, which bounds their cache as a window does.
"""

from engine.planner.architecture import Architecture
from engine.planner.families.parts import (
    Fields,
    attention,
    feed_forward,
    gated_decoder,
    linear,
    norm,
    table,
    text_head,
)

_CHUNK, _INTERVAL, _POSITIONS = 8192, 4, 131072
_CLASSES = ("Llama4ForCausalLM", "Llama4TextModel", "Llama4TextForSequenceClassification")


def read_llama4(fields: Fields) -> Architecture:
    """Read the configuration; defaults are those of transformers' Llama4TextConfig."""
    hidden, layers, heads = (fields.number(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    inner, dense_inner = fields.number("intermediate_size"), fields.number("intermediate_size_mlp", default=16384)
    vocabulary, kv_heads = fields.number("vocab_size"), fields.number("num_key_value_heads", default=8)
    head_dim = fields.number("head_dim", default=128)
    experts, used = fields.number("num_local_experts", default=16), fields.number("num_experts_per_tok", default=1)
    sparse = _sparse_layers(fields, layers)
    bias, tied = fields.flag("attention_bias", False), fields.flag("tie_word_embeddings", False)
    counted, head = text_head(fields, _CLASSES, hidden, vocabulary, tied=tied)
    share = used / experts
    with_experts = (
        *linear("mlp.router", experts, hidden, sparse, bias=False),
        *feed_forward(hidden, inner, sparse * experts, gated=True, prefix="expert_", share=share),
        *feed_forward(hidden, inner, sparse, gated=True, prefix="shared_"),
    )
    weights = (
        *table("embedding", vocabulary, hidden, split=True),
        *attention(hidden, heads, head_dim, layers, kv_heads=kv_heads, bias=bias, output_bias=bias),
        *(feed_forward(hidden, dense_inner, layers - sparse, gated=True) if sparse < layers else ()),
        *(with_experts if sparse else ()),
        *norm("norm", hidden, 2 * layers, bias=False),
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
        activation=fields.word("hidden_act", "silu"),
        tied=tied,
        weights=weights,
        windows=_windows(fields, layers),
        default_positions=_POSITIONS,
        experts=experts,
        experts_per_token=used,
        counted=counted,
    )


def _sparse_layers(fields: Fields, layers: int) -> int:
    """Return how many layers have experts."""
    said = fields.get("moe_layers")
    if said is not None:
        return sum(layer in fields.entries("moe_layers") for layer in range(layers))
    return layers // fields.number("interleave_moe_layer_step", default=1)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    chunk = fields.number("attention_chunk_size", default=_CHUNK)
    types, rotary = fields.entries("layer_types"), fields.entries("no_rope_layers")
    if types:
        chunked = [kind == "chunked_attention" for kind in types]
    elif rotary:
        chunked = [bool(flag) for flag in rotary]  # 1: with rotary positions, whatever the key is called
    else:
        interval = fields.number("no_rope_layer_interval", default=_INTERVAL)
        chunked = [(layer + 1) % interval != 0 for layer in range(layers)]
    return tuple(chunk if each else None for each in chunked)
