"""A plan that was checked before the flow is used as it is; one that no longer fits its models is made and checked."""

from pathlib import Path

import pytest

from configs.plans import plan
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Failure, SchemaError, Status
from configs.spec.study import StudyError, StudySpec, parse_study
from configs.targets.target import SlurmTarget
from flows.precheck import check_study
from tasks import resolve
from tasks.planning.predictions import predicted_before, with_predictions
from tasks.planning.study_models import planned_model
from tasks.planning.study_plan import make_plan
from tasks.resolve import CheckedPlan, resolve_study
from tests.support.run_folders.made_studies import write_record

STUDY = {
    "study": "s",
    "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
    "workload": {"kind": "generate", "new_tokens": 4, "num_prompts": 4},
    "experiments": {"batch": {"kind": "sweep", "over": {"batch_size": [1, 2]}}},
}


def resolved(study: StudySpec, tmp_path: Path, checked: CheckedPlan) -> Plan:
    run, cache = RunPaths(tmp_path / "run"), tmp_path / "cache"
    models = [planned_model(spec, place, cache, tmp_path) for place, spec in enumerate(study.models)]
    plan: Plan = resolve_study(study, models, run, tmp_path, cache, checked)
    return plan


def test_the_checked_plan_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = parse_study(STUDY)
    plan = check_study(study, tmp_path, tmp_path / "cache", tmp_path / "run")
    made = resolved(study, tmp_path, CheckedPlan())
    (tmp_path / "run" / "plan.json").unlink()

    def never(*_: object) -> Plan:
        raise AssertionError("made or checked again")

    for name in ("make_sound_plan", "check_resources", "check_requirements", "check_clusters"):
        monkeypatch.setattr(resolve, name, never)
    assert resolved(study, tmp_path, CheckedPlan(plan)) == made
    assert made.cells == plan.cells and made.predictions


def test_a_plan_of_other_models_is_made_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = parse_study(STUDY)
    other = parse_study(STUDY | {"models": [{"id": "synthetic:llama-1m@1", "name": "m"}]})
    plan = check_study(other, tmp_path, tmp_path / "cache", tmp_path / "run")
    found = resolved(study, tmp_path, CheckedPlan(plan))
    assert {cell.model for cell in found.cells.values()} == {"synthetic:llama-1m@0"}
    too_many = parse_study(STUDY | {"layout": {"dp": 4096}})
    with pytest.raises(StudyError, match="4096"):
        resolved(too_many, tmp_path, CheckedPlan(plan))


