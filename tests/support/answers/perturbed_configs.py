"""Each field of a family's configuration changed, and our engine compared with transformers on the files.

    outcomes = perturb(tiny_config("llama"), folder)
    [one for one in outcomes if one.fate == "differs"]

Fields are those of transformers' configuration class, and every other key that its model code reads. For each value a
model is made by transformers' class, filled with random weights and saved by `save_pretrained`; its config.json then
holds the changed key as written. transformers' logits of these files are the expected answer.
"""

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from configs.families.checkpoint import TRAINED
from configs.families.config import ModelConfig
from configs.families.table import family_of
from configs.plans.model_manifest import ModelManifest
from engine.inference.weights import read_shard
from engine.models.weights import build_model
from engine.parallel.communicator import Communicator
from engine.parallel.grid import Grid
from tests.support.answers.encoder_runs import random_weights

Fate = Literal["followed", "refused", "harmless", "impossible", "differs", "unnamed"]
VOCABULARY, LENGTH = 61, 40
TOLERANCE = 2e-5
"""Of the largest logit: float32 in another order of sums."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_theta": 500.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0},
    {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    {"rope_type": "proportional", "rope_theta": 100.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 100.0, "attention_factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "attention_factor": 2.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 100.0}},
    {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 100.0}},
)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_parameters": _ROPES,
    "rope_scaling": _ROPES,
    "rope_theta": (500.0,),
    "rotary_emb_base": (500,),
    "rotary_pct": (0.5, 1.0),
    "partial_rotary_factor": (0.5, 1.0),
    "original_max_position_embeddings": (16,),
    "layer_types": (
        [_FULL] * 3,
        [_SLIDING] * 3,
        [_SLIDING, _FULL, _SLIDING],
        [_FULL, "chunked_attention", _FULL],
        ["attention"] * 3,
        [_FULL],
    ),
    "sliding_window": (8, 1, 0, 4096, None),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 2, 5),
    "per_layer_config": ([{"intermediate_size": 24}, {}, {}], {"1": {"num_key_value_heads": 4}}),
    "quantization_config": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "fp8"},
    ),
    "dtype": ("float16", "bfloat16", "float32"),
    "torch_dtype": ("float16", "bfloat16", "float32"),
    "feed_forward_proj": ("gated-gelu", "gated-silu", "gelu", "silu", "gated-relu", "gelu_new", "tanh"),
    "dense_act_fn": ("gelu", "silu", "relu"),
    "position_embedding_type": ("relative_key", "relative_key_query", "absolute"),
    "summary_type": ("last", "mean"),
    "problem_type": ("regression",),
    "architectures": (["OtherModel"],),
    "id2label": ({"0": "a", "1": "b", "2": "c"},),
    "attn_implementation": ("eager", "sdpa"),
    "_attn_implementation": ("eager",),
    "num_key_value_heads": (1, 2, 4, None),
    "head_dim": (4, 16, None),
    "eos_token_id": (3, [3, 4], None),
    "tie_word_embeddings": (True, False),
    "attn_logit_softcapping": (5.0,),
    "final_logit_softcapping": (5.0,),
    "query_pre_attn_scalar": (2, 64),
    "logit_scale": (0.5,),
    "pruned_heads": ({"0": [1]},),
    "decoder_start_token_id": (3,),
    "num_decoder_layers": (1, 2, None),
    "distributed_config": ({"tp_plan": {"layers.*.self_attn.q_proj": "rowwise"}},),
    "hidden_activation": ("relu",),
    "is_causal": (True, False),
    "max_position_embeddings": (128, 48),
    "n_positions": (128, 48),
    "vocab_size": (122, 62),
    "type_vocab_size": (4, 1),
}
"""Values of keys whose type or default does not suggest them."""
_ACTIVATIONS = ("silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "gelu_10",
                "tanh", "relu2", "mish", "linear", "sigmoid", "gelu_python", "laplace")  # fmt: skip
_EVERYWHERE = (
    "rope_theta", "rope_scaling", "partial_rotary_factor", "sliding_window", "use_sliding_window", "layer_types",
    "max_window_layers", "per_layer_config", "quantization_config", "torch_dtype", "tie_word_embeddings", "head_dim",
    "num_key_value_heads", "attention_bias", "mlp_bias", "is_causal", "attn_implementation", "_attn_implementation",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "logit_scale", "pruned_heads",
    "position_embedding_type", "hidden_activation", "use_bidirectional_attention", "is_decoder",
    "tie_encoder_decoder", "distributed_config", "is_encoder_decoder", "rotary_pct", "rotary_emb_base",
    "original_max_position_embeddings", "intermediate_size", "hidden_act", "num_hidden_layers", "hidden_size",
    "decoder_start_token_id", "scale_decoder_outputs", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
)  # fmt: skip
"""Keys of relatives and of older releases, tried with every family."""
_READ = re.compile(r"config\.([a-z_][a-z_0-9]*)|getattr\((?:self\.)?config, \"([a-z_0-9]+)\"")


@dataclass(frozen=True)
class Perturbed:
    """One field with one value. fate: differs: other logits in silence; unnamed: refused without the field's name."""

    field: str
    value: Any
    fate: Fate
    detail: str = ""


