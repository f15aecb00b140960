"""What our engine cannot measure is said when a study is checked, by its config.json and the headers of its files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.spec.study import StudyError, parse_study
from engine.models.weights import write_folder
from flows.precheck import check_study


def written(folder: Path, name: str = "llama-1m") -> Path:
    manifest = ModelManifest(
        identity="synthetic:x@0", source="synthetic", folder="", files={}, config=ARCHITECTURES[name]
    )
    write_folder(manifest, folder / "mine", torch.float32)
    return folder / "mine"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    found = load_file(path) | tensors
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, path)


def check(folder: Path, kind: str = "generate", engine: str = "rankwise", **work: Any) -> None:
    study = parse_study(
        {
            "study": "s",
            "models": [{"id": "synthetic:llama-1m@0", "name": "sound"}, {"id": "mine", "name": "mine"}],
            "workload": {"kind": kind, "num_prompts": 4, **({"new_tokens": 4} if kind == "generate" else {}), **work},
            "engine": engine,
            "experiments": {"batch": {"kind": "sweep", "over": {"batch_size": [1, 2]}}},
        }
    )
    plan = check_study(study, folder.parent, folder.parent / "cache", folder.parent / "run")
    if plan.unusable:  # a run measures the other model, `validate` refuses the study
        assert [model.name for model in plan.models] == ["sound"]
        raise StudyError([model.reason for model in plan.unusable])


def test_a_sound_model_passes(tmp_path: Path) -> None:
    check(written(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is not implemented"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config is not implemented"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0, expected a whole number from 1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: got 1000000000000, expected at most 10,000"),
        ({"num_hidden_layers": 4}, r"tensor model\.layers\.3\..*\.weight is missing"),
        ({"intermediate_size": 400}, r"tensor model\.layers\.0\.mlp\.down_proj\.weight has the shape \(128, 352\)"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not implemented for llama models"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3' is not implemented; use one of: llama,"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = written(tmp_path)
    change_config(folder, **config)
    with pytest.raises(StudyError, match=rf"models\[1\]\.id: .*{message}") as caught:
        check(folder)
    assert len(caught.value.problems) == 1 and len(str(caught.value)) < 600


def test_nan_in_a_config_is_refused_by_name_for_every_engine(tmp_path: Path) -> None:
    folder = written(tmp_path)
    change_config(folder, rope_theta=float("nan"))
    for engine in ("rankwise", "transformers"):
        with pytest.raises(StudyError, match=r"models\[1\]\.id: .*/config.json: rope_theta is NaN, expected a finite"):
            check(folder, engine=engine)


def test_missing_misshapen_and_narrow_tensors_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    change_tensors(folder, **{"model.norm.weight": None})
    with pytest.raises(StudyError, match=r"models\[1\]\.id: mine: .*tensor model.norm.weight is missing"):
        check(folder)
    change_tensors(folder, **{"model.norm.weight": torch.ones(64)})
    with pytest.raises(StudyError, match=r"tensor model.norm.weight has the shape \(64,\); config.json asks for"):
        check(folder)
    change_tensors(folder, **{"model.norm.weight": torch.ones(128, dtype=torch.int8)})
    with pytest.raises(StudyError, match=r"tensor model.norm.weight is I8; use a checkpoint of 16 or 32 bits"):
        check(folder)
    change_tensors(folder, **{"model.norm.weight": torch.ones(128), "model.layers.0.qweight": torch.ones(3)})
    with pytest.raises(StudyError, match=r"tensor model.layers.0.qweight is not part of the model"):
        check(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Files without an index are all read; the engine refused them when it loaded."""
    folder = written(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-bf16.safetensors")
    check(folder)
    shutil.copy(folder / "model-bf16.safetensors", folder / "model-fp32.safetensors")
    with pytest.raises(
        StudyError, match=r"model-fp32.safetensors: tensor .* is also in .*/model-bf16.safetensors; keep"
    ):
        check(folder)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, "bert-1m")
    with pytest.raises(StudyError, match=r"workload.kind: mine is an encoder \(bert\), which generate cannot measure"):
        check(folder)


def test_a_model_that_our_server_cannot_load_is_refused(tmp_path: Path) -> None:
    """It was found when the server did not start, on a machine that may be rented."""

    def check_served(folder: Path, engine: str = "rankwise") -> None:
        study = {"study": "s", "models": [{"id": "mine", "name": "mine"}], "workload": {"kind": "serve", "rate": 2.0},
                 "engine": engine, "experiments": {"load": {"kind": "load"}}}  # fmt: skip
        check_study(parse_study(study), folder.parent, folder.parent / "cache", folder.parent / "run")

    folder = written(tmp_path / "llama")
    check_served(folder)
    change_config(folder, attn_logit_softcapping=50.0)
    with pytest.raises(ValueError, match=r"models\[0\]\.id: mine: .*attn_logit_softcapping 50\.0 is not implemented"):
        check_served(folder)
    check_served(folder, engine="vllm")
    with pytest.raises(ValueError, match=r"mine is an encoder \(bert\), which serve cannot measure; use encode"):
        check_served(written(tmp_path / "bert", "bert-1m"))


def test_a_model_that_our_trainer_cannot_load_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)

    def check_trained(task: str = "causal_lm") -> None:
        study = {"study": "s", "models": [{"id": "mine", "name": "mine"}], "workload": {"kind": "train", "task": task},
                 "experiments": {"batch": {"kind": "sweep", "over": {"global_batch_size": [8, 16]}}}}  # fmt: skip
        check_study(parse_study(study), folder.parent, folder.parent / "cache", folder.parent / "run")

    check_trained()
    change_config(folder, rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ValueError, match=r"models\[0\]\.id: mine: .*rope_scaling.rope_type 'yarn' is not implemented"):
        check_trained()
    check_trained("text_classification")  # of transformers' model
    change_config(folder, hidden_act="gelu")
    check_trained()


def test_other_engines_take_what_they_can_load(tmp_path: Path) -> None:
    """Their own rules say what that is; a key that ours does not read is no reason to refuse theirs."""
    folder = written(tmp_path)
    change_config(folder, attn_logit_softcapping=50.0)
    check(folder, engine="transformers")