def test_a_cluster_of_which_nothing_has_failed_is_not_asked_by_a_run_of_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that was away kept `--only-failed` from measuring again what had failed on this machine."""
    study = parse_study(STUDY | {"targets": [{"name": "here"}, {"kind": "slurm", "name": "lab"}]})
    models = [planned_model(spec, place, tmp_path / "cache", tmp_path) for place, spec in enumerate(study.models)]
    run = RunPaths(tmp_path / "run")
    plan = check_study(study, tmp_path, tmp_path / "cache", run.folder)
    here = next(cell for cell in plan.cells.values() if cell.target == "here")
    write_record(run, here, 0, status=Status.FAILED, failure=Failure(message="a fault"))
    monkeypatch.setenv("PATH", str(tmp_path))  # without the commands of Slurm
    checked = (study, tmp_path, tmp_path / "cache", run.folder, True)
    resolving = (study, models, run, tmp_path, tmp_path / "cache", CheckedPlan(), ())
    assert (
        check_study(*checked, only_failed=True).cells.keys() == resolve_study(*resolving, only_failed=True).cells.keys()
    )
    with pytest.raises(StudyError, match="`scontrol`: not found on PATH"):
        check_study(*checked)
    with pytest.raises(StudyError, match="`scontrol`: not found on PATH"):
        resolve_study(*resolving)


def test_a_folder_goes_on_with_the_seed_that_drew_its_prompts(tmp_path: Path) -> None:
    study, other = parse_study(STUDY), parse_study(STUDY | {"measuring": {"seed": 1}})
    run = RunPaths(tmp_path / "run")
    key = next(iter(resolved(study, tmp_path, CheckedPlan()).cells))
    assert resolved(other, tmp_path, CheckedPlan()).measuring.seed == 1, "nothing is measured yet"
    (run.records / key).mkdir(parents=True)
    run.record(key, "timed", 0, 1).write_text("{}")
    refused = "measuring.seed: got 0, but .*run was measured with 1, .* Keep 1, or use another folder with --runs"
    with pytest.raises(StudyError, match=refused):
        check_study(study, tmp_path, tmp_path / "cache", run.folder)
    with pytest.raises(StudyError, match=refused):
        resolved(study, tmp_path, CheckedPlan())
    assert resolved(other, tmp_path, CheckedPlan()).measuring.seed == 1


def test_the_seed_of_work_that_draws_nothing_may_change(tmp_path: Path) -> None:
    noop = STUDY | {"workload": {"kind": "noop"}, "experiments": {"e": {"kind": "sweep", "over": {"items": [1]}}}}
    run = RunPaths(tmp_path / "run")
    key = next(iter(resolved(parse_study(noop), tmp_path, CheckedPlan()).cells))
    (run.records / key).mkdir(parents=True)
    run.record(key, "timed", 0, 1).write_text("{}")
    assert resolved(parse_study(noop | {"measuring": {"seed": 1}}), tmp_path, CheckedPlan()).measuring.seed == 1


@pytest.mark.parametrize("rule", ["warmup", "min_seconds", "min_passes"])
def test_a_folder_goes_on_with_the_rules_that_it_was_measured_with(tmp_path: Path, rule: str) -> None:
    study, other = parse_study(STUDY), parse_study(STUDY | {"measuring": {rule: 7}})
    run = RunPaths(tmp_path / "run")
    key = next(iter(resolved(study, tmp_path, CheckedPlan()).cells))
    (run.records / key).mkdir(parents=True)
    run.record(key, "memory", 0, 1).write_text("{}")
    assert resolved(other, tmp_path, CheckedPlan()) and resolved(study, tmp_path, CheckedPlan()), "nothing is timed yet"
    run.record(key, "timed", 0, 1).write_text("{}")
    refused = (
        f"measuring.{rule}: got 7(.0)?, but .*run was measured with [12](.0)?, .* or use another folder with --runs"
    )
    with pytest.raises(StudyError, match=refused):
        check_study(other, tmp_path, tmp_path / "cache", run.folder)
    with pytest.raises(StudyError, match=refused):
        resolved(other, tmp_path, CheckedPlan())
    longer = STUDY | {"measuring": {rule: 7}, "workload": {"kind": "generate", "new_tokens": 8, "num_prompts": 4}}
    assert resolved(parse_study(longer), tmp_path, CheckedPlan()), "no cell is the same, no record is shared"


def test_a_program_that_cuts_its_own_warm_up_does_not_ask_for_the_rule(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("print()")
    script = {"kind": "script", "command": ["own.py"], "warmup_steps": 2}
    swept = {"e": {"kind": "sweep", "over": {"dp": [1]}}}
    study: dict[str, object] = {"study": "s", "workload": script, "experiments": swept}
    run = RunPaths(tmp_path / "run")
    key = next(iter(resolved(parse_study(study), tmp_path, CheckedPlan()).cells))
    (run.records / key).mkdir(parents=True)
    run.record(key, "timed", 0, 1).write_text("{}")
    assert resolved(parse_study(study | {"measuring": {"warmup": 7}}), tmp_path, CheckedPlan()).measuring.warmup == 7


@pytest.mark.parametrize("bound", ["PLAN_BYTES", "MAX_JSON_VALUES"])
def test_a_plan_that_could_not_be_read_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """Layouts of ten models on ten large targets were measured, and the run ended without a report: `plan.json` was too
    large to be read."""
    study = parse_study({**STUDY, "experiments": {"all": {"kind": "layouts", "ranks": 2, "best": 1}}})
    folders = tmp_path, tmp_path / "cache", tmp_path / "run"
    made = check_study(study, *folders)
    assert len(made.cells) == 1 and sum(len(one.candidates) for one in made.experiments) > 3
    text = made.model_dump_json(indent=1)
    with_prediction = {
        "PLAN_BYTES": len(text) + 1000,
        "MAX_JSON_VALUES": sum(text.count(sign) for sign in ",[{") + 40,
    }
    monkeypatch.setattr(plan, bound, with_prediction[bound])
    assert check_study(study, *folders).cells
    monkeypatch.setattr(plan, bound, with_prediction[bound] - 1)
    with pytest.raises(StudyError, match=r"experiments: the plan of 1 cell and \d+ ranked layouts takes .* Split the"):
        check_study(study, *folders)


def test_a_folder_of_another_version_keeps_its_plan(tmp_path: Path) -> None:
    """From Python nothing had read its records before: its own version could not read the folder any more."""
    run = RunPaths(tmp_path / "run")
    run.folder.mkdir()
    run.plan.write_text('{"schema_version": 2}')
    with pytest.raises(SchemaError, match=r"plan\.json: schema_version: got 2, expected"):
        resolved(parse_study(STUDY), tmp_path, CheckedPlan())
    assert run.plan.read_text() == '{"schema_version": 2}' and not run.study.exists()
    run.plan.write_text("{")  # of which nobody can say anything
    assert resolved(parse_study(STUDY), tmp_path, CheckedPlan()).cells


def test_a_corrected_machine_of_a_cluster_is_predicted_anew(tmp_path: Path) -> None:
    """The cells are the same: they were held against the instance that the cluster was taken for at first."""
    said = {}
    for machine in ("aws/g4dn.xlarge/us-east-1", "aws/p4d.24xlarge/us-east-1", "aws/p4d.24xlarge/us-east-1"):
        target = SlurmTarget(machine=machine, gpus_per_node=1)
        study = parse_study(STUDY).model_copy(update={"targets": [target]})
        models = [planned_model(spec, place, tmp_path / "cache", tmp_path) for place, spec in enumerate(study.models)]
        plan = make_plan(study, models, {}, tmp_path)
        before = said.get("plan")
        kept = None if before is None else predicted_before(plan, before)
        plan = with_predictions(plan, tmp_path, tmp_path / "cache", kept)
        said[machine], said["plan"] = [one.tokens_per_second for one in plan.predictions.values()], plan
    first, second = (said[name] for name in said if name != "plan")
    assert None not in first and all(fast > slow for fast, slow in zip(second, first, strict=True))
