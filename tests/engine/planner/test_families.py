"""Parameters of every family against transformers' own modules, and against totals that were published."""

from math import prod
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.families.config import ModelConfig
from configs.families.keys import read_keys
from configs.families.table import FAMILIES, families
from engine.planner.architecture import Architecture, Weight
from engine.planner.catalog import find_model, known_models
from engine.planner.families import READERS, read_architecture
from engine.planner.families.llama import VARIANTS
from tests.support.answers.perturbed_configs import keys_of, tiny_config, values_of

# transformers' MPT knows neither learned positions nor biases; llm-foundry's sizes are held against its own totals.
LLM_FOUNDRY = {model.name for model in known_models() if model.repository.startswith("llm-foundry/")}
REPRESENTATIVES = {model.config["model_type"]: model.name for model in reversed(known_models())}


def counted_by_transformers(config: dict[str, Any], name: str) -> int:
    """Unique parameters of the class that we say we count, built without memory."""
    ours = read_architecture(config)
    reference = transformers.AutoConfig.for_model(**{key: config[key] for key in config if key != "architectures"})
    with torch.device("meta"):
        model = getattr(transformers, ours.counted)(reference)
    total = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
    if ours.model_type in ("t5", "mt5") and not ours.tied and name.endswith("Generation"):
        # transformers ties the head of each T5 that it makes from a configuration, whatever that says.
        total += ours.vocabulary * ours.hidden
    return int(total)


@pytest.mark.parametrize("kind", READERS)
def test_a_published_model_of_each_family_is_counted_exactly(kind: str) -> None:
    name = {"mpt": "mosaicml-mpt-7b", "mt5": "t5-base"}.get(kind) or REPRESENTATIVES[kind]
    architecture = find_model(name)
    config = next(model.config for model in known_models() if model.name == name)
    assert architecture.parameters == counted_by_transformers(config, architecture.counted)


@pytest.mark.nightly
def test_every_model_of_the_catalog_is_counted_exactly() -> None:
    for model in known_models():
        if model.name not in LLM_FOUNDRY:
            architecture = find_model(model.name)
            assert architecture.parameters == counted_by_transformers(model.config, architecture.counted), model.name


