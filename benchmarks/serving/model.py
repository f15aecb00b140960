"""The model that all servers load: llama-200m with a tokenizer, as files for Python's servers and as GGUF.

    files = write_model(folder, gguf=True)
    files.folder, files.prompts, files.gguf

The tokenizer is byte-level BPE, trained on Python's own standard library, so that every server gets the same texts and
counts the same tokens. Prompts are pieces of that text of exactly PROMPT_TOKENS tokens, none twice. Weights are random.
"""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHITECTURE, SEED = "llama-200m", "0"
PROMPT_TOKENS, PROMPTS = 64, 20_000
_END = "<|endoftext|>"
_TEXT_FILES = 700


@dataclass(frozen=True)
class ModelFiles:
    """gguf: None where llama.cpp is not measured."""

    folder: Path
    prompts: Path
    gguf: Path | None


def write_model(folder: Path, gguf: bool) -> ModelFiles:
    """Write what is not there yet. Raises OSError where the `gguf` package is wanted and missing."""
    model = folder / ARCHITECTURE
    if not (model / "model.safetensors.index.json").exists():
        command = [sys.executable, "-m", "engine.peers.checkpoint", ARCHITECTURE, SEED, str(model)]
        subprocess.run(command, check=True)
    config = json.loads((model / "config.json").read_text())
    if not (model / "tokenizer.json").exists():
        _write_tokenizer(model, config["vocab_size"])
    # Random weights never end an answer by themselves: all servers then answer with as many tokens as asked for.
    (model / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": None}))
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}, indent=2))
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        _write_prompts(Tokenizer.from_file(str(model / "tokenizer.json")), prompts)
    made = folder / f"{ARCHITECTURE}-bf16.gguf"
    if gguf and not made.exists():
        _write_gguf(model, config, made)
    return ModelFiles(model, prompts, made if gguf else None)


def _texts() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.glob("**/*.py"))[:_TEXT_FILES]:
        yield file.read_text(encoding="utf-8", errors="ignore")


def _write_tokenizer(model: Path, vocabulary: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([f"<|unused-{number}|>" for number in range(vocabulary - tokenizer.get_vocab_size())])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END, "bos_token": _END})
    )


def _write_prompts(tokenizer: Tokenizer, file: Path) -> None:
    """Pieces of the standard library whose text alone gives exactly the same number of tokens again."""
    found: dict[str, None] = {}
    for text in _texts():
        ids = tokenizer.encode(text).ids
        for start in range(0, len(ids) - PROMPT_TOKENS, PROMPT_TOKENS):
            piece = tokenizer.decode(ids[start : start + PROMPT_TOKENS])
            if "\ufffd" not in piece and len(tokenizer.encode(piece).ids) == PROMPT_TOKENS:
                found[piece] = None
    lines = list(found)
    np.random.default_rng(0).shuffle(lines)
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in lines[:PROMPTS]))


def _write_gguf(model: Path, config: dict[str, Any], file: Path) -> None:
    """The same weights for llama.cpp, whose rotary embedding wants the rows of q and k interleaved."""
    try:
        import gguf
    except ImportError as error:
        raise OSError("llama.cpp: needs the package gguf to write its model. Run `pip install gguf`") from error
    writer = gguf.GGUFWriter(str(file), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, json.loads((model / "tokenizer.json").read_text()), gguf)
    for name, values in _tensors(model):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleaved(values, heads if "q_proj" in name else kv_heads)
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
        else:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(_gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], gguf: Any) -> None:
    words = dict(tokenizer["model"]["vocab"])
    added = {one["content"]: one for one in tokenizer["added_tokens"]}
    words |= {text: one["id"] for text, one in added.items()}
    names = sorted(words, key=lambda word: words[word])
    kinds = [gguf.TokenType.CONTROL if name in added else gguf.TokenType.NORMAL for name in names]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _tensors(model: Path) -> Iterator[tuple[str, Any]]:
    import torch

    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - a handle, not a mapping
                yield name, opened.get_tensor(name).to(torch.float32).numpy()


def _interleaved(values: Any, heads: int) -> Any:
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.{_GGUF_NAMES[part]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"
