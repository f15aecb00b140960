"""Named sizes for synthetic models: `synthetic:<architecture>@<seed>`.

Each is a Hugging Face `config.json` in little: Llama architecture, the sizes chosen for this project.
The number in a name is the count of parameters in millions, rounded.
"""

from typing import Any


def _llama(
    hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-1m": _llama(128, 352, 3, 4, 2, 2048, tied=True),
    "llama-4m": _llama(256, 704, 4, 4, 2, 4096, tied=True),
    "llama-13m": _llama(384, 1024, 6, 6, 2, 8192, tied=True),
    "llama-40m": _llama(512, 1408, 8, 8, 4, 16000, tied=False),
    "llama-110m": _llama(768, 2048, 10, 12, 4, 32000, tied=False),
    "llama-200m": _llama(1024, 2816, 12, 16, 4, 32000, tied=False),
}
