"""FLOPs against torch's own counter on small models, and MFU against a published column."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from engine.planner.catalog import find_model
from engine.planner.families import read_architecture
from engine.planner.flops import (
    attention_pairs,
    forward_flops,
    model_flops,
    recomputed_share,
    training_flops,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, TOKENS, SOURCE = 2, 12, 20
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64,
}  # fmt: skip
BERT: dict[str, Any] = {
    "model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
T5: dict[str, Any] = {
    "model_type": "t5", "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 4, "vocab_size": 64, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip
ALBERT = {**BERT, "model_type": "albert", "embedding_size": 8, "architectures": ["AlbertForMaskedLM"]}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
VIT: dict[str, Any] = {
    "model_type": "vit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 5,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "model_type": "whisper", "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "vocab_size": 64, "num_mel_bins": 5,
    "max_source_positions": SOURCE, "max_target_positions": 16, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip
LATENT = {
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 10,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def build(config: dict[str, Any]) -> Any:
    """Attention as plain products, since torch's counter knows no fused attention on a CPU."""
    torch.manual_seed(0)
    fields = {key: config[key] for key in config if key != "architectures"}
    reference = transformers.AutoConfig.for_model(**fields, attn_implementation="eager")
    if config["model_type"] in ("mixtral", "deepseek_v3"):
        reference._experts_implementation = "eager"  # products that torch's counter sees
    return getattr(transformers, read_architecture(config).counted)(reference).eval()


def words(tokens: int) -> torch.Tensor:
    return torch.randint(2, 60, (BATCH, tokens))


def inputs(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    if config["model_type"] == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16)}
    if config["model_type"] == "whisper":
        return {"input_features": torch.randn(BATCH, 5, 2 * SOURCE), "decoder_input_ids": words(TOKENS)}
    if config["model_type"] == "t5":
        return {"input_ids": words(SOURCE), "decoder_input_ids": words(TOKENS)}
    return {"input_ids": words(TOKENS)}


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, BERT, ALBERT, T5, MIXTRAL, VIT, WHISPER, LATENT], ids=lambda config: config["model_type"]
)
def test_a_forward_pass_is_what_torch_counts(config: dict[str, Any]) -> None:
    model, architecture = build(config), read_architecture(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs(config), **({} if config["model_type"] == "vit" else {"use_cache": False}))
    tokens = architecture.positions if architecture.kind == "vision" else TOKENS
    assert forward_flops(architecture, BATCH, tokens, source=SOURCE).total == counter.get_total_flops()


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config["model_type"])
def test_a_decode_step_is_what_torch_counts(config: dict[str, Any]) -> None:
    model, architecture = build(config), read_architecture(config)
    with torch.no_grad():
        cache = model(input_ids=words(TOKENS), use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(input_ids=words(1), past_key_values=cache)
    assert forward_flops(architecture, BATCH, 1, past=TOKENS).total == counter.get_total_flops()


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config["model_type"])
def test_backward_is_twice_forward(config: dict[str, Any]) -> None:
    model, architecture = build(config).train(), read_architecture(config)
    ids = words(TOKENS)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert training_flops(architecture, BATCH, TOKENS).total == counter.get_total_flops()


def test_checkpointing_repeats_the_blocks() -> None:
    model, architecture = build(LLAMA).train(), read_architecture(LLAMA)
    model.activation_checkpointing_enable()
    ids = words(TOKENS)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    ours = training_flops(architecture, BATCH, TOKENS, recompute="blocks")
    # Torch stops the repeat of a block before its last product, whose result no backward needs.
    down = next(weight for weight in architecture.weights if weight.name == "mlp.down")
    stopped = 2 * down.size * down.copies * BATCH * TOKENS
    assert ours.total - stopped == counter.get_total_flops()


def test_what_checkpointing_computes_again_by_hand() -> None:
    # GPT-2 multiplies query, key and value at once: of 3, 1, 4 and 4 squares the output alone is the second of a pair
    # before the last one, which torch leaves out.
    gpt2 = read_architecture(GPT2)
    assert recomputed_share(gpt2, selective=True) == 1 / 12
    assert recomputed_share(gpt2, selective=False) == 8 / 12
    # BERT's norm at the end of a block saves the last product.
    bert = read_architecture({**BERT, "intermediate_size": 128})
    assert recomputed_share(bert, selective=True) == 6 / 12
    assert recomputed_share(bert, selective=False) == 1
    # T5: 2 blocks of q, k, v, o and three of the feed-forward, 3 with a second attention before that.
    own, wide = 32 * 24, 32 * 48
    again = 2 * (2 * own + wide) + 3 * (4 * own + wide)
    whole = 2 * (4 * own + 3 * wide) + 3 * (8 * own + 3 * wide)
    assert recomputed_share(read_architecture(T5), selective=True) == again / whole


def test_kinds_of_flops_by_hand() -> None:
    architecture = read_architecture(LLAMA)
    ours = forward_flops(architecture, BATCH, TOKENS, logits=1)
    block = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48
    assert ours.blocks == 2 * BATCH * TOKENS * 3 * block
    assert ours.attention == 4 * BATCH * 3 * 32 * TOKENS**2
    assert ours.other == 2 * BATCH * 64 * 32
    causal = forward_flops(architecture, BATCH, TOKENS, causal=True)
    assert causal.attention == 4 * BATCH * 3 * 32 * TOKENS * (TOKENS + 1) // 2
    fused = training_flops(architecture, BATCH, TOKENS, fused=True, recompute="attention")
    assert fused.attention == 4.5 * ours.attention and fused.blocks == 3 * ours.blocks


