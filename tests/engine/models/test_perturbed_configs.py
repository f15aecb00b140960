"""Every field of every family's configuration, changed: our engine follows transformers or refuses by name."""

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.families.config import ModelConfig
from configs.families.keys import read_keys
from configs.families.table import FAMILIES, families
from configs.plans.model_manifest import ModelManifest
from engine.models.weights import build_model
from engine.planner.families import read_architecture
from tasks.models.sources import resolve_model
from tests.support.answers.perturbed_configs import our_logits, perturb, reference_logits, save_with_head, tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS: dict[str, dict[str, Any]] = {
    "t5": {"feed_forward_proj": "gated-gelu"},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
}
"""A second form of a family, in which further keys count."""
_MINIMUM = {"tried": 150, "followed": 12, "refused": 60, "harmless": 20}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.enable_progress_bar()
    logging.set_verbosity(before)


def _judge(config: dict[str, Any], folder: Path) -> Counter[str]:
    tried = list(perturb(config, folder))
    fates: Counter[str] = Counter(one.fate for one in tried)
    kind = config["model_type"]
    fields = len({one.field for one in tried})
    print(f"{kind}: {len(tried)} values of {fields} fields: {', '.join(f'{n} {fate}' for fate, n in fates.items())}")
    wrong = [one for one in tried if one.fate in ("differs", "unnamed")]
    assert not wrong, "\n".join(f"{one.fate}: {one.field} = {one.value!r}: {one.detail}" for one in wrong)
    return fates + Counter(tried=len(tried))


_SOONEST = ("llama", "t5")
"""Of a decoder with rotations, one with a table of positions, and one that has both stacks."""


@pytest.mark.parametrize(
    "kind", [kind if kind in _SOONEST else pytest.param(kind, marks=pytest.mark.slow) for kind in families()]
)
def test_each_field_is_followed_or_refused(kind: str, tmp_path: Path) -> None:
    fates = _judge(tiny_config(kind), tmp_path)
    assert all(fates[fate] >= count for fate, count in _MINIMUM.items()), fates


@pytest.mark.nightly
@pytest.mark.parametrize("kind", VARIANTS)
def test_each_field_of_a_further_form_is_followed_or_refused(kind: str, tmp_path: Path) -> None:
    _judge(tiny_config(kind, **VARIANTS[kind]), tmp_path)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", ["is_llama_config", "max_sequence_length"]),
        ("gpt_neox", ["custom_pipelines"]),
        ("bert", ["directionality", "sentence_transformers", "language", "name"]),
        ("opt", ["learned_embeddings"]),
    ],
)
def test_a_key_of_who_published_a_model_changes_nothing(kind: str, keys: list[str], tmp_path: Path) -> None:
    """Published models have keys that transformers never reads: SmolLM2, Vicuna, Dolly, BERTs, Galactica."""
    tried = list(perturb(tiny_config(kind), tmp_path, keys))
    assert {one.field for one in tried} == set(keys) and {one.fate for one in tried} == {"harmless"}


def test_copies_of_rotary_keys_are_those_that_are_used(tmp_path: Path) -> None:
    """transformers 4.48 to 4.57 save a GPT-NeoX's keys under the common names too, and 5 reads its own ones alone."""
    config = tiny_config("gpt_neox") | {"rotary_pct": 0.5, "rotary_emb_base": 500}
    del config["rope_parameters"]
    copied = config | {"rope_theta": 500, "partial_rotary_factor": 0.5}
    save_with_head(copied, tmp_path / "model", differing=True)
    expected = reference_logits(copied, tmp_path / "model")
    for found in our_logits(copied, tmp_path / "model"):
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert ModelConfig.parse(copied) == ModelConfig.parse(config)
    bare = {name: value for name, value in config.items() if not name.startswith("rotary")}
    for base, key, value in (
        (config, "rope_theta", 10000),
        (config, "partial_rotary_factor", 0.25),
        (bare, "rope_theta", 500),
        (bare, "partial_rotary_factor", 0.5),
    ):
        with pytest.raises(ValueError, match=rf"{key} [\d.]+ is not implemented; use rotary_"):
            ModelConfig.parse(base | {key: value})


def test_a_key_that_is_dropped_from_the_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: without its list of computed values, GPT-2's scaled scores differ in silence."""
    family = FAMILIES["gpt2"]
    monkeypatch.setattr("configs.families.keys.HARMLESS", ("*",))
    for name in ("computed", "equal"):
        monkeypatch.setitem(vars(family), name, {})
    keys = ["scale_attn_by_inverse_layer_idx", "scale_attn_weights", "num_attention_heads", "is_causal"]
    assert not set(keys) & read_keys(family)
    found = {one.field for one in perturb(tiny_config("gpt2"), tmp_path, keys) if one.fate == "differs"}
    assert found == set(keys)


@pytest.mark.parametrize("differing", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "opt", "gpt_neox", "t5"])
def test_the_head_in_the_file_is_the_one_that_transformers_uses(kind: str, differing: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = tiny_config(kind) | {"tie_word_embeddings": True}
    folder = tmp_path / "model"
    save_with_head(config, folder, differing)
    expected = reference_logits(config, folder)
    for found in our_logits(config, folder):
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    manifest = resolve_model("model", None, tmp_path / "cache", tmp_path)
    # The planner and the peers count what is computed.
    assert manifest.config.get("tie_word_embeddings") is not differing
    assert ModelConfig.parse(manifest.config).tied is not differing
    parameters = read_architecture(manifest.config, kind).parameters
    loaded = AutoModelForCausalLM if kind != "t5" else AutoModelForSeq2SeqLM
    assert parameters == sum(one.numel() for one in loaded.from_pretrained(folder).parameters())
    for found in our_logits(manifest.config, folder):
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("llama", "lm_head.weight"),
        ("gpt2", "lm_head.weight"),
        ("gpt_neox", "embed_out.weight"),
        ("opt", "lm_head.weight"),
        ("t5", "decoder.embed_tokens.weight"),
    ],
)
def test_a_tied_embedding_may_be_stored_under_another_name(kind: str, kept: str, tmp_path: Path) -> None:
    """`safetensors.torch.save_model` keeps one name of weights that share memory; transformers loads such files."""
    config, folder = tiny_config(kind) | {"tie_word_embeddings": True}, tmp_path / "model"
    save_with_head(config, folder, differing=False)
    expected = reference_logits(config, folder)
    tensors = load_file(folder / "model.safetensors")
    own = {"gpt2": "transformer.wte", "gpt_neox": "gpt_neox.embed_in", "opt": "model.decoder.embed_tokens"}
    tensors[kept] = tensors.pop(f"{own.get(kind, 'shared' if kind == 't5' else 'model.embed_tokens')}.weight")
    if kept != "lm_head.weight":
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if kind != "gpt_neox":  # its head has another name in transformers 5
        assert torch.equal(reference_logits(config, folder), expected)
    manifest = resolve_model("model", None, tmp_path / "cache", tmp_path)
    assert manifest.config == config
    for found in our_logits(config, folder):
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_an_equal_head_is_trained_as_one_with_the_embedding(tmp_path: Path) -> None:
    config = tiny_config("llama") | {"tie_word_embeddings": True}
    for differing in (True, False):
        save_with_head(config, tmp_path / str(differing), differing)
        manifest = ModelManifest(
            identity="folder:0", source="folder", folder=str(tmp_path / str(differing)), files={}, config=config
        )
        model, _ = build_model(manifest, torch.float32, torch.device("cpu"))
        assert (model.lm_head is not None) is differing
