"""Executed FLOPs of a step of other families' models, with each kind of checkpointing, against torch's counter."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from configs.workloads.train import ActivationCheckpointing
from engine.planner.families import read_architecture
from engine.training.figures import hardware_flops
from engine.training.strategies.recompute import recompute
from tests.support.training.training_tasks import CPU_ATTENTION

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, TOKENS = 2, 16
WIDE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = WIDE | {"num_key_value_heads": 2, "head_dim": 8}
SHORT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
SIDES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": SHORT,  # query, key and value at once
    "gpt_neox": WIDE,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},  # ... and attention as plain products
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "max_seq_len": 64},
    "falcon": WIDE | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "phi3": GROUPED,  # gate and up at once too
    "phi": WIDE,
    "gptj": SHORT | {"rotary_dim": 4},
    "opt": WIDE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma2": GROUPED,  # a norm after the feed-forward
    "gemma3_text": GROUPED,
    "olmo2": GROUPED,  # no other norm of the feed-forward
    "glm4": GROUPED,  # a norm after the feed-forward, and gate and up at once
    "granite": GROUPED,
    "smollm3": GROUPED,
    "bart": SIDES,
}


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_flops_of_every_kind_of_block_are_those_that_torch_counts(
    kind: str, checkpointing: ActivationCheckpointing
) -> None:
    config = {"model_type": kind, **FAMILIES[kind]}
    architecture = read_architecture(config)
    made = transformers.AutoConfig.for_model(**config)
    for name, value in made.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(made, name, 0.0)
    torch.manual_seed(0)
    model = getattr(transformers, architecture.counted)(made).train()
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    recompute([block for blocks in lists for block in blocks], checkpointing)
    words = torch.randint(3, 60, (BATCH, TOKENS))
    sides = {"decoder_input_ids": words} if architecture.kind == "encoder_decoder" else {}
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        model(input_ids=words, use_cache=False, **sides).logits.sum().backward()
    assert hardware_flops(architecture, BATCH, TOKENS, checkpointing) == counter.get_total_flops()