def test_a_decoder_that_generates_does_not_encode_again() -> None:
    architecture = read_architecture(T5)
    step = forward_flops(architecture, 1, 1, past=4, source=SOURCE, encode=False)
    inner = 4 * 6
    own = 4 * 32 * inner + 2 * 32 * inner + 3 * 32 * 48  # attention, queries and output of the second one, feed-forward
    assert step.blocks == 2 * 3 * own
    assert step.attention == 4 * inner * 3 * (5 + SOURCE)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 9), (5, 0), (5, 2), (12, 4)])
def test_pairs_are_those_of_the_mask(tokens: int, past: int, window: int | None) -> None:
    queries, keys = torch.arange(past, past + tokens)[:, None], torch.arange(past + tokens)[None]
    mask = (keys <= queries) & (keys > queries - (window or 1000))
    assert attention_pairs(tokens, past, window, causal=True) == int(mask.sum())
    kept = past if window is None else min(past, window - 1)
    assert attention_pairs(tokens, past, window) == tokens * (tokens + kept)


PEAKS = {"h100_80gb": 989.5e12, "a100_80gb": 312e12}  # dense bfloat16, of NVIDIA's data sheets


# MosaicML's published MPT runs (llm-foundry, scripts/train/benchmarking): tokens/s over all GPUs, and their MFU.
@pytest.mark.parametrize(
    ("model", "parameters", "sequence_length", "gpu", "gpus", "tokens_per_second", "mfu_percent"),
    [
        ("mpt-70b", 64_862_437_376, 2048, "h100_80gb", 256, 265149, 42.42),
        ("mpt-30b", 29_975_214_080, 2048, "h100_80gb", 256, 550022, 40.89),
        ("mpt-13b", 12_853_954_560, 2048, "h100_80gb", 256, 1277214, 41.42),
        ("mpt-7b", 6_658_859_008, 2048, "h100_80gb", 256, 2590548, 44.15),
        ("mpt-3b", 2_651_837_440, 2048, "h100_80gb", 256, 5829686, 41.25),
        ("mpt-1b", 1_315_950_592, 2048, "h100_80gb", 256, 10894207, 39.15),
        ("mpt-760m", 807_656_448, 32768, "h100_80gb", 8, 130333, 31.84),
        ("mpt-70b", 64_862_437_376, 2048, "a100_80gb", 32, 11962, 48.56),
        ("mpt-30b", 30_019_254_272, 8192, "a100_80gb", 8, 4594, 39.38),
        ("mpt-13b", 13_011_240_960, 32768, "a100_80gb", 8, 8134, 51.69),
        ("mpt-7b", 6_918_905_856, 65536, "a100_80gb", 8, 8108, 46.97),
        ("mpt-3b", 2_814_366_720, 65536, "a100_80gb", 8, 14137, 46.05),
        ("mpt-1b", 1_445_974_016, 65536, "a100_80gb", 8, 24353, 46.18),
        ("mpt-760m", 807_656_448, 32768, "a100_80gb", 8, 70417, 54.57),
        ("mpt-350m", 420_997_120, 65536, "a100_80gb", 8, 60195, 52.7),
        ("mpt-125m", 174_070_272, 65536, "a100_80gb", 8, 162946, 54.13),
        ("mpt-3b", 2_814_366_720, 65536, "h100_80gb", 8, 26099, 26.81),
        ("mpt-3b", 2_647_905_280, 512, "h100_80gb", 8, 223721, 46.32),
        ("mpt-1b", 1_312_804_864, 512, "h100_80gb", 8, 418201, 43.21),
        ("mpt-1b", 1_312_804_864, 512, "a100_80gb", 8, 185186, 60.68),
    ],
)  # fmt: skip
def test_mfu_is_the_published_one(
    model: str,
    parameters: int,
    sequence_length: int,
    gpu: str,
    gpus: int,
    tokens_per_second: float,
    mfu_percent: float,
) -> None:
    """To its printed digits, half a unit of the last one and that of tokens/s allowed for."""
    architecture = find_model(model).with_positions(sequence_length)
    assert architecture.parameters == parameters
    mfu = model_flops(architecture, 1, sequence_length) * tokens_per_second / (PEAKS[gpu] * gpus)
    assert 100 * mfu == pytest.approx(mfu_percent, abs=0.006)


def test_model_flops_count_only_the_experts_in_use() -> None:
    mixtral = find_model("mixtral-8x7b")
    assert model_flops(mixtral, 10, 1) == pytest.approx(10 * (6 * mixtral.active_parameters + 12 * 32 * 4096))
    albert = find_model("albert-base-v2")  # twelve layers of one block's weights
    assert albert.active_parameters - albert.parameters == 11 * (4 * 768**2 + 2 * 768 * 3072)
    t5 = find_model("t5-small")
    assert model_flops(t5, 1, 512) == 6 * t5.parameters + 12 * (12 + 6) * 512 * 512
