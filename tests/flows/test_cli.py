"""The command line: what it says to a mistake, and that nothing is started by it."""

import json
import tomllib
from pathlib import Path

import pytest

from configs.common.files.project_files import ROOT
from tests.support.run_folders.studies import rankwise, rankwise_here, write_study

MODEL = [{"id": "synthetic:llama-1m@0"}]
GENERATE = {"kind": "generate", "new_tokens": 4, "prompts": "prompts.jsonl"}
STRONG = {"s": {"kind": "strong", "grow": "dp", "to": 64}}


def refusal(folder: Path, study: Path) -> str:
    """What `rankwise run` says to a study that it refuses; it must not have begun."""
    refused = rankwise_here("run", study, cwd=folder)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert refused.stdout == "" and "Traceback" not in refused.stderr
    assert "nothing started" in refused.stderr
    assert not (folder / "runs").exists()
    return refused.stderr


def test_a_misspelt_key(tmp_path: Path) -> None:
    study = write_study(tmp_path, measuring={"repeets": 1})
    assert f"{study}: measuring.repeets: unknown key (did you mean repeats?)" in refusal(tmp_path, study)
    installed = rankwise("run", study, cwd=tmp_path)
    assert installed.returncode == 2 and installed.stdout == "" and installed.stderr == refusal(tmp_path, study)


def test_a_prompts_file_that_is_missing_empty_or_malformed(tmp_path: Path) -> None:
    study = write_study(tmp_path, models=MODEL, workload=GENERATE, experiments={"s": STRONG["s"] | {"to": 1}})
    prompts = tmp_path / "prompts.jsonl"
    assert "workload.prompts: no such file: prompts.jsonl" in refusal(tmp_path, study)
    prompts.write_text("")
    assert "prompts.jsonl: empty file" in refusal(tmp_path, study)
    prompts.write_text('{"prompt": "a"}\n{"prompt": \n')
    assert "line 2" in refusal(tmp_path, study)


def test_more_ranks_than_the_target_has(tmp_path: Path) -> None:
    study = write_study(tmp_path, workload={"kind": "noop", "items": 64}, experiments=STRONG)
    said = refusal(tmp_path, study)
    assert "experiments.s at 64 ranks: 64 ranks, but target local holds" in said


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("synthetic:llama-1n@0", "did you mean llama-1m?"),
        ("./no-model", "models[0].id: ./no-model"),
        ("no-model", "models[0].id: no-model: no such folder"),
    ],
)
def test_a_model_that_is_not_there(tmp_path: Path, model: str, message: str) -> None:
    workload = {"kind": "generate", "new_tokens": 4}
    experiments = {"s": STRONG["s"] | {"to": 1}}
    study = write_study(tmp_path, models=[{"id": model}], workload=workload, experiments=experiments)
    assert message in refusal(tmp_path, study)


def test_a_model_folder_that_is_broken(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    workload = {"kind": "generate", "new_tokens": 4}
    experiments = {"s": STRONG["s"] | {"to": 1}}
    study = write_study(tmp_path, models=[{"id": "./model"}], workload=workload, experiments=experiments)
    assert "config.json" in refusal(tmp_path, study)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes((1 << 20).to_bytes(8, "little") + b"{}")
    assert "model.safetensors" in refusal(tmp_path, study)


def test_validate_counts(tmp_path: Path) -> None:
    fine = rankwise_here("validate", write_study(tmp_path), cwd=tmp_path)
    assert fine.returncode == 0 and "2 cells, 2 measurements in 1 launch" in fine.stdout


def test_a_pinned_model_on_a_hub_is_not_asked_for(tmp_path: Path) -> None:
    workload = {"kind": "generate", "new_tokens": 4}
    models = [{"id": "acme/tiny", "revision": "0" * 40}]
    study = write_study(tmp_path, models=models, workload=workload, experiments={"s": STRONG["s"] | {"to": 1}})
    fine = rankwise("validate", study, cwd=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert fine.returncode == 0 and "1 cell, " in fine.stdout, fine.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    study = write_study(tmp_path, surprise=1)
    assert "Traceback" in rankwise_here("--debug", "validate", study, cwd=tmp_path).stderr


def test_the_version_is_the_one_in_pyproject(tmp_path: Path) -> None:
    told = rankwise("--version", cwd=tmp_path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert told.returncode == 0
    assert told.stdout.startswith(f"rankwise {project['version']}")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    for command in ("status", "report", "logs"):
        refused = rankwise_here(command, tmp_path, cwd=tmp_path)
        assert refused.returncode == 2 and "not a run folder" in refused.stderr


def test_doctor_answers_in_json(tmp_path: Path) -> None:
    checks = json.loads(rankwise("doctor", "--json", cwd=tmp_path).stdout)
    assert {"name", "state", "detail", "remedy"} <= checks[0].keys()
