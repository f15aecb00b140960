"""Keys of a config.json: those that a family reads, those known to change no result. Any other key is rejected.

    check_keys(data, family)            # ValueError: config.json: logit_scale ...

A key that nobody reads may change the result, and the answers would be wrong in silence. Keys are harmless if
transformers gives the same logits whatever their value; `tests/engine/models/test_perturbed_configs.py` changes each.
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

from configs.common.printable import printable
from configs.families.family import PAGE, Family, Key
from configs.families.numbers import short_value

HARMLESS = (
    # Origin and form of the files.
    "_name_or_path", "name_or_path", "_commit_hash", "architectures", "transformers_version", "dtype", "torch_dtype",
    "tokenizer_class", "transformers.js_config", "unsloth_*", "_diffusers_version", "model_max_length", "auto_map",
    "is_llama_config", "directionality",  # of nanotron (SmolLM) and of Google's BERTs (multilingual, Chinese)
    "max_sequence_length", "custom_pipelines",  # of conversions of LLaMA (Vicuna), and of pipelines (Dolly, h2oGPT)
    "sentence_transformers", "language", "name",  # of cross-encoders, and of FARM (deepset's BERTs)
    # How transformers computes, not what.
    "use_cache", "attn_implementation", "_attn_implementation*", "_experts_implementation*", "_flash_attn_2_enabled",
    "gradient_checkpointing", "torchscript", "chunk_size_feed_forward", "pretraining_tp", "use_bfloat16",
    "tf_legacy_loss", "return_dict", "use_return_dict", "output_hidden_states", "output_attentions", "output_past",
    "base_model_*_plan", "distributed_config",
    # Training: dropout, losses, the scale of initial weights.
    "*dropout*", "*_pdrop", "layerdrop", "*_layerdrop", "initializer_range", "initializer_factor", "init_std",
    "router_aux_loss_coef", "neftune_noise_alpha", "z_loss*",
    # Heads for other tasks.
    "id2label", "label2id", "num_labels", "_num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "summary_*", "pooler_*",
    # Tokens and sampling: greedy decoding begins and ends where the workload says.
    "*_token_id", "*_token_ids", "prefix", "n_ctx", "max_length", "min_length", "max_new_tokens", "min_new_tokens",
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "repetition_penalty",
    "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "early_stopping",
    "num_return_sequences", "bad_words_ids", "forced_*", "suppress_tokens", "begin_suppress_tokens",
    "remove_invalid_values", "exponential_decay_length_penalty", "max_time", "renormalize_logits", "output_scores",
    "output_logits", "return_dict_in_generate", "cache_implementation", "guidance_scale", "low_memory",
    "penalty_alpha", "stop_strings", "use_mambapy",
    "num_assistant_tokens*", "assistant_*", "target_lookbehind",
)  # fmt: skip
"""Patterns of keys that change no result in any family."""

_ALWAYS_READ = ("model_type", "quantization_config")
_ROTARY = ("rope_parameters", "rope_scaling")
_WINDOWS = ("sliding_window",)
_UPPER = ("use_sliding_window", "max_window_layers")


def check_keys(data: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError naming a key that is neither read nor known to be harmless; null, false and empty ones are
    unset.
    """
    read = read_keys(family)
    for name, value in data.items():
        if value is None or value is False or value in ([], {}, ""):
            continue
        if name in read or any(fnmatch.fnmatchcase(name, pattern) for pattern in (*HARMLESS, *family.harmless)):
            continue
        shown = f"{printable(name, 80)} {short_value(value)}"
        raise ValueError(
            f"config.json: {shown} is not implemented for {data.get('model_type')} models and may change the result; "
            f"use a model without it ({PAGE} lists the keys that are read and ignored)"
        )


def read_keys(family: Family) -> frozenset[str]:
    """Return the keys of `config.json` that a family reads."""
    keys = [value for value in family.options.values() if isinstance(value, Key)]
    read = {name for key in keys for name in (key.name, *key.others)} | set(_ALWAYS_READ)
    read |= {*family.computed, *family.equal, *family.gate_keys}
    if family.options["positions"] == "rotary":
        read |= {*_ROTARY, family.theta_key, *family.rope_keys, *((family.share_key,) if family.share_key else ())}
    if family.slides != "none":
        read |= {*_WINDOWS, *(_UPPER if family.slides == "upper" else ())}
        read |= {"layer_types"} if family.layer_types else set()
    return frozenset(read)
