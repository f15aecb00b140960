"""A saved reference that a study names: its prompts are answered, its record is placed, nothing is launched for it."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from configs.hardware.architectures import ARCHITECTURES
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan, PlannedModel
from configs.spec.study import StudyError, StudySpec, parse_study
from reports.correctness.section import judge_experiment, reference_sentence
from reports.reading.load import load_run
from tasks.campaign.ledger import missing_measurements, read_ledger
from tasks.models.saved_reference import place_references, save_reference
from tasks.planning.inputs import copy_inputs
from tasks.planning.study_plan import make_plan
from tests.support.run_folders.made_studies import VOCABULARY, words, write_measurements

MODEL_NAME = "m"
WORK = {"kind": "generate", "new_tokens": 3, "prompts": "p.jsonl"}


def planned_model(folder: Path, identity: str, vocabulary: int = VOCABULARY) -> PlannedModel:
    folder.mkdir(parents=True)
    manifest = ModelManifest(
        identity=identity,
        source="folder",
        folder=str(folder),
        files={},
        config=ARCHITECTURES["llama-1m"] | {"vocab_size": vocabulary},
    )
    path = folder / "manifest.json"
    path.write_text(manifest.model_dump_json())
    return PlannedModel(name=MODEL_NAME, identity=identity, manifest=str(path))


def study_of(right: dict[str, Any], work: dict[str, Any]) -> StudySpec:
    return parse_study(
        {
            "study": "s",
            "models": [{"id": "./m", "name": MODEL_NAME}],
            "workload": work,
            "experiments": {"right": {"kind": "correctness", "noise_orders": 3} | right},
            "measuring": {"memory": False},
        }
    )


def plan_in(folder: Path, study: StudySpec, model: PlannedModel, base: Path) -> tuple[RunPaths, Plan]:
    run = RunPaths(folder)
    run.environments.mkdir(parents=True)
    run.environment("e1").write_text("{}")
    plan = make_plan(study, [model], copy_inputs(study, run, base), run.inputs)
    run.plan.write_text(plan.model_dump_json())
    return run, plan


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder with a reference, r.zip, of another model of the same vocabulary."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"tokens": [1, place]}) + "\n" for place in range(4)))
    model = planned_model(tmp_path / "good", "folder:good")
    run, plan = plan_in(tmp_path / "before", study_of({}, WORK), model, tmp_path)
    reference = next(point.cell for point in plan.experiments[0].points if point.baseline)
    write_measurements(run, plan.cells[reference], 0.1, answers=words(0), answer_vocabulary=VOCABULARY)
    save_reference(tmp_path / "r.zip", run, plan, {"transformers": "5.0"})
    return tmp_path


def test_the_reference_is_placed_and_the_rest_is_measured(saved: Path) -> None:
    model = planned_model(saved / "other", "folder:other")
    study = study_of({"reference": "r.zip", "layouts": [{"tp": 2}]}, {"kind": "generate"})
    run, plan = plan_in(saved / "run", study, model, saved)
    place_references(plan, run)
    missing = missing_measurements(plan, read_ledger(run), "timed", only_failed=False)
    assert [each.cell.layout.tp for each in missing] == [2]
    work = missing[0].cell.workload
    prompts = run.inputs / f"{getattr(work, 'prompts', None)}.jsonl"
    assert prompts.read_text() == (saved / "p.jsonl").read_text()
    base, _ = judge_experiment(load_run(run), plan.experiments[0])
    assert "saved before, in " in reference_sentence(base) and "from folder:good" in reference_sentence(base)
    place_references(plan, run)  # of a run that is resumed
    assert len(list(run.records.rglob("*.json"))) == 1


@pytest.mark.parametrize("change", ["prompts", "name"])
def test_prompts_that_are_not_those_that_were_answered_are_refused(change: str, saved: Path) -> None:
    """Their name is the hash of their content, and a path in the folder of inputs."""
    with zipfile.ZipFile(saved / "r.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    if change == "prompts":
        members["prompts.jsonl"] = members["prompts.jsonl"].replace(b"[1, 3]", b"[1, 4]")
    else:
        name = json.loads(members["reference.json"])["record"]["cell"]["workload"]["prompts"]
        members["reference.json"] = members["reference.json"].replace(name.encode(), b"../../elsewhere")
    with zipfile.ZipFile(saved / "r.zip", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    model = planned_model(saved / "other", "folder:other")
    with pytest.raises(StudyError, match=r"experiments\.right\.reference: .*r\.zip: damaged"):
        plan_in(saved / "a" / "run", study_of({"reference": "r.zip"}, {"kind": "generate"}), model, saved)
    assert not list(saved.rglob("elsewhere.jsonl"))


def test_a_reference_of_another_vocabulary_or_none_at_all_is_a_problem_of_the_study(saved: Path) -> None:
    study = study_of({"reference": "r.zip"}, {"kind": "generate"})
    other = planned_model(saved / "other", "folder:other", VOCABULARY + 1)
    with pytest.raises(StudyError) as raised:
        plan_in(saved / "run", study, other, saved)
    assert f"experiments.right.reference: vocabulary of {VOCABULARY} tokens" in raised.value.problems[0]
    (saved / "r.zip").write_text("nothing")
    with pytest.raises(StudyError, match=r"experiments\.right\.reference: .*r\.zip: damaged"):
        plan_in(saved / "again", study, other, saved)
    (saved / "r.zip").unlink()
    with pytest.raises(StudyError, match="no such file"):
        plan_in(saved / "third", study, other, saved)


def test_a_reference_that_was_saved_anew_takes_the_place_of_the_one_before(saved: Path) -> None:
    """The file has the same name and asks the same: the answers of its former content went on being the right ones."""
    model, work = planned_model(saved / "other", "folder:other"), {"kind": "generate"}
    study = study_of({"reference": "r.zip"}, work)
    run, plan = plan_in(saved / "run", study, model, saved)
    place_references(plan, run)
    better, again = plan_in(
        saved / "again", study_of({}, WORK), planned_model(saved / "better", "folder:better"), saved
    )
    reference = next(point.cell for point in again.experiments[0].points if point.baseline)
    write_measurements(better, again.cells[reference], 0.1, answers=words(1.0), answer_vocabulary=VOCABULARY)
    save_reference(saved / "r.zip", better, again, {"transformers": "5.0"})
    resumed = make_plan(study, [model], copy_inputs(study, run, saved), run.inputs)
    assert resumed.cells.keys() == plan.cells.keys(), "no key says whose answers they are"
    run.plan.write_text(resumed.model_dump_json())
    place_references(resumed, run)
    base, _ = judge_experiment(load_run(run), resumed.experiments[0])
    assert "from folder:better" in reference_sentence(base)
    (placed,) = run.records.rglob("r0-a1.json")
    live = plan.model_copy(
        update={"experiments": (plan.experiments[0].model_copy(update={"reference": None}),)}
    )  # the study runs the reference itself now
    place_references(live, run)
    assert not placed.exists() and not placed.with_suffix(".npz").exists()
