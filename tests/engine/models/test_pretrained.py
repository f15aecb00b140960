"""A model of transformers is trained from its files: what they lack is named, unless it is the head of the task."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from configs.plans.model_manifest import ModelManifest
from engine.training.task_types import make_task
from tests.support.training.training_tasks import CONFIGS, made_context, workload_of, write_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = {
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bert classes": "AutoModelForSequenceClassification",
    "vit": "AutoModelForImageClassification",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    write_inputs(made / "inputs")
    return made


def saved(
    folder: Path, case: str, auto: str, lacking: str = "", other: dict[str, torch.Tensor] | None = None, **options: Any
) -> ModelManifest:
    """A model that transformers saved, without the tensors that contain `lacking`, and with others in their place."""
    config = transformers.AutoConfig.for_model(**CONFIGS[case.split()[0]] | options)
    torch.manual_seed(3)
    getattr(transformers, auto).from_config(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    kept = {name: tensor for name, tensor in tensors.items() if not lacking or lacking not in name}
    assert (len(kept) < len(tensors)) is bool(lacking)
    save_file(kept | (other or {}), path, metadata={"format": "pt"})
    read = json.loads((folder / "config.json").read_text())
    return ModelManifest(identity=f"folder:{case}", source="folder", folder=str(folder), files={}, config=read)


def task_of(folder: Path, case: str, manifest: ModelManifest) -> Any:
    context = made_context(folder, case, manifest=manifest)
    return make_task(workload_of(context), context)


@pytest.mark.parametrize(
    ("case", "name", "options"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", {}),
        ("gpt2", "lm_head.weight", {"tie_word_embeddings": False}),
        ("bert", "bert.embeddings.LayerNorm.weight", {}),
        ("t5", "decoder.block.0.layer.1.EncDecAttention.k.weight", {}),
        ("bert classes", "bert.encoder.layer.1.output.dense.bias", {}),
        ("vit", "vit.embeddings.position_embeddings", {}),
    ],
)
def test_what_the_files_lack_is_named(
    case: str, name: str, options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    manifest = saved(tmp_path, case, CLASSES[case], lacking=name, **options)
    with pytest.raises(ValueError, match=rf"folder:{case}: tensor {name}\b.* is missing, which \w+ needs"):
        task_of(folder, case, manifest)


@pytest.mark.parametrize(
    ("case", "auto", "lacking"),
    [
        ("bert", "AutoModel", ""),
        ("bert", "AutoModelForMaskedLM", "cls.predictions"),
        ("bert classes", "AutoModelForMaskedLM", ""),  # neither a classifier nor a pooler
        ("bert classes", "AutoModel", "pooler"),
        ("vit", "AutoModel", ""),
    ],
)
def test_a_new_head_is_drawn(case: str, auto: str, lacking: str, folder: Path, tmp_path: Path) -> None:
    manifest = saved(tmp_path, case, auto, lacking)
    stored = load_file(tmp_path / "model.safetensors")
    weights = dict(task_of(folder, case, manifest).model.named_parameters())
    body = {name.partition(".")[2] if name.startswith(("bert.", "vit.")) else name: one for name, one in stored.items()}
    same = [name for name in weights if torch.equal(weights[name], body.get(name.partition(".")[2], torch.zeros(0)))]
    assert len(same) > 5


def test_a_head_of_other_classes_is_drawn_and_other_shapes_are_named(folder: Path, tmp_path: Path) -> None:
    labels = {"id2label": {0: "a", 1: "b", 2: "c"}}
    manifest = saved(tmp_path / "three", "bert classes", CLASSES["bert classes"], **labels)
    assert task_of(folder, "bert classes", manifest).model.classifier.weight.shape[0] == 2
    name = "bert.embeddings.word_embeddings.weight"
    manifest = saved(tmp_path / "small", "bert classes", CLASSES["bert classes"], name, {name: torch.ones(300, 32)})
    with pytest.raises(ValueError, match=rf"tensor {name} has the shape \(300, 32\); config.json asks for \(320, 32\)"):
        task_of(folder, "bert classes", manifest)


def test_quantised_weights_are_not_trained(folder: Path, tmp_path: Path) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    manifest = saved(tmp_path, "gpt2", CLASSES["gpt2"], name, {name: torch.ones(32, 96, dtype=torch.int8)})
    with pytest.raises(ValueError, match=rf"tensor {name} is I8, and config.json has no quantization_config"):
        task_of(folder, "gpt2", manifest)


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "model.fp16.safetensors"])
def test_files_that_transformers_does_not_look_for_are_told_with_the_names_that_it_does(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """Our engine reads shards without their index; the reference ended with "no file named model.safetensors"."""
    manifest = saved(tmp_path, "gpt2", CLASSES["gpt2"])
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ValueError, match=rf"transformers reads model\.safetensors, .* but {name}\. Fetch the index"):
        task_of(folder, "gpt2", manifest)
    tensors = load_file(tmp_path / name)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert task_of(folder, "gpt2", manifest).model is not None
