"""What a config.json says, checked at the border: keys, numbers, windows."""

import json
from typing import Any

import pytest

from configs.families.config import ModelConfig
from configs.families.keys import HARMLESS, read_keys
from configs.families.numbers import check_finite
from configs.families.table import FAMILIES
from configs.hardware.architectures import ARCHITECTURES, one_of_each_family

LLAMA = ARCHITECTURES["llama-1m"]


def parsed(text: str) -> ModelConfig:
    return ModelConfig.parse(LLAMA | json.loads(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"rope_theta": NaN}', "config.json: rope_theta is NaN, expected a finite number"),
        ('{"rms_norm_eps": Infinity}', "config.json: rms_norm_eps is infinite"),
        ('{"rope_scaling": {"rope_type": "linear", "factor": 1e999}}', "rope_scaling.factor is infinite"),
        ('{"eos_token_id": [1, NaN]}', r"eos_token_id\[1\] is NaN"),
        ('{"num_hidden_layers": 0}', "num_hidden_layers 0, expected a whole number from 1 to 10,000"),
        ('{"num_hidden_layers": 1000000000000}', "num_hidden_layers 1000000000000, expected .* from 1 to 10,000"),
        ('{"hidden_size": "128"}', "hidden_size '128', expected a whole number"),
        ('{"hidden_size": 128.5}', "hidden_size 128.5, expected a whole number"),
        ('{"num_attention_heads": 0}', "num_attention_heads 0, expected a whole number from 1"),
        ('{"vocab_size": true}', "vocab_size True, expected a whole number"),
        ('{"head_dim": null, "num_attention_heads": 6}', "hidden_size 128 is not divisible by num_attention_heads 6"),
        ('{"rope_theta": 0}', "rope_theta 0.0 is not implemented; use a positive number"),
        ('{"rope_theta": "10000"}', "rope_theta '10000', expected a number"),
        ('{"rope_scaling": [1]}', r"rope_scaling \[1\], expected an object"),
        ('{"rope_scaling": {"rope_type": "default", "beta_fast": 1}}', "rope_scaling.beta_fast is not implemented"),
        (
            '{"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": 4}}',
            "rope_scaling.low_freq_factor 0.0 is not implemented; use a positive number",
        ),
        (
            '{"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, '
            '"original_max_position_embeddings": [8192]}}',
            r"original_max_position_embeddings \[8192\], expected a whole number",
        ),
        (
            '{"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, '
            '"original_max_position_embeddings": -8192}}',
            "original_max_position_embeddings -8192, expected a whole number from 1",
        ),
        ('{"attention_bias": "false"}', "attention_bias 'false', expected true or false"),
        ('{"logit_scale": 0.5}', "logit_scale 0.5 is not implemented for llama models and may change the result"),
        ('{"sliding_window": 96}', "sliding_window 96 is not implemented for llama models"),
        ('{"per_layer_config": {"0": {}}}', "per_layer_config .* is not implemented"),
        ('{"quantization_config": {"quant_method": "gptq", "bits": 4}}', "quantization_config is not implemented"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parsed(text)
    assert len(str(caught.value)) < 400


def test_the_parts_of_an_activation_are_names() -> None:
    for named in ({}, ["relu"], 1, None):
        with pytest.raises(ValueError, match=r"dense_act_fn .* is not implemented; use one of: silu"):
            ModelConfig.parse(ARCHITECTURES["t5-1m"] | {"dense_act_fn": named})
    parts = ModelConfig.parse(ARCHITECTURES["t5-1m"] | {"dense_act_fn": "gelu_new", "is_gated_act": True})
    whole = ModelConfig.parse(ARCHITECTURES["t5-gated-1m"])
    assert (parts.activation, parts.gated) == (whole.activation, whole.gated) == ("gelu_new", True)


def test_a_message_is_bounded_whatever_the_file_holds() -> None:
    for changes in ({"x" * 10_000: "y" * 10_000}, {"model_type": "z" * 10_000}, {"hidden_size": "9" * 10_000}):
        with pytest.raises(ValueError, match=r"config\.json: ") as caught:
            ModelConfig.parse(LLAMA | changes)
        assert len(str(caught.value)) < 400


def test_keys_that_change_nothing_and_unset_ones_are_accepted() -> None:
    ignored = {"_name_or_path": "x", "eos_token_id": [1, 2], "temperature": 0.5, "attention_dropout": 0.1}
    ignored |= {"is_llama_config": True, "directionality": "bidi", "max_sequence_length": 2048, "language": "english"}
    unset: dict[str, Any] = {"logit_scale": None, "use_mrope": False, "layer_types": []}
    assert ModelConfig.parse(LLAMA | ignored | unset) == ModelConfig.parse(LLAMA)


def test_no_key_that_a_family_reads_is_listed_as_harmless() -> None:
    allowed = {"initializer_range", "init_std", "decoder_start_token_id", "pad_token_id"}
    for family in FAMILIES.values():
        assert not read_keys(family) & {*HARMLESS, *family.harmless} - allowed


@pytest.mark.parametrize("name", one_of_each_family())
def test_the_small_models_hold_no_unread_key(name: str) -> None:
    check_finite(ARCHITECTURES[name])
    ModelConfig.parse(ARCHITECTURES[name])


def test_layer_types_of_a_mistral_say_which_layers_slide() -> None:
    data = ARCHITECTURES["mistral-1m"]
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert ModelConfig.parse(data).windows == (96,) * 4
    assert ModelConfig.parse(data | {"layer_types": kinds}).windows == (None, 96, None, None)
    with pytest.raises(ValueError, match="layer_types must name full_attention or sliding_attention for each of 4"):
        ModelConfig.parse(data | {"layer_types": kinds[:3]})
    with pytest.raises(ValueError, match="layer_types names sliding_attention, but no sliding_window is in use"):
        ModelConfig.parse(data | {"layer_types": kinds, "sliding_window": None})
