"""A tiny model in the file layout of openlm-research/open_llama_3b: pickled weights and a sentencepiece tokenizer.

    model = make_openllama(folder)          # the transformers model whose weights were saved

No tokenizer.json, no safetensors; the tokenizer removes repeated spaces, as OpenLLaMA's does.
"""

import io
import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
TEXT = (Path(__file__).parents[3] / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "model_max_length": 2048,
    "pad_token": None,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "clean_up_tokenization_spaces": False,
}


def train_sentencepiece(path: Path, **options: Any) -> None:
    """Train a sentencepiece model on a page of the documentation; by default as OpenLLaMA's."""
    import sentencepiece

    written = io.BytesIO()
    settings = {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": True} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=written, vocab_size=VOCABULARY,
        hard_vocab_limit=False, normalization_rule_name=settings.pop("rule", "identity"), minloglevel=2, **settings,
    )  # fmt: skip
    path.write_bytes(written.getvalue())


def make_openllama(folder: Path, shards: int = 1) -> Any:
    """Write the folder and return the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float16)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # Older versions of transformers saved this buffer of each layer, as the published file does.
    for layer in range(config.num_hidden_layers):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.arange(8).float()
    names = sorted(state)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        files = {name: f"pytorch_model-{at % shards + 1:05d}-of-{shards:05d}.bin" for at, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({name: state[name] for name in names if files[name] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    train_sentencepiece(folder / "tokenizer.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    return model
