"""Weights: synthetic ones, safetensors in and out, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelFile, ModelManifest
from engine.models.llama import Llama
from engine.models.weights import build_model, weight_files, weights_hash, write_weights
from tasks.models.folder import check_folder
from tests.support.flushed import names_of_flushed
from tests.support.training.memory_models import save_model

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = ARCHITECTURES["llama-1m"] | {"vocab_size": 256, "num_hidden_layers": 2}


def synthetic(seed: int = 3, **changes: Any) -> ModelManifest:
    return ModelManifest(
        identity=f"synthetic:tiny@{seed}", source="synthetic", folder="", files={}, config=CONFIG | changes
    )


def folder_manifest(folder: Path, **files: ModelFile) -> ModelManifest:
    config = json.loads((folder / "config.json").read_text())
    return ModelManifest(identity="folder:0", source="folder", folder=str(folder), files=files, config=config)


def build(manifest: ModelManifest, dtype: torch.dtype = torch.float32) -> Llama:
    return build_model(manifest, dtype, CPU)[0]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_model(
        build(synthetic(tie_word_embeddings=False)), CONFIG | {"tie_word_embeddings": False}, folder, torch.float32
    )
    return folder


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_synthetic_weights_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(0)
    first = build(synthetic())
    torch.manual_seed(1)
    again = build(synthetic())
    deeper = build(synthetic(num_hidden_layers=3))
    other = build(synthetic(seed=4))
    assert weights_hash(first) == weights_hash(again) != weights_hash(other)
    known = dict(first.named_parameters())
    for name, parameter in deeper.named_parameters():
        if name in known:
            assert torch.equal(parameter, known[name])
    assert not torch.equal(known["model.layers.0.mlp.up_proj.weight"], known["model.layers.1.mlp.up_proj.weight"])
    assert known["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(known["model.norm.weight"], torch.ones(128))


def test_synthetic_weights_are_cast_after_they_are_made() -> None:
    exact = build(synthetic())
    rounded = build(synthetic(), torch.bfloat16)
    for (name, full), half in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(full.bfloat16(), half), name


def test_the_hash_sees_one_changed_value_and_exchanged_rows() -> None:
    model = build(synthetic())
    before = weights_hash(model)
    with torch.no_grad():
        model.model.norm.weight[5] = 1.5
    changed = weights_hash(model)
    with torch.no_grad():
        model.model.norm.weight[5] = 1.0
        rows = model.model.embed_tokens.weight[:2].clone()
        model.model.embed_tokens.weight[:2] = rows.flip(0)
    assert len({before, changed, weights_hash(model)}) == 3


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_is_saved(tmp_path: Path, tied: bool) -> None:
    manifest = synthetic(tie_word_embeddings=tied)
    model = build(manifest)
    save_model(model, manifest.config, tmp_path / "bf16")
    save_model(model, manifest.config, tmp_path / "fp32", torch.float32)
    tokens = torch.arange(20)[None]
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", local_files_only=True)
    torch.testing.assert_close(peer(input_ids=tokens).logits, model(tokens), rtol=0, atol=1e-5)
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", local_files_only=True)
    assert small.dtype == torch.bfloat16
    assert sorted(path.name for path in (tmp_path / "bf16").iterdir()) == ["config.json", "model.safetensors"]


def test_what_transformers_saves_is_loaded_sharded_or_whole(saved: Path, tmp_path: Path) -> None:
    peer = AutoModelForCausalLM.from_pretrained(saved, local_files_only=True)
    peer.save_pretrained(tmp_path / "whole")
    peer.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    expected = weights_hash(build(folder_manifest(saved)))
    for name in ("whole", "sharded"):
        model, file_bytes = build_model(folder_manifest(tmp_path / name), torch.float32, CPU)
        assert weights_hash(model) == expected
        assert file_bytes == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_a_copy_of_the_embedding_is_a_tied_head_and_old_rotary_tables_are_ignored(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text()) | {"tie_word_embeddings": True}
    (saved / "config.json").write_text(json.dumps(config))
    rewrite(saved, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    other = build(folder_manifest(saved))
    assert other.lm_head is not None and not torch.equal(other.lm_head.weight, other.model.embed_tokens.weight)
    rewrite(saved, **{"lm_head.weight": other.model.embed_tokens.weight.detach().clone()})
    assert build(folder_manifest(saved)).lm_head is None


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "tensor model.norm.weight is missing"),
        ("model.norm.bias", torch.ones(128), "tensor model.norm.bias is not part of the model"),
        (
            "model.norm.weight",
            torch.ones(64),
            r"model.norm.weight has the shape \(64,\); config.json asks for \(128,\)",
        ),
        ("model.norm.weight", torch.ones(128, dtype=torch.int8), "model.norm.weight is torch.int8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(
    saved: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    rewrite(saved, **{name: tensor})
    with pytest.raises(ValueError, match=message) as raised:
        build(folder_manifest(saved))
    assert str(saved / "model.safetensors") in str(raised.value)


def test_a_truncated_file_is_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged"):
        build(folder_manifest(saved))
    listed = ModelFile(sha256="0" * 64, size_bytes=len(whole))
    with pytest.raises(ValueError, match=f"bytes instead of {len(whole)}, so it is truncated"):
        build(folder_manifest(saved, **{"model.safetensors": listed}))


def test_an_adapter_is_no_part_of_the_model_beside_it(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "model-00001-of-00001.safetensors")
    save_file({"model.norm.weight": torch.ones(128)}, saved / "adapter_model.safetensors")
    _, names = check_folder(saved)
    found = [path.name for path in weight_files(folder_manifest(saved))]
    assert found == ["model-00001-of-00001.safetensors"] == [name for name in names if name.endswith(".safetensors")]


def test_one_file_precedes_shards_beside_it(saved: Path) -> None:
    """As in transformers and in the manifest, which names it alone."""
    other = {"model.norm.weight": torch.ones(128)}
    save_file(other, saved / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    _, names = check_folder(saved)
    assert [path.name for path in weight_files(folder_manifest(saved))] == ["model.safetensors"]
    assert {name for name in names if name.endswith(".safetensors")} == {"model.safetensors"}


def test_names_without_the_prefix_of_the_class_are_trained(saved: Path) -> None:
    """As the base class saves them."""
    config = json.loads((saved / "config.json").read_text()) | {"tie_word_embeddings": True}
    (saved / "config.json").write_text(json.dumps(config))
    rewrite(saved, **{"lm_head.weight": None})
    expected = weights_hash(build(folder_manifest(saved)))
    tensors = load_file(saved / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, saved / "model.safetensors")
    assert weights_hash(build(folder_manifest(saved))) == expected


def test_a_missing_shard_and_a_broken_index_are_named(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00002.safetensors"}}))
    with pytest.raises(ValueError, match=r"model-00002\.safetensors: is missing"):
        build(folder_manifest(saved))
    for content in ("[1, 2", "[]", '{"weight_map": {"a": "../model.safetensors"}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
            build(folder_manifest(saved))


def test_a_pickled_checkpoint_is_refused_with_the_remedy(saved: Path) -> None:
    saved = saved.rename(saved.parent / "my model")
    shutil.move(saved / "model.safetensors", saved / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin: a pickled checkpoint .* rankwise convert '.*/my model' "
    ):
        build(folder_manifest(saved))
    (saved / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors file"):
        build(folder_manifest(saved))


def test_weights_are_on_disk_before_they_have_their_name(tmp_path: Path) -> None:
    """A crash of the machine left the name of a file without its bytes."""
    with names_of_flushed() as flushed:
        write_weights({"a": torch.zeros(10)}, CONFIG, tmp_path, torch.float32)
    assert {tmp_path / "model.safetensors", tmp_path / "config.json"} <= flushed
