"""Named sizes for synthetic models: `synthetic:<architecture>@<seed>`.

Each is a Hugging Face `config.json` in little. The Llamas' sizes were chosen for this project; gpt2-124m, bert-109m,
minilm-22m, t5-61m and vit-86m have the shapes of GPT-2, BERT base, MiniLM-L6, T5 small and ViT base (their
`config.json` on the hub), and there is one of about a million parameters of each family, to try what is computed. The
number in a name is the count of parameters in millions.
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


_NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _gpt2(hidden: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_inner": None,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": vocabulary,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        **_NO_TOKENS,
    }


def _opt(hidden: int, feed_forward: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": hidden,
        "ffn_dim": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "word_embed_proj_dim": hidden,
        "max_position_embeddings": 1024,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "init_std": 0.02,
        "tie_word_embeddings": True,
        **_NO_TOKENS,
    }


def _gpt_neox(hidden: int, feed_forward: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        **_NO_TOKENS,
    }


def _gemma(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return _llama(hidden, feed_forward, layers, heads, kv_heads, vocabulary, tied=True) | {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "head_dim": 2 * hidden // heads,
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        **_NO_TOKENS,
    }


def _phi3(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    found = _llama(hidden, feed_forward, layers, heads, kv_heads, vocabulary, tied=False)
    del found["head_dim"], found["attention_bias"], found["mlp_bias"]
    return found | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "original_max_position_embeddings": 2048,
        "sliding_window": None,
        **_NO_TOKENS,
    }


def _bert(hidden: int, feed_forward: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "initializer_range": 0.02,
        "pad_token_id": 0,
    }


def _t5(
    hidden: int, feed_forward: int, layers: int, heads: int, vocabulary: int, activation: str = "relu"
) -> dict[str, Any]:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": hidden,
        "d_ff": feed_forward,
        "d_kv": 64 if heads == 8 else hidden // heads,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "vocab_size": vocabulary,
        "n_positions": 512,
        "feed_forward_proj": activation,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }


def _vit(hidden: int, feed_forward: int, layers: int, heads: int, image: int, patch: int) -> dict[str, Any]:
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
        "num_channels": 3,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
        "initializer_range": 0.02,
    }


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama-1m": _llama(128, 352, 3, 4, 2, 2048, tied=True),
    "llama-4m": _llama(256, 704, 4, 4, 2, 4096, tied=True),
    "llama-13m": _llama(384, 1024, 6, 6, 2, 8192, tied=True),
    "llama-40m": _llama(512, 1408, 8, 8, 4, 16000, tied=False),
    "llama-110m": _llama(768, 2048, 10, 12, 4, 32000, tied=False),
    "llama-200m": _llama(1024, 2816, 12, 16, 4, 32000, tied=False),
    # OpenLLaMA 3B's 26 layers at an eighth of its width.
    "openllama-76m": _llama(400, 1080, 26, 4, 4, 32000, tied=False),
    "mistral-1m": _llama(128, 352, 4, 4, 2, 2048, tied=False)
    | {"model_type": "mistral", "sliding_window": 96}
    | {"architectures": ["MistralForCausalLM"]},
    "qwen2-1m": _llama(128, 352, 4, 4, 2, 2048, tied=True)
    | {"model_type": "qwen2"}
    | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3-1m": _llama(128, 352, 4, 4, 2, 2048, tied=True)
    | {"model_type": "qwen3"}
    | {"architectures": ["Qwen3ForCausalLM"]},
    "gpt2-1m": _gpt2(128, 4, 4, 2048),
    "gpt2-124m": _gpt2(768, 12, 12, 50257),
    "opt-1m": _opt(128, 512, 4, 4, 2048),
    "gpt-neox-1m": _gpt_neox(128, 512, 3, 4, 2048),
    "gemma-1m": _gemma(128, 512, 3, 4, 2, 2048),
    "phi3-1m": _phi3(128, 384, 3, 4, 2, 2048),
    "bert-1m": _bert(128, 512, 4, 4, 2048),
    "minilm-22m": _bert(384, 1536, 6, 12, 30522),
    "bert-109m": _bert(768, 3072, 12, 12, 30522),
    "t5-1m": _t5(128, 384, 2, 4, 2048),
    "t5-gated-1m": _t5(128, 320, 2, 4, 2048, "gated-gelu"),
    "t5-61m": _t5(512, 2048, 6, 8, 32128),
    # Of images, and only trained: engine.models has no such family.
    "vit-2m": _vit(192, 768, 4, 3, 32, 4),
    "vit-86m": _vit(768, 3072, 12, 12, 224, 16),
}


def one_of_each_family() -> list[str]:
    """The small architecture of every family, in all of its forms."""
    return [name for name in ARCHITECTURES if name.endswith("-1m")]