def tiny_config(kind: str, **changes: Any) -> dict[str, Any]:
    """Small sizes under the family's own names, as transformers' class writes them."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(kind)
    own = set(known.to_dict())
    sizes = {name: value for name, value in _SIZES.items() if name in own}
    if kind == "opt":
        sizes["word_embed_proj_dim"] = 32
    if kind == "t5":
        sizes["decoder_start_token_id"] = 0
    written = json.loads(AutoConfig.for_model(kind, **sizes, **changes).to_json_string(use_diff=False))
    return {name: value for name, value in written.items() if value is not None or name in sizes}


def keys_of(kind: str) -> list[str]:
    """Fields of the configuration class, keys that the model's code reads, and names that map to a field."""
    from transformers import MODEL_MAPPING, AutoConfig

    config = AutoConfig.for_model(kind)
    module = inspect.getmodule(MODEL_MAPPING[type(config)])
    assert module is not None
    read = {first or second for first, second in _READ.findall(inspect.getsource(module))}
    named = {one.name for one in fields(type(config))} | set(config.to_dict()) | read
    there = {one for one in named if not callable(getattr(config, one, None))}
    return sorted(there | set(config.attribute_map) | set(_EVERYWHERE) - {"model_type", "transformers_version"})


def values_of(field: str, present: Any) -> tuple[Any, ...]:
    """Other values of a field, legal or not: the reference decides."""
    if field in _VALUES:
        return _VALUES[field]
    if isinstance(present, bool):
        return (not present,)
    if isinstance(present, int):
        return (present * 2, present + 1, 1, 0) if present else (1, 4)
    if isinstance(present, float):
        return (present * 2 + 0.25, 0.0)
    if isinstance(present, str) and ("act" in field):
        return tuple(one for one in _ACTIVATIONS if one != present)
    if isinstance(present, str):
        return ("other",)
    if isinstance(present, dict | list):
        return ({}, None)
    return (True, False, 2, 0.5)


def perturb(config: dict[str, Any], folder: Path, keys: list[str] | None = None) -> Iterator[Perturbed]:
    """Try every field of a configuration with every value."""
    kind = config["model_type"]
    plain = _Reference(config, folder / "plain")
    for field in keys or keys_of(kind):
        if field in ("model_type", "transformers_version"):
            continue
        for value in values_of(field, config.get(field)):
            if field in config and config[field] == value and type(config[field]) is type(value):
                continue
            yield _try(config, field, value, plain, folder / "changed")


class _Reference:
    """transformers' model of a config.json, saved, and its logits. ours: what our engine reads of the config.json."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        (folder / "config.json").write_text(json.dumps(config))
        model = _class_of(config).from_config(_read(folder), dtype=torch.float32)
        random_weights(model, seed=1).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        loaded, told = _class_of(config).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        missing = {name for name in told["missing_keys"] if "pooler" not in name}
        if missing or told["mismatched_keys"]:
            raise ValueError(f"does not load what it saved: {missing}")
        self.weights = loaded.state_dict()
        self.logits = _answers(config, loaded.eval())

    def logits_with(self, changed: dict[str, Any], folder: Path) -> Tensor:
        """transformers' logits of the same weights under another config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(changed))
        model = _class_of(changed).from_config(_read(folder), dtype=torch.float32)
        model.load_state_dict(self.weights)
        return _answers(changed, model.eval())


