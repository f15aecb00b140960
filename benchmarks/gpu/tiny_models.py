"""A tiny model of every family, as transformers makes and saves it, for parity on the device.

Odd vocabularies and feed-forwards, and wide weights: a random model that always says the same would hide mistakes.
"""

import json
from pathlib import Path
from typing import Any

import torch

from configs.plans.model_manifest import ModelManifest

VOCABULARY = 97
_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES: dict[str, Any] = _TOKENS | {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GPT2 = {"n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 50, "initializer_range": 0.3}
_OPT = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 50, "num_hidden_layers": 3, "init_std": 0.3}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED | {"attention_bias": True, "mlp_bias": True},
    "mistral": _GROUPED | {"sliding_window": 6, "head_dim": 32},
    "qwen2": _GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": _GROUPED | {"head_dim": 16},
    "gpt2": _TOKENS | _GPT2 | {"vocab_size": VOCABULARY},
    "opt": _TOKENS | _OPT | {"vocab_size": VOCABULARY, "num_attention_heads": 4, "max_position_embeddings": 64},
    "gpt_neox": _SIZES | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25}},
    "gemma": _GROUPED | {"head_dim": 32},
    "phi3": _GROUPED | {"sliding_window": 6, "rope_parameters": _ROPE},
}
"""Family -> fields of its configuration."""
ENCODERS: dict[str, dict[str, Any]] = {"bert": _SIZES}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 48,
        "d_kv": 16,
        "d_ff": 50,
        "num_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
}


def make_model(family: str, folder: Path, device: torch.device) -> Any:
    """Return transformers' own model in float32 on the device, saved in the folder."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    makers: list[tuple[dict[str, dict[str, Any]], Any]] = [
        (DECODERS, AutoModelForCausalLM),
        (ENCODERS, AutoModel),
        (ENCODER_DECODERS, AutoModelForSeq2SeqLM),
    ]
    maker, fields = next((maker, table[family]) for table, maker in makers if family in table)
    torch.manual_seed(1)
    model = maker.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.dim() == 1 else 0.05
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(folder)
    return model.requires_grad_(False).to(device)


def manifest_of(folder: Path) -> ModelManifest:
    """Return the manifest of a saved model."""
    config = json.loads((folder / "config.json").read_text())
    return ModelManifest(identity="folder:0", source="folder", folder=str(folder), files={}, config=config)
