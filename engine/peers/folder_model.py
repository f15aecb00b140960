"""Load transformers' model of a folder, by the kind of workload, for the reference and the peers based on it.

    model = from_folder(folder, "encode", torch.float32)
    write_small(config, "encode", parts=2, folder)      # a tiny model of the same family

An encoder is loaded without its pooler, which no engine here computes. Only local files are read; no code of a model's
repository is run.
"""

import inspect
import json
import os
from pathlib import Path
from typing import Any, Literal

import torch

from engine.models.pretrained import check_loaded, is_pooler

_MAX_REASON = 200
WorkKind = Literal["generate", "seq2seq", "encode"]


def from_folder(folder: Path, work: WorkKind, dtype: torch.dtype, **options: Any) -> Any:
    """Return the model in evaluation mode; options: further arguments of `from_pretrained`.

    Raises ValueError for a model that transformers cannot build, WeightsError for one with weights in no file.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable_progress_bar()
    try:
        model, loaded = auto_class(work).from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told by `check_loaded`, by name
            **_without_pooler(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), work),
            **options,
        )
    except (KeyError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]
        raise ValueError(f"{folder}: transformers cannot load the model ({reason}). Check config.json") from error
    # The last hidden states of an encoder do not depend on a pooler that cannot be left out.
    check_loaded(model, loaded, folder, is_pooler if work == "encode" else None)
    return plain(model)


def auto_class(work: WorkKind) -> Any:
    """Return transformers' class for models of this kind of workload."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return {"generate": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM, "encode": AutoModel}[work]


def plain(model: Any) -> Any:
    """Reset generation settings for plain greedy decoding: a repository's sampling settings are not part of the
    model.
    """
    from transformers import GenerationConfig

    if getattr(model, "generation_config", None) is not None:
        start = start_token(model.config) if model.config.is_encoder_decoder else None
        model.generation_config = GenerationConfig(decoder_start_token_id=start)
    return model.eval()


def start_token(config: Any) -> int | None:
    """Return the first token of an encoder-decoder's decoder as transformers' `generate` chooses it: that of the
    configuration, else the token that begins a text; None where neither is named.
    """
    named = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id"))
    return next((token for token in named if type(token) is int), None)


def _without_pooler(config: Any, work: WorkKind) -> dict[str, Any]:
    from transformers import MODEL_MAPPING

    if work != "encode" or type(config) not in MODEL_MAPPING:
        return {}
    taken = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in taken else {}


def write_small(config: dict[str, Any], work: WorkKind, parts: int, folder: Path) -> None:
    """Write a model like `config` with one layer and, per rank, two heads of 16."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(small_config(config, parts)))
    read = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = auto_class(work).from_config(read, **_without_pooler(read, work))
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})


def small_config(config: dict[str, Any], parts: int) -> dict[str, Any]:
    """Return the same options with small sizes, under the configuration's names."""
    from transformers import AutoConfig

    heads = 2 * parts
    sizes = {
        "num_hidden_layers": parts,
        "num_layers": parts,
        "num_decoder_layers": parts,
        "num_attention_heads": heads,
        "num_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 16,
        "d_kv": 16,
        "hidden_size": 16 * heads,
        "word_embed_proj_dim": 16 * heads,
        "intermediate_size": 32 * heads,
        "ffn_dim": 32 * heads,
        "n_inner": 32 * heads,
        "d_ff": 32 * heads,
        "vocab_size": 64 * heads,
    }
    family = type(AutoConfig.for_model(config["model_type"]))
    known = {*family().to_dict(), *config}
    other = family.attribute_map  # common name -> the family's own
    named = {other.get(name, name): value for name, value in sizes.items()}
    by_layer = ("layer_types", "max_window_layers", "pad_token_id", "bos_token_id", "eos_token_id", "dtype")
    kept = {name: value for name, value in config.items() if name not in by_layer and other.get(name, name) == name}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return kept | {name: value for name, value in named.items() if name in known} | special
