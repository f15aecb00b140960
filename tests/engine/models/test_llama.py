"""Our decoder against transformers' and against itself: cache, padding, configurations."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from configs.families.config import ModelConfig
from configs.hardware.architectures import ARCHITECTURES
from engine.models.llama import Llama

TINY: dict[str, Any] = ARCHITECTURES["llama-1m"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    # Wide weights: a random model that always says the same would hide mistakes.
    "initializer_range": 0.3,
}
CPU = torch.device("cpu")


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR: dict[str, Any] = {"type": "linear", "factor": 2.0}
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
FAMILIES = [
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "qwen2", **SLIDING},
    {"model_type": "qwen3", "head_dim": 16},
]


def reference(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(TINY | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    assert isinstance(model, PreTrainedModel)
    return model


def ours(peer: PreTrainedModel) -> Llama:
    model = Llama(ModelConfig.parse(peer.config.to_dict()))
    state = {
        name: tensor
        for name, tensor in peer.state_dict().items()
        if not (peer.config.tie_word_embeddings and name == "lm_head.weight")
    }
    model.load_state_dict(state)
    return model.eval()


def some_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": LLAMA3, "rope_theta": None},
        {"rope_scaling": LINEAR},
        *FAMILIES,
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 3},
        {"model_type": "qwen3", "attention_bias": True, "num_key_value_heads": None, **SLIDING},
        {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    ],
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(changes: dict[str, Any]) -> None:
    peer = reference(**changes)
    tokens = some_tokens(3, 17)
    expected = peer(input_ids=tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(peer)(tokens), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_bfloat16_rounds_as_transformers_does() -> None:
    peer = reference().to(torch.bfloat16)
    # The cast took the rotary frequencies along, which loading in bfloat16 does not.
    peer.model.rotary_emb.inv_freq = reference().model.rotary_emb.inv_freq
    model = ours(peer).to(torch.bfloat16)
    tokens = some_tokens(2, 17)
    error = (model(tokens).float() - peer(input_ids=tokens).logits.float()).abs().max()
    exact = (reference()(input_ids=tokens).logits - peer(input_ids=tokens).logits.float()).abs().max()
    assert error <= 0.1 * exact


@pytest.mark.parametrize("changes", [{}, *FAMILIES])
def test_gradients_equal_those_of_transformers(changes: dict[str, Any]) -> None:
    peer = reference(**changes)
    model = ours(peer)
    tokens = some_tokens(2, 9)
    peer(input_ids=tokens).logits.logsumexp(-1).sum().backward()
    model(tokens).logsumexp(-1).sum().backward()
    expected = {name: parameter.grad for name, parameter in peer.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt9"},
            r"model_type 'gpt9' is not implemented; use one of: llama, .*t5 \(docs/reference/arch",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type 'dynamic' is not implemented"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' .* use one of: default, linear"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters.factor is missing; llama3 needs factor, low"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differs by kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not implemented"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not implemented; use one of: silu, "),
        ({"hidden_size": None}, "hidden_size is missing; a llama model needs"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0, expected a whole number from 1"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must name .* each of 2 layers"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "no sliding_window is in use"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.parse(TINY | changes)


def test_rope_theta_is_read_in_both_spellings() -> None:
    plain = {name: value for name, value in TINY.items() if name != "rope_theta"}
    assert ModelConfig.parse(plain | {"rope_theta": 7.0}).rope.theta == 7.0
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": None}
    assert ModelConfig.parse(plain | new).rope.theta == 7.0
    assert ModelConfig.parse(plain).rope.theta == 10000.0


def test_what_is_absent_has_the_family_s_defaults() -> None:
    names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "hidden_act")
    bare = {name: TINY[name] for name in names} | {"num_attention_heads": 32, "hidden_size": 128}
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        peer = AutoConfig.for_model(**(bare | {"model_type": kind}))
        config = ModelConfig.parse(bare | {"model_type": kind})
        # What transformers has filled in means the same as what was left out.
        assert config == ModelConfig.parse(peer.to_dict())
        assert (config.kv_heads, config.max_positions) == (peer.num_key_value_heads, peer.max_position_embeddings)
        assert config.windows == ((4096, 4096) if kind == "mistral" else (None, None))


def test_our_engine_imports_no_transformers() -> None:
    code = "import sys, engine.workloads.generate, engine.workloads.train; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