def save_with_head(config: dict[str, Any], folder: Path, differing: bool) -> None:
    """Write a model whose file has a head, other than its embedding or equal to it, whatever config.json says."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = random_weights(_class_of(config).from_config(_read(folder), dtype=torch.float32), seed=1)
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    table = model.get_input_embeddings().weight.detach()
    tensors["lm_head.weight"] = torch.randn(table.shape, generator=_generator()) * 0.3 if differing else table.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reference_logits(config: dict[str, Any], folder: Path) -> Tensor:
    """transformers' logits of a folder."""
    loaded = _class_of(config).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return _answers(config, loaded.eval())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def _class_of(config: dict[str, Any]) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return {"bert": AutoModel, "t5": AutoModelForSeq2SeqLM}.get(config["model_type"], AutoModelForCausalLM)


def _read(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY - 4, (2, LENGTH), generator=_generator())


@torch.inference_mode()
def _answers(config: dict[str, Any], model: Any) -> Tensor:
    tokens = _tokens()
    if config["model_type"] == "bert":
        states: Tensor = model(input_ids=tokens).last_hidden_state
        return states
    if config["model_type"] == "t5":
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        forced = torch.cat([torch.full((2, 1), start), tokens[:, :20]], dim=1)
        logits: Tensor = model(input_ids=tokens, decoder_input_ids=forced).logits
        return logits
    whole: Tensor = model(input_ids=tokens).logits
    return whole


def _try(config: dict[str, Any], field: str, value: Any, plain: _Reference, folder: Path) -> Perturbed:
    changed = json.loads(json.dumps({**config, field: value}))
    try:
        parsed = ModelConfig.parse(changed)
    except ValueError as error:
        return Perturbed(field, value, "refused" if field in str(error) else "unnamed", str(error))
    except Exception as error:
        return Perturbed(field, value, "unnamed", f"{type(error).__name__}: {error}")
    ignored = parsed == ModelConfig.parse(config)
    try:
        if ignored:
            expected = plain.logits_with(changed, folder)
        else:
            reference = _Reference(changed, folder)
            expected = reference.logits
    except Exception as error:  # transformers refuses it: there is no answer to follow
        return Perturbed(field, value, "impossible", f"{type(error).__name__}: {error}"[:200])
    if ignored:
        same = _error(plain.logits, expected) <= TOLERANCE
        return Perturbed(field, value, "harmless" if same else "differs", "ignored by us")
    return _compared(changed, field, value, reference.folder, expected)


def _compared(changed: dict[str, Any], field: str, value: Any, folder: Path, expected: Tensor) -> Perturbed:
    try:
        found = our_logits(changed, folder)
    except ValueError as error:
        return Perturbed(field, value, "refused" if field in str(error) else "unnamed", str(error))
    except Exception as error:
        return Perturbed(field, value, "unnamed", f"{type(error).__name__}: {error}")
    worst = max(_error(answer, expected) for answer in found)
    if worst <= TOLERANCE:
        return Perturbed(field, value, "followed")
    return Perturbed(field, value, "differs", f"{worst:.1e} of the largest logit")


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, over the largest logit; NaN or another shape: infinite."""
    if found.shape != expected.shape:
        return float("inf")
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    return error if error == error else float("inf")


@torch.inference_mode()
def our_logits(config: dict[str, Any], folder: Path) -> list[Tensor]:
    """Answers of our engine: by one prefill, by a prefill and single tokens, and of the model that is trained."""
    manifest = ModelManifest(identity="folder:0", source="folder", folder=str(folder), files={}, config=config)
    parsed = ModelConfig.parse(config)
    cpu = torch.device("cpu")
    loaded = read_shard(manifest, Grid(1, 1, 1, 0), Communicator((0,), 0), torch.float32, cpu)
    tokens = _tokens()
    if parsed.kind == "encoder":
        return [loaded.shard.encode(tokens)]
    decoder, states = loaded.shard, None
    if parsed.kind == "encoder_decoder":
        states = loaded.shards["encoder"].encode(tokens)
        tokens = torch.cat([torch.full((2, 1), parsed.start_token), tokens[:, :20]], dim=1)
    found = []
    for first in (tokens.shape[1], 3):
        cache = decoder.new_cache(2, tokens.shape[1])
        if states is not None:
            cache.set_source(states, None)
        hidden = [decoder.forward(tokens[:, :first], cache)]
        hidden += [decoder.forward(tokens[:, at : at + 1], cache) for at in range(first, tokens.shape[1])]
        found.append(decoder.head(torch.cat(hidden, dim=1)))
    family = family_of(config["model_type"])
    if family is not None and config["model_type"] in TRAINED and parsed.activation == "silu":
        trained, _ = build_model(manifest, torch.float32, cpu)
        found.append(trained(tokens))
    return found
