"""From a Hugging Face config.json to an `Architecture`: the weights of each family, one by one.

    architecture = read_architecture(config, "llama-2-7b")

Parameters are exact; tests count those of transformers' own modules.
"""

from collections.abc import Mapping
from typing import Any

from engine.planner.architecture import Architecture, Weight


def read_architecture(config: Mapping[str, Any], name: str = "") -> Architecture:
    """The architecture of a config.json. Raises ValueError naming the family or key that is not known."""
    kind = str(config.get("model_type"))
    if kind not in _READERS:
        raise ValueError(f"model_type {kind!r} is not known to the planner; use one of: {', '.join(_READERS)}")
    return _READERS[kind](config, name or kind)


def _llama(config: Mapping[str, Any], name: str) -> Architecture:
    hidden, layers, heads = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    feed_forward, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    tied = bool(config.get("tie_word_embeddings", False))
    weights = (
        Weight("embedding", (vocabulary, hidden), 1, "embedding", split=0, block=False),
        Weight("attention.query", (heads * head_dim, hidden), layers, "matrix", split=0, groups=heads),
        Weight("attention.key_value", (kv_heads * head_dim, hidden), 2 * layers, "matrix", split=0, groups=kv_heads),
        Weight("attention.output", (hidden, heads * head_dim), layers, "matrix", split=1, groups=heads),
        Weight("mlp.gate_up", (feed_forward, hidden), 2 * layers, "matrix", split=0),
        Weight("mlp.down", (hidden, feed_forward), layers, "matrix", split=1),
        Weight("norm", (hidden,), 2 * layers, "vector"),
        Weight("final_norm", (hidden,), 1, "vector", block=False),
        Weight("head", (vocabulary, hidden), 0 if tied else 1, "head", split=0, block=False),
    )
    return Architecture(
        name, "decoder", str(config["model_type"]), layers, layers, hidden, feed_forward, heads, kv_heads, head_dim,
        vocabulary, 0, True, "silu", "rmsnorm", tied, weights,
        max_positions=config.get("max_position_embeddings"),
    )  # fmt: skip


def _mpt(config: Mapping[str, Any], name: str) -> Architecture:
    hidden, layers, heads = (int(config[key]) for key in ("d_model", "n_layers", "n_heads"))
    feed_forward, vocabulary = int(config.get("expansion_ratio", 4)) * hidden, int(config["vocab_size"])
    weights = (
        Weight("embedding", (vocabulary, hidden), 1, "embedding", split=0, block=False),
        Weight("attention.qkv", (hidden, hidden), 3 * layers, "matrix", split=0, groups=heads),
        Weight("attention.output", (hidden, hidden), layers, "matrix", split=1, groups=heads),
        Weight("mlp.up", (feed_forward, hidden), layers, "matrix", split=0),
        Weight("mlp.down", (hidden, feed_forward), layers, "matrix", split=1),
        Weight("norm", (hidden,), 2 * layers, "vector"),
        Weight("final_norm", (hidden,), 1, "vector", block=False),
        Weight("head", (vocabulary, hidden), 0, "head", split=0, block=False),
    )
    return Architecture(
        name, "decoder", "mpt", layers, layers, hidden, feed_forward, heads, heads, hidden // heads,
        vocabulary, 0, False, "gelu", "layernorm", True, weights, max_positions=config.get("max_seq_len"),
    )  # fmt: skip


_READERS = {"llama": _llama, "mpt": _mpt}