# Known totals of the published weights (hub, papers, KerasHub's presets), stored buffers left out; Pythia's from
# arXiv 2304.01373, table 1, with both tables of embeddings; MPT's from llm-foundry's published runs.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "codellama-34b": 33_743_970_304,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "granite-3.1-8b": 8_170_848_256,
    "olmo-2-7b": 7_298_617_344,
    "smollm3-3b": 3_075_098_624,
    "glm-4-9b-0414": 9_400_279_040,
    "deepseek-v2": 235_741_434_880,
    "llama-4-scout": 107_769_861_120,  # 109 billion with the vision tower of 0.9 (model card)
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 18_915_328 + 2 * 50304 * 512,
    "pythia-2.8b": 2_517_652_480 + 2 * 50304 * 2560,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "bloom-176b": 176_247_271_424,
    "falcon-rw-1b": 1_311_625_216,
    "mpt-125m": 125_311_488,
    "mpt-70b": 64_862_437_376,
    "mosaicml/mpt-7b": 6_649_286_656,
    "t5-small": 60_506_624,
    "t5-11b": 11_307_321_344,
    "flan-t5-small": 76_961_152,
    "flan-t5-xxl": 11_135_332_352,
    "bart-large": 406_291_456,
    "whisper-large-v3": 1_543_490_560,
    "vit-base": 86_567_656,
    "all-minilm-l6-v2": 22_713_216,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_totals(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


def test_the_class_in_the_configuration_says_what_is_on_top() -> None:
    config = next(model.config for model in known_models() if model.name == "bert-base-uncased")
    masked, body = read_architecture(config), read_architecture(config | {"architectures": ["BertModel"]})
    assert (masked.counted, masked.parameters) == ("BertForMaskedLM", 109_514_298)
    assert (body.counted, body.parameters) == ("BertModel", 109_482_240)
    unknown = read_architecture(config | {"architectures": ["BertForAnythingElse"]})
    assert (unknown.counted, unknown.parameters) == ("BertModel", 109_482_240)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not known to the planner; use one of: llama"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "its text_config is known"),
        ({"model_type": "llama"}, "mine: config.json: hidden_size is missing; a positive whole number is needed"),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": "2"}, "mine: config.json: n_layer is '2'"),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 0}, "mine: config.json: n_layer is 0"),
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 10**12}, "n_layer is 1000000000000; a whole number from 1"),
        ({"model_type": "gpt2", "n_embd": float("nan")}, "mine: config.json: n_embd is NaN, expected a finite number"),
        (
            {"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}},
            r"quantization \({'group_size': 64, 'bits': 4}\) is not known .* without this key",
        ),
        (
            {"model_type": "llama", "compression_config": {"quant_method": "compressed-tensors"}},
            "compression_config .'compressed-tensors'.",
        ),
        ({"model_type": "bert", "position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not known"),
        ({"model_type": "xlm-roberta", "position_embedding_type": "rotary"}, "position_embedding_type 'rotary'"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config .* without this key"),
        (
            {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 3, "vocab_size": 9},
            "a hidden size of 64 cannot be shared equally by 3 heads",
        ),
        (
            {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 3, "intermediate_size": 9, "vocab_size": 9},
            "4 query heads cannot share 3 heads of keys and values",
        ),
    ],
)  # fmt: skip
def test_errors_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_architecture(config, "mine")


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 9,
    "vocab_size": 9,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10**12},
            "num_hidden_layers is 1000000000000; a whole number from 1 to 10,000 is needed",
        ),
        ({"num_hidden_layers": 1e12}, "num_hidden_layers is 1000000000000.0; a whole number from 1 to 10,000"),
        ({"hidden_size": 10**400}, "hidden_size is a whole number of more than 64 bits; a whole number from 1"),
        ({"vocab_size": float("inf")}, "vocab_size is infinite, expected a finite number"),
        ({"architectures": True}, "architectures is True; a list is needed"),
        ({"model_type": "mistral", "sliding_window": {}}, "sliding_window is {}; a whole number"),
        ({"model_type": "qwen2", "layer_types": 3}, "layer_types is 3; a list is needed"),
        ({"max_position_embeddings": []}, "max_position_embeddings is []; a whole number"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": 3}, "id2label is 3; an object is needed"),
    ],
)
def test_values_of_another_kind_or_beyond_bounds_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_architecture(LLAMA | changes, "mine")
    assert f"mine: config.json: {message}" in str(caught.value)


