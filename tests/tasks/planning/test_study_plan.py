"""A plan is made of resolved models and copied inputs."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.inputs.prompts import read_prompts
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.spec.study import StudyError, parse_study
from tasks.planning import study_plan
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_models import planned_model
from tasks.planning.study_plan import make_plan

TINY = Path(__file__).parents[3] / "configs" / "models" / "tiny-stdlib"


@pytest.mark.parametrize("kind", ["generate", "train"])
def test_texts_need_a_model_that_brings_a_tokenizer(tmp_path: Path, kind: str) -> None:
    for name in ("mute", "reads"):
        shutil.copytree(TINY, tmp_path / name)
    (tmp_path / "mute" / "tokenizer.json").unlink()
    (tmp_path / "texts.jsonl").write_text('{"prompt": "import os"}\n')
    (tmp_path / "ids.jsonl").write_text('{"tokens": [5, 6]}\n{"prompt": "import os", "variant": "text"}\n')

    def plan(model: str, **work: Any) -> Plan:
        given: dict[str, Any] = {
            "study": "texts",
            "models": [{"id": model}],
            "workload": work,
            "experiments": {"one": {"kind": "sweep", "over": {"layout.tp": [1]}}},
        }
        study, run = parse_study(given), RunPaths(tmp_path / "run")
        models = [planned_model(spec, at, tmp_path / "cache", tmp_path) for at, spec in enumerate(study.models)]
        return make_plan(study, models, copy_inputs(study, run, tmp_path), run.inputs)

    if kind == "train":
        work = {"kind": kind, "data": "stdlib", "global_batch_size": 2, "sequence_length": 8}
        with pytest.raises(StudyError, match=r"workload\.tokenizer: folder:\S+ has no tokenizer\.json\. Set one"):
            plan("./mute", **work)
        assert plan("./reads", **work).cells
        return
    generate = {"kind": kind, "new_tokens": 2}
    for more in ({"prompts": "texts.jsonl"}, {"prompts": "ids.jsonl", "variant": "text"}):
        for model in ("./mute", "synthetic:llama-1m@0"):
            with pytest.raises(StudyError, match=r"workload\.prompts: \S+ has no tokenizer\.json\. Leave prompts out"):
                plan(model, **generate, **more)
        assert plan("./reads", **generate, **more).cells
    assert plan("./mute", **generate, prompts="ids.jsonl").cells
    assert plan("./mute", **generate, prompt_tokens=4).cells


def test_a_file_of_prompts_is_read_once_however_many_cells_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell had the whole file parsed: a plan of a thousand cells over 100 MB of prompts took an hour."""
    read: list[str] = []

    def counted(path: Path, *chosen: object) -> list[str]:
        read.append(path.name)
        return read_prompts(path, *chosen)  # type: ignore[arg-type]

    (tmp_path / "ids.jsonl").write_text('{"tokens": [5, 6]}\n{"tokens": [7]}\n{"tokens": [8]}\n')
    sizes = {"workload.new_tokens": [2, 3, 4, 5, 6], "workload.batch_size": [1, 2], "workload.limit": [2, 3]}
    given: dict[str, Any] = {
        "study": "many",
        "models": [{"id": "synthetic:llama-1m@0"}],
        "workload": {"kind": "generate", "prompts": "ids.jsonl"},
        "experiments": {
            "sizes": {"kind": "sweep", "over": sizes},
            "ranks": {"kind": "strong", "grow": "tp", "points": [1, 2]},
        },
    }
    study, run = parse_study(given), RunPaths(tmp_path / "run")
    model = planned_model(study.models[0], 0, tmp_path / "cache", tmp_path)
    found = copy_inputs(study, run, tmp_path)
    monkeypatch.setattr(study_plan, "read_prompts", counted)
    plan = make_plan(study, [model], found, run.inputs)
    assert len(plan.cells) >= 20 and len(read) == 3, "once for each choice of lines"
