"""The form draws what a study file says, and means the same study."""

import pytest

from configs.spec.form import StudyForm, study_of_form
from configs.spec.study import StudyError, parse_study
from configs.targets.target import SlurmTarget
from configs.workloads.train import TrainWorkload


def test_the_form_as_it_stands_is_a_study() -> None:
    study = study_of_form({})
    assert study == study_of_form(StudyForm().model_dump(mode="json"))
    assert study.experiments["strong"].kind == "strong"


def test_a_model_is_named_by_its_id_also_when_that_is_changed() -> None:
    default = StudyForm.model_json_schema()["properties"]["models"]["default"]
    assert default == [{"id": "synthetic:llama-4m@0"}]
    assert study_of_form({"models": [{"id": "synthetic:llama-13m@0", "name": ""}]}).models[0].name == "llama-13m"


def test_form_and_file_mean_the_same_study() -> None:
    experiments = {
        "strong": {"kind": "strong", "grow": "dp", "to": 2},
        "batch": {"kind": "sweep", "over": {"batch_size": [1, 2]}},
        "precision": {"kind": "optimization", "variants": {"bf16": {"dtype": "bfloat16"}}},
    }
    common = {
        "study": "same",
        "models": [{"id": "synthetic:llama-1m@0"}],
        "workload": {"kind": "generate", "new_tokens": 4},
    }
    questions = [{"name": name, "question": question} for name, question in experiments.items()]
    target = {"kind": "local", "max_ranks": 2}
    filled = study_of_form(common | {"experiments": questions, "target": target})
    assert filled == parse_study(common | {"experiments": experiments, "targets": [target]})


def test_a_cluster_can_be_chosen_with_the_fields_that_most_need() -> None:
    here, cluster = StudyForm.model_json_schema()["properties"]["target"]["anyOf"]
    assert (here["title"], cluster["title"]) == ("This machine", "Slurm")
    assert "shared" not in cluster["properties"] and {"partition", "nodes", "account"} <= set(cluster["properties"])
    target = {"kind": "slurm", "name": "lab", "partition": "lab", "nodes": 2, "max_running": 1}
    assert study_of_form({"target": target}).targets == [SlurmTarget.model_validate(target)]
    with pytest.raises(StudyError, match=r"targets\[0\].partitoin: unknown key \(did you mean partition"):
        study_of_form({"target": {"kind": "slurm", "partitoin": "lab"}})


def test_training_and_its_streams_can_be_asked_for() -> None:
    schema = StudyForm.model_json_schema()
    drawn = next(item for item in schema["properties"]["workload"]["anyOf"] if item["title"] == "Train")
    assert {"task", "micro_batch_size", "activation_checkpointing", "checkpoint_every"} <= set(drawn["properties"])
    assert "$ref" not in str(drawn), "references would be dangling"
    study = study_of_form(
        {
            "workload": {"kind": "train", "max_period_seconds": "2m", "micro_batch_size": 1, "checkpoint_every": 5},
            "layout": {"dp": 2, "strategy": "zero2"},
            "measuring": {"live": ["tensorboard"]},
        }
    )
    assert isinstance(study.workload, TrainWorkload) and study.workload.max_period_seconds == 120
    assert study.layout.strategy == "zero2" and study.measuring.live == ("tensorboard",)


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ([], "study: expected a mapping"),
        ({"experiments": {}}, "experiments: expected a list of named questions"),
        ({"experiments": [{"nome": "x"}]}, "experiments[0]: expected a name and a question"),
        ({"experiments": [{"name": "x"}, {"name": "x"}]}, "experiments[1].name: duplicate name 'x'"),
        (
            {"experiments": [{"name": "x", "question": {"kind": "strong", "grow": "up", "to": 2}}]},
            "experiments.x.grow:",
        ),
        ({"study": "no spaces"}, "study: got 'no spaces', expected up to 100 letters, digits, '.', '_' and '-'"),
        ({"surprise": 1}, "surprise: unknown key"),
        ({"targets": []}, "targets: expected at least 1 entry, got none"),
    ],
)
def test_what_is_wrong_is_named(form: object, problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        study_of_form(form)  # type: ignore[arg-type]
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems


def test_unions_are_alternatives_that_a_form_can_draw() -> None:
    """Prefect's UI draws `anyOf` as a choice, and `oneOf` as a box of JSON."""
    schema = StudyForm.model_json_schema()
    assert len(schema["properties"]["workload"]["anyOf"]) == 5
    assert len(schema["$defs"]["NamedExperiment"]["properties"]["question"]["anyOf"]) == 7
    assert "oneOf" not in str(schema)
