"""Build an `Architecture` from a Hugging Face config.json: the list of weights of each family.

    architecture = read_architecture(config, "llama-2-7b")

Parameters are exact; tests count those of transformers' own modules. They belong to the class named in the
configuration's `architectures`, or to the family's first class if none is known here; see `Architecture.counted`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from configs.common.files.reading import brief
from configs.families.numbers import check_finite
from engine.planner.architecture import Architecture
from engine.planner.families import encoders, gpt, seq2seq
from engine.planner.families.deepseek import read_deepseek
from engine.planner.families.llama import VARIANTS, read_llama_like
from engine.planner.families.llama4 import read_llama4
from engine.planner.families.parts import Fields
from engine.planner.families.vision import read_vit

READERS: dict[str, Callable[[Fields], Architecture]] = {
    **{kind: read_llama_like for kind in VARIANTS},
    "llama4_text": read_llama4,
    "deepseek_v2": read_deepseek,
    "deepseek_v3": read_deepseek,
    "gpt2": gpt.read_gpt2,
    "gptj": gpt.read_gptj,
    "gpt_neo": gpt.read_gpt_neo,
    "gpt_neox": gpt.read_gpt_neox,
    "opt": gpt.read_opt,
    "bloom": gpt.read_bloom,
    "mpt": gpt.read_mpt,
    "falcon": gpt.read_falcon,
    "phi": gpt.read_phi,
    "bert": encoders.read_bert,
    "roberta": encoders.read_roberta,
    "xlm-roberta": encoders.read_roberta,
    "distilbert": encoders.read_distilbert,
    "albert": encoders.read_albert,
    "electra": encoders.read_electra,
    "t5": seq2seq.read_t5,
    "mt5": seq2seq.read_t5,
    "bart": seq2seq.read_bart,
    "whisper": seq2seq.read_whisper,
    "vit": read_vit,
    "deit": read_vit,
}


_QUANTIZED = ("quantization_config", "compression_config", "quantization")
"""Keys for weights of fewer bits: transformers', that of compressed-tensors before version 0.5, and MLX's."""
_ANYWHERE = ("per_layer_config", "pruned_heads")
"""Keys that give any family's layers other sizes."""
_MOST_EXPERTS = 200_000
"""Of all layers: eight times as many as any known model has. Each has an entry in a plan, which a damaged file could
make fill the memory.
"""


def read_architecture(config: Mapping[str, Any], name: str = "") -> Architecture:
    """Return the architecture of a config.json. Raises ValueError naming the unknown family or key."""
    check_finite(config, f"{name}: config.json" if name else "config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        said = "has no model_type" if kind is None else f"model_type {brief(kind)} is not known to the planner"
        inner = config.get("text_config")
        known = isinstance(inner, Mapping) and inner.get("model_type") in READERS
        hint = "; its text_config is known: give that as a config.json of its own" if known else ""
        raise ValueError(f"config.json: {said}{hint}; use one of: {', '.join(READERS)}")
    for key in _QUANTIZED:
        if quantized := config.get(key):
            method = quantized.get("quant_method", quantized) if isinstance(quantized, Mapping) else quantized
            raise ValueError(
                f"config.json: {key} ({brief(method)}) is not known to the planner; "
                "give the unquantised checkpoint, or a copy of the file without this key to plan it in 16 bits"
            )
    fields = Fields(config, name or kind)
    fields.refuse(*_ANYWHERE)
    architecture = READERS[kind](fields)
    _check(config, architecture)
    return architecture


def _check(config: Mapping[str, Any], architecture: Architecture) -> None:
    """Reject values that transformers rejects too, or that would give meaningless figures."""
    hidden, heads, kv_heads = architecture.hidden, architecture.heads, architecture.kv_heads
    where = f"{architecture.name}: config.json:"
    own_head_dim = any(config.get(key) is not None for key in ("head_dim", "d_kv", "kv_lora_rank"))
    if hidden % heads and not own_head_dim:
        raise ValueError(f"{where} a hidden size of {hidden} cannot be shared equally by {heads} heads")
    if heads % kv_heads:
        raise ValueError(f"{where} {heads} query heads cannot share {kv_heads} heads of keys and values equally")
    if architecture.layers * architecture.experts > _MOST_EXPERTS:
        raise ValueError(
            f"{where} {architecture.experts:,} experts in each of {architecture.layers:,} layers are too many"
        )
    if architecture.experts_per_token > architecture.experts:
        raise ValueError(
            f"{where} a token cannot go to {architecture.experts_per_token} of {architecture.experts} experts"
        )
    if architecture.windows and len(architecture.windows) != architecture.layers:
        raise ValueError(f"{where} layer types are said of {len(architecture.windows)} of {architecture.layers} layers")
