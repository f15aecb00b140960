"""The short form means a study for each of its questions, and says at which field something is wrong."""

from typing import Any, get_args

import pytest

from configs.plans.expand import expand
from configs.plans.plan import PlannedModel
from configs.spec.short_form import Question, ShortStudy, checked_targets, study_of_short_form
from configs.spec.study import StudyError, StudySpec
from configs.targets.target import LocalTarget, SlurmTarget
from configs.workloads.prompted import PromptedWorkload

LAB: dict[str, dict[str, Any]] = {"lab": {"kind": "slurm", "partition": "gpu", "nodes": 2}}


def test_the_form_as_it_stands_is_a_study() -> None:
    study = study_of_short_form({}, {})
    assert (study.study, study.targets, study.measuring.repeats) == ("my-study", [LocalTarget()], 10)
    assert study == study_of_short_form(ShortStudy().model_dump(mode="json"), {})


@pytest.mark.parametrize("question", get_args(Question))
def test_each_question_is_a_study(question: str) -> None:
    study = study_of_short_form({"question": question, "ranks": 4, "repeats": 3}, {})
    [(name, experiment)] = study.experiments.items()
    assert name == question.replace(" ", "-")
    assert "4" in experiment.model_dump_json(), "the ranks are in it"
    assert study.measuring.repeats == 3


@pytest.mark.parametrize("ranks", [1, 3, 6, 32, 4096])
@pytest.mark.parametrize("question", [one for one in get_args(Question) if one not in ("correctness", "best layout")])
def test_the_work_of_a_question_fills_its_largest_number_of_ranks(question: str, ranks: int) -> None:
    study = study_of_short_form({"question": question, "ranks": ranks}, {})
    models = [PlannedModel(name=model.name, identity=model.id, manifest="unused") for model in study.models]
    cells = expand(study, models, {}, lambda workload: 0).cells.values()
    assert max(cell.layout.ranks for cell in cells) == ranks
    for cell in cells:
        if isinstance(cell.workload, PromptedWorkload):
            assert (cell.workload.num_prompts or 0) >= cell.workload.batch_size * cell.layout.dp


def test_a_target_is_named() -> None:
    study = study_of_short_form({"target": "lab"}, LAB)
    assert study.targets == [SlurmTarget(name="lab", partition="gpu", nodes=2)]


def test_what_is_advanced_is_set_last() -> None:
    study = study_of_short_form({"advanced": ["workload.new_tokens=64", "measuring.repeats=7"]}, {})
    assert (study.measuring.repeats, study.workload.model_dump()["new_tokens"]) == (7, 64)


def test_a_whole_study_as_yaml_may_name_stored_targets() -> None:
    text = """
workload: {kind: noop, seconds: 0.01}
targets: [lab, {kind: local, name: here}]
experiments: {grid: {kind: sweep, over: {label: [a, b]}}}
"""
    study = study_of_short_form({"name": "pasted", "yaml": text, "ranks": 64}, LAB)
    assert isinstance(study, StudySpec)
    assert (study.study, [target.name for target in study.targets]) == ("pasted", ["lab", "here"])


@pytest.mark.parametrize(
    ("filled", "problem"),
    [
        ({"ranks": 0}, "ranks: input should be greater than or equal to 1, got 0"),
        ({"target": "lbo"}, "target: unknown target 'lbo' (did you mean lab?)"),
        ({"nome": "x"}, "nome: unknown key (did you mean name?)"),
        ({"question": "why"}, "question: input should be 'strong scaling'"),
        ({"model": " "}, "model: got ' ', expected the form \\S+"),
        ({"yaml": "a: ["}, "yaml: line 1"),
        ({"yaml": "[1, 2]"}, "yaml: expected a study, a mapping of keys to values, got list"),
        (
            {"yaml": "workload: {kind: noop}\ntargets: [nowhere]\nexperiments: {}"},
            "targets[0]: unknown target 'nowhere'",
        ),
        ({"yaml": "workload: {kind: nop}"}, "workload: kind: unknown value 'nop'"),
        ({"advanced": ["nope"]}, "advanced: 'nope': expected dotted.key=value"),
        ({"advanced": ["measuring.repeats=none"]}, "measuring.repeats: input should be a valid integer"),
        ("x", "study: input should be a valid dictionary"),
        (None, "study: input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_said_with_its_field(filled: Any, problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        study_of_short_form(filled, LAB)
    assert str(caught.value).startswith(problem), str(caught.value)


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ({"lab": {"kind": "slrm"}}, "V: lab: targets[0]: kind: unknown value 'slrm'"),
        (
            {"lab": {"kind": "slurm", "partitoin": "x"}},
            "V: lab: targets[0].partitoin: unknown key (did you mean partition",
        ),
        (["lab"], "V: expected a mapping of names to fields"),
        ({"lab": {"kind": "local", "env": {"HF_TOKEN": "hf_" + "Zq7" * 11}}}, "V: lab.env.HF_TOKEN: contains a secret"),
    ],
)
def test_a_list_of_targets_that_is_not_sound_is_refused(stored: Any, problem: str) -> None:
    assert checked_targets(LAB, "V") == LAB
    with pytest.raises(StudyError) as caught:
        checked_targets(stored, "V")
    assert str(caught.value).startswith(problem), str(caught.value)
    assert "Zq7" not in str(caught.value)