def test_every_family_reads_nothing_but_whole_numbers_from_junk() -> None:
    for kind in READERS:
        with pytest.raises(ValueError, match=r"config\.json"):
            read_architecture({"model_type": kind, "hidden_size": "wide", "n_embd": [], "d_model": None, "dim": {}})


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_roberta_takes_as_many_tokens_as_transformers_finds_positions_for(kind: str, padding: int) -> None:
    config = {
        "model_type": kind, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
        "vocab_size": 9, "max_position_embeddings": 20, "pad_token_id": padding,
    }  # fmt: skip
    most = read_architecture(config).max_positions
    assert most is not None and read_architecture(config).positions == 20
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))
    model(torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        model(torch.full((1, most + 1), 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_layers": []},
        {"moe_layers": [1, 3, 9]},
        {"moe_layers": None, "interleave_moe_layer_step": 2},
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [1, 0, 0, 1]},
    ],
)
def test_a_llama_4_has_experts_and_chunks_where_transformers_has_them(changes: dict[str, Any]) -> None:
    config = LLAMA | {"model_type": "llama4_text", "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"intermediate_size_mlp": 12, "num_local_experts": 3, "pad_token_id": 0} | changes
    ours = read_architecture(config)
    assert ours.parameters == counted_by_transformers(config, ours.counted)
    kinds = ["full_attention" if window is None else "chunked_attention" for window in ours.windows]
    assert kinds == transformers.AutoConfig.for_model(**config).layer_types


@pytest.mark.parametrize("kind", ["t5", "mt5"])
@pytest.mark.parametrize(
    "changes", [{"is_gated_act": True}, {"feed_forward_proj": "gated-gelu", "is_gated_act": False}, {"d_kv": None}]
)
def test_a_t5_is_gated_where_transformers_gates_it(kind: str, changes: dict[str, Any]) -> None:
    config = {"model_type": kind, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    config = {name: value for name, value in (config | changes).items() if value is not None}
    ours, reference = read_architecture(config), transformers.AutoConfig.for_model(**config)
    assert (ours.gated, ours.activation, ours.head_dim) == (
        reference.is_gated_act,
        reference.dense_act_fn,
        reference.d_kv,
    )
    assert ours.parameters == counted_by_transformers(config, ours.counted)


@pytest.mark.parametrize("kind", sorted({*VARIANTS, "llama4_text", "deepseek_v2", "deepseek_v3"}))
def test_a_decoder_that_names_no_positions_has_as_many_as_in_transformers(kind: str) -> None:
    config = next(model.config for model in known_models() if model.config["model_type"] == kind)
    unnamed = {name: value for name, value in config.items() if name != "max_position_embeddings"}
    assert read_architecture(unnamed).max_positions == transformers.AutoConfig.for_model(kind).max_position_embeddings


def test_a_qwen_without_sliding_windows_has_none_whatever_its_layers_are_called() -> None:
    layers = {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 8}
    layers |= {"layer_types": ["full_attention", "sliding_attention"]}
    assert read_architecture(LLAMA | layers).windows == ()
    assert read_architecture(LLAMA | layers | {"use_sliding_window": True}).windows == (None, 8)


def test_the_layers_of_a_qwen3_with_experts_slide_as_in_transformers() -> None:
    """All of them do, whatever max_window_layers says: nothing of the first token reaches the last one's logits."""
    config = LLAMA | {"model_type": "qwen3_moe", "num_key_value_heads": 4, "moe_intermediate_size": 16}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "max_window_layers": 1}
    assert read_architecture(config).windows == read_architecture(config | {"use_sliding_window": False}).windows == ()
    config |= {"use_sliding_window": True}
    assert read_architecture(config).windows == (4, 4)
    tokens = torch.arange(12)[None] % 9
    other = torch.cat([tokens[:, :1] + 1, tokens[:, 1:]], dim=1)
    for used in (True, False):
        reference = transformers.AutoConfig.for_model(**config | {"use_sliding_window": used, "initializer_range": 0.5})
        model = transformers.AutoModelForCausalLM.from_config(reference).eval()
        with torch.no_grad():
            change = (model(tokens).logits[:, -1] - model(other).logits[:, -1]).abs().max()
        assert (float(change) < 1e-5) is used, change


@pytest.mark.parametrize("kind", sorted(set(families()) & set(READERS)))
def test_null_means_to_a_plan_what_it_means_to_the_engine(kind: str) -> None:
    config, compared = tiny_config(kind), 0
    for key in sorted(read_keys(FAMILIES[kind])):
        changed = config | {key: None}
        try:
            ours = ModelConfig.parse(changed)
        except ValueError:
            continue
        plan = read_architecture(changed)
        compared += 1
        assert (plan.kv_heads, plan.head_dim, plan.gated) == (ours.kv_heads, ours.head_dim, ours.gated), key
        assert plan.windows == (ours.windows if any(ours.windows) else ()), key
        if kind != "bert":  # a plan counts its pooler
            assert plan.parameters == sum(prod(shape) for shape in ours.tensor_shapes().values()), key
    assert compared >= 1


def test_null_of_other_families_is_what_transformers_takes_it_for() -> None:
    falcon = {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "vocab_size": 60}  # fmt: skip
    for key in ("multi_query", "parallel_attn", "bias", "new_decoder_architecture"):
        config = falcon | {key: None}
        assert read_architecture(config).parameters == counted_by_transformers(config, "FalconForCausalLM"), key
    with pytest.raises(ValueError, match=r"config\.json: multi_query is 'no'; true or false is needed"):
        read_architecture(falcon | {"multi_query": "no"})


def test_a_falcon_with_alibi_takes_longer_sequences_than_it_was_made_for() -> None:
    falcon = {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "vocab_size": 60, "max_position_embeddings": 16}  # fmt: skip
    assert read_architecture(falcon).position_limit == 16
    made = read_architecture(falcon | {"alibi": True})
    assert (made.position_limit, made.max_positions) == (None, 16)
    reference = transformers.AutoConfig.for_model(**falcon, alibi=True)
    transformers.AutoModelForCausalLM.from_config(reference)(torch.full((1, 40), 5))


def test_a_token_goes_to_no_more_experts_than_there_are() -> None:
    config = LLAMA | {"model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4}
    assert read_architecture(config | {"num_experts_per_tok": 4}).experts_per_token == 4
    with pytest.raises(ValueError, match="a token cannot go to 5 of 4 experts"):
        read_architecture(config | {"num_experts_per_tok": 5})
    with pytest.raises(ValueError, match="100,001 experts in each of 2 layers are too many"):
        read_architecture(config | {"num_local_experts": 100_001})


# --- every key ---

_STACKS: dict[str, Any] = {
    "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 48,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 6, "q_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 5, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_IMAGE = {"image_size": 16, "patch_size": 4}
SMALL: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 3, "intermediate_size_mlp": 40},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local", "local"], 1]]},
    "mpt": {"n_heads": 4, "n_layers": 2},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "bart": _STACKS,
    "whisper": _STACKS | {"num_mel_bins": 5, "max_source_positions": 16, "max_target_positions": 12},
    "vit": _IMAGE,
    "deit": _IMAGE,
}
"""Sizes of a tiny model beside those that `tiny_config` has."""
OF_LLM_FOUNDRY = {"mpt": ("expansion_ratio", "no_bias")}
"""Keys that transformers ignores, and that were meant by whom the models are of."""
SOONEST = ("gpt2", "phi", "deepseek_v2", "bart")


@pytest.mark.parametrize(
    "kind", [kind if kind in SOONEST else pytest.param(kind, marks=pytest.mark.slow) for kind in READERS]
)
def test_each_key_is_counted_as_transformers_counts_it_or_refused(kind: str) -> None:
    """A key that nobody reads was counted wrong in silence: DeepSeek-V2's mlp_bias, head_dim of a Phi and a ViT."""
    config, wrong, counted = tiny_config(kind, **SMALL.get(kind, {})), [], 0
    for key in keys_of(kind):
        for value in values_of(key, config.get(key)):
            if key in OF_LLM_FOUNDRY.get(kind, ()):
                continue
            changed = config | {key: value}
            try:
                ours = read_architecture(changed)
            except ValueError:
                continue
            try:
                theirs = counted_by_transformers(changed, ours.counted)
            except Exception:  # transformers refuses it: there is nothing to count
                continue
            counted += 1
            if ours.parameters != theirs:
                wrong.append(f"{key}: {value!r}: {ours.parameters:,}, transformers {theirs:,}")
    assert not wrong, "\n".join(wrong)
    assert counted > 40


# --- random sizes ---


def _llama_like(draw: st.DrawFn, kind: str, heads: int, kv_heads: int) -> dict[str, Any]:
    """What a family of the Llama kind has besides sizes."""
    own: dict[str, Any] = {"num_key_value_heads": kv_heads}
    if kind in ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2", "smollm3", "glm4"):
        own["attention_bias"] = draw(st.booleans())
    if kind.startswith(("qwen3", "gemma")):
        own["head_dim"] = draw(st.sampled_from([4, 6, 16]))
    if kind == "glm4":
        own["head_dim"] = 8
    if kind in ("llama", "granite", "smollm3"):
        own["mlp_bias"] = draw(st.booleans())
    if kind == "mixtral":
        own |= {"num_local_experts": draw(st.integers(2, 5)), "num_experts_per_tok": 2}
    if kind == "gpt_oss":
        own |= {"num_local_experts": draw(st.integers(2, 5)), "num_experts_per_tok": 2, "head_dim": 8}
        own |= {"attention_bias": draw(st.booleans())}
    if kind == "qwen3_moe":
        own |= {"num_experts": draw(st.integers(2, 5)), "num_experts_per_tok": 2, "moe_intermediate_size": 7}
    if kind.startswith("deepseek"):
        own |= {"num_key_value_heads": heads, "kv_lora_rank": 6, "q_lora_rank": draw(st.sampled_from([None, 10]))}
        own |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6, "n_routed_experts": 4}
        own |= {"num_experts_per_tok": 2, "n_shared_experts": draw(st.integers(1, 2)), "moe_intermediate_size": 5}
        own |= {"first_k_dense_replace": draw(st.integers(0, 2)), "attention_bias": draw(st.booleans())}
        own |= {"n_group": 1, "topk_group": 1}
    return own


