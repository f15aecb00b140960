"""Options that many families share; an entry of `configs.families.table` overrides some.

options = COMMON | BIASED | {"activation": Key("hidden_act", "gelu")}
"""

from typing import Any

from configs.families.family import Key

COMMON: dict[str, Any] = {
    "kind": "decoder",
    "vocabulary": Key("vocab_size"),
    "hidden": Key("hidden_size"),
    "feed_forward": Key("intermediate_size"),
    "layers": Key("num_hidden_layers"),
    "heads": Key("num_attention_heads"),
    "max_positions": Key("max_position_embeddings", 2048),
    "norm_epsilon": Key("rms_norm_eps", 1e-6),
    "activation": Key("hidden_act", "silu"),
    "gated": True,
    "positions": "rotary",
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "head_norms": False,
    "tied": Key("tie_word_embeddings", False),
    "initializer_range": Key("initializer_range", 0.02),
    "encoder_layers": 0,
    "scaled_embedding": False,
    "scaled_head": False,
}
"""Llama's options without those that differ among its relatives."""
BIASED: dict[str, Any] = {
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "gated": False,
}
"""A layer with LayerNorm, a bias everywhere and no gate."""