def _decoder(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    kv_heads, layers, inner = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4)), draw(st.integers(1, 50))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    hidden, positions = heads * draw(st.sampled_from([4, 8])), draw(st.integers(8, 40))
    config: dict[str, Any] = {
        "vocab_size": draw(st.integers(60, 90)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": 0,
    }
    usual = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    usual |= {"intermediate_size": inner, "max_position_embeddings": positions}
    if kind in ("gpt2", "gptj"):
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": inner, "n_positions": positions}
        return config | sizes | {"rotary_dim": 4}
    if kind == "bloom":
        return config | {"hidden_size": hidden, "n_layer": layers, "n_head": heads}
    if kind == "mpt":
        return config | {"d_model": hidden, "n_heads": heads, "n_layers": layers}
    if kind == "gpt_neo":
        config |= {"hidden_size": hidden, "num_layers": 2 * layers, "num_heads": heads, "intermediate_size": inner}
        return config | {"attention_types": [[["global", "local"], layers]], "max_position_embeddings": positions}
    if kind == "phi":
        return config | usual | {"num_key_value_heads": kv_heads, "qk_layernorm": draw(st.booleans())}
    if kind == "gpt_neox":
        return config | usual | {"attention_bias": draw(st.booleans())}
    if kind == "opt":
        config |= usual | {"ffn_dim": inner, "word_embed_proj_dim": draw(st.sampled_from([hidden, 10]))}
        return config | {"enable_bias": draw(st.booleans()), "do_layer_norm_before": draw(st.booleans())}
    if kind == "falcon":
        flags = ("new_decoder_architecture", "multi_query", "parallel_attn", "bias", "alibi")
        config |= {flag: draw(st.booleans()) for flag in flags}
        return config | usual | {"num_kv_heads": kv_heads, "ffn_hidden_size": inner}
    return config | usual | _llama_like(draw, kind, heads, kv_heads)


def _encoder(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    heads = draw(st.integers(1, 4))
    hidden, layers, positions = heads * 4, draw(st.integers(1, 4)), draw(st.integers(8, 40))
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(1, 50)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": draw(st.integers(60, 90)),
        "max_position_embeddings": positions,
        "type_vocab_size": draw(st.integers(1, 3)),
        "tie_word_embeddings": draw(st.booleans()),
        "num_labels": draw(st.integers(2, 5)),
    }
    if kind in ("albert", "electra"):
        config["embedding_size"] = draw(st.sampled_from([hidden, 6]))
    if kind == "albert":
        config["num_hidden_groups"] = draw(st.integers(1, layers))
    if kind == "distilbert":
        config |= {"dim": hidden, "n_layers": layers, "n_heads": heads, "hidden_dim": draw(st.integers(1, 50))}
    if kind in ("vit", "deit"):
        config |= {"num_channels": 2, "qkv_bias": draw(st.booleans())}
        config["image_size"] = draw(st.sampled_from([16, [16, 8], [8, 16]]))
        config["patch_size"] = draw(st.sampled_from([4, [4, 2]]))
    return config


def _both(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    heads, inner = draw(st.integers(1, 4)), draw(st.integers(1, 50))
    encoder, decoder = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config: dict[str, Any] = {"d_model": heads * 4, "vocab_size": draw(st.integers(60, 90)), "pad_token_id": 0}
    if kind in ("t5", "mt5"):
        gated = draw(st.sampled_from(["relu", "gated-gelu"]))
        config |= {"num_layers": encoder, "num_decoder_layers": decoder, "num_heads": heads, "d_kv": 6, "d_ff": inner}
        config |= {"feed_forward_proj": gated, "relative_attention_num_buckets": 8}
        return config
    config |= {"encoder_layers": encoder, "decoder_layers": decoder, "encoder_attention_heads": heads}
    config |= {"decoder_attention_heads": heads, "encoder_ffn_dim": inner, "decoder_ffn_dim": inner + 3}
    if kind == "bart":
        return config | {"max_position_embeddings": 20}
    return config | {"num_mel_bins": 5, "max_source_positions": 16, "max_target_positions": 12}


ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra")
BOTH = ("t5", "mt5", "bart", "whisper")
TOPS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


@st.composite
def configurations(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """A small config.json of a family, with its flags and one of its classes."""
    if kind in BOTH:
        config = _both(draw, kind)
    elif kind in (*ENCODERS, "vit", "deit"):
        config = _encoder(draw, kind)
    else:
        config = _decoder(draw, kind)
    config["model_type"] = kind
    usual = read_architecture(config).counted
    if kind in ENCODERS:
        stem = usual.removesuffix("Model")
        more = ("ForPreTraining",) if kind in ("bert", "albert", "electra") else ()
        config["architectures"] = [stem + draw(st.sampled_from([*TOPS, *more]))]
    elif usual.endswith(("ForCausalLM", "LMHeadModel")):
        stem = usual.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        others = [f"{stem}Model", f"{stem}ForSequenceClassification"]
        config["architectures"] = [draw(st.sampled_from([usual, *others]))]
    elif kind in BOTH:
        stem = usual.removesuffix("ForConditionalGeneration")
        alone = [f"{stem}EncoderModel"] if kind in ("t5", "mt5") else []
        config["architectures"] = [draw(st.sampled_from([usual, f"{stem}Model", *alone]))]
    return config


@pytest.mark.parametrize("kind", READERS)
def test_random_sizes_are_counted_exactly(kind: str) -> None:
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(configurations(kind))
    def check(config: dict[str, Any]) -> None:
        architecture = read_architecture(config)
        assert architecture.parameters == counted_by_transformers(config, architecture.counted)
        assert architecture.rank_parameters(1) == architecture.parameters

    check()


# --- windows, shards, caches: by hand ---


@pytest.mark.parametrize("name", ["mistral-7b", "qwen2.5-7b", "qwen3-8b", "gemma-2-2b", "gemma-3-1b", "gpt-neo-1.3b"])
def test_windows_are_those_of_transformers(name: str) -> None:
    config = next(model.config for model in known_models() if model.name == name)
    reference = transformers.AutoConfig.for_model(**{key: config[key] for key in config if key != "architectures"})
    if name == "mistral-7b":
        slides = [True] * 32
    elif name == "gpt-neo-1.3b":
        slides = [kind == "local" for kind in reference.attention_layers]
    else:
        slides = [kind == "sliding_attention" for kind in reference.layer_types]
    window = reference.window_size if name == "gpt-neo-1.3b" else reference.sliding_window
    expected = tuple(window if slide else None for slide in slides) if any(slides) else ()
    assert find_model(name).windows == expected


def test_shards_of_tensor_parallelism() -> None:
    a = find_model("llama-2-70b")  # 64 query heads share 8 of keys and values
    layer = 8192 * 8192 * 2 + 2 * 1024 * 8192 + 3 * 28672 * 8192
    norms, tables = (2 * 80 + 1) * 8192, 2 * 32000 * 8192
    assert a.rank_parameters(8) == (80 * layer + tables) // 8 + norms
    # Of 16 ranks two hold the same head of keys and values.
    replicated = 80 * 2 * 1024 * 8192
    assert a.rank_parameters(16) == (80 * layer - replicated + tables) // 16 + replicated // 8 + norms


def test_shards_of_what_cannot_be_divided_fall_on_the_fullest_rank() -> None:
    falcon = find_model("falcon-7b")  # 71 query heads, one of keys and values
    keys = next(weight for weight in falcon.weights if weight.name == "attention.key_value")
    queries = next(weight for weight in falcon.weights if weight.name == "attention.query")
    assert keys.shard(4) == 64 * 4544
    assert queries.shard(4) == 18 * 64 * 4544


def test_biases_of_rows_are_whole_on_each_rank() -> None:
    shards = {weight.name: weight.shard(4) for weight in find_model("gpt2").weights}
    assert shards["attention.query.bias"] == 768 // 4
    assert shards["mlp.up.bias"] == 3072 // 4
    assert shards["attention.output.bias"] == shards["mlp.down.bias"] == 768
    assert shards["embedding"] == 12565 * 768  # 50257 rows: 12565 on the fullest
    assert shards["positions"] == 1024 * 768


def test_caches() -> None:
    assert find_model("llama-2-7b").cache_elements(100) == 2 * 32 * 4096 * 100
    grouped = find_model("llama-2-70b")
    assert grouped.cache_elements(100) == 2 * 80 * 8 * 128 * 100
    assert grouped.cache_elements(100, tp=8) == 2 * 80 * 128 * 100
    assert grouped.cache_elements(100, tp=16) == 2 * 80 * 128 * 100  # a head on two ranks
    assert find_model("mistral-7b").cache_elements(10_000) == 2 * 32 * 8 * 128 * 4096
    gemma = find_model("gemma-3-1b")  # 26 layers, each sixth sees all: 4
    assert gemma.cache_elements(1000) == 2 * 256 * (22 * 512 + 4 * 1000)
    latent = find_model("deepseek-v3")
    assert latent.cache_elements(100) == latent.cache_elements(100, tp=8) == 61 * 576 * 100
    t5 = find_model("t5-small")
    assert t5.cache_elements(10) == 2 * 6 * 512 * 10
    assert t5.cross_cache_elements(7) == 2 * 6 * 512 * 7
    assert find_model("bert-base").cache_elements(100) == 0 == find_model("gpt2").cross_cache_elements(100)


def test_experts() -> None:
    mixtral = find_model("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    assert mixtral.parameters - mixtral.active_parameters == 32 * 6 * expert


def test_positions_follow_the_sequence_only_where_there_is_a_table() -> None:
    mpt = find_model("mpt-7b")
    longer = mpt.with_positions(65536)
    assert longer.parameters == mpt.parameters + (65536 - 2048) * 4096 and longer.positions == 65536
    llama = find_model("llama-2-7b")
    assert llama.with_positions(65536) is llama


def test_a_tied_head_owns_nothing_and_multiplies() -> None:
    tied: Architecture = find_model("gpt2")
    head = next(weight for weight in tied.weights if weight.role == "head")
    assert head.copies == 0 and head.products == 1
    assert sum(weight.size * weight.products for weight in tied.weights) == 12 * 12 * 768**2 + 50257 * 768
    assert Weight("x", (2, 3), 4, "vector").products == 0
