"""Fields of a workload that no cell can use are refused; what one of several cells uses is not."""

from typing import Any

import pytest

from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.spec.study import StudyError, parse_study

MODEL = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="unused")


def plan_of(work: dict[str, Any], *experiments: dict[str, Any]) -> Plan:
    named = {f"e{number}": {"kind": "load"} | each for number, each in enumerate(experiments)}
    study = {"study": "s", "models": [{"id": "synthetic:llama-1m@0", "name": "m"}]}
    return expand(
        parse_study(study | {"workload": {"kind": "serve"} | work, "experiments": named}), [MODEL], {}, lambda _: 5
    )


@pytest.mark.parametrize(
    ("work", "experiment", "problem"),
    [
        ({"burstiness": 0.2}, {"rate": 4}, "workload.burstiness: 0.2 has no effect without arrivals: gamma"),
        ({}, {"rate": 4, "burstiness": 2}, "workload.burstiness: 2.0 has no effect without arrivals: gamma"),
        ({"arrivals": "gamma"}, {"users": 4}, "workload.arrivals: gamma has no effect without an open loop"),
        ({"speed": 2}, {"over": {"rate": [1, 2]}}, "workload.speed: 2.0 has no effect without trace"),
        ({"prefixes": 3}, {"rate": 4}, "workload.prefixes: 3 has no effect without shared_prefix_tokens"),
        ({"think_seconds": 1}, {"rate": 4}, "workload.think_seconds: 1.0 has no effect without users or turns"),
        ({}, {"rate": 4, "max_runs": 9}, "workload.max_runs: 9 has no effect without find: max_rate"),
        (
            {"prompts": "p.jsonl", "prompt_tokens": 9},
            {"rate": 4},
            "workload.prompt_tokens: 9 has no effect without random",
        ),
        ({}, {"rate": 4, "tolerance": 0.2}, "workload.tolerance: 0.2 has no effect without find: max_rate"),
    ],
)
def test_what_no_cell_uses_is_refused(work: dict[str, Any], experiment: dict[str, Any], problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        plan_of(work, experiment)
    assert caught.value.problems[0].startswith(problem)


def test_what_one_of_several_cells_uses_is_not() -> None:
    plan_of({"burstiness": 0.2}, {"rate": 4, "over": {"arrivals": ["poisson", "gamma"]}})
    plan_of({"think_seconds": 1}, {"rate": 4}, {"over": {"users": [1, 2]}})
    plan_of({"turns": 2, "think_seconds": 1, "prefixes": 2, "shared_prefix_tokens": 4}, {"rate": 4})
    plan_of({"objectives": {"ttft_seconds": 1.0}}, {"find": "max_rate", "tolerance": 0.2}, {"users": 2})


@pytest.mark.parametrize("field", [{"variant": "short"}, {"limit": 3}])
def test_a_choice_among_prompts_needs_prompts(field: dict[str, Any]) -> None:
    [name] = field
    swept = {"kind": "sweep", "over": {"batch_size": [1, 2]}}
    with pytest.raises(StudyError, match=f"workload.{name}: .* has no effect without prompts"):
        plan_of({"kind": "generate"} | field, swept)
    plan_of({"kind": "generate"} | field, swept, swept | {"base": {"prompts": "p.jsonl"}})


@pytest.mark.parametrize(
    ("field", "needed", "what"),
    [
        ({"evaluate_every": 100}, {"heldout_share": 0.1}, "validation_data or heldout_share"),
        ({"checkpoints_kept": 5}, {"checkpoint_every": 10}, "checkpoint_every"),
        ({"checkpoint_mode": "sync"}, {"checkpoint_every": 10}, "checkpoint_every"),
        ({"tokenizer": "tokenizer.json"}, {"data": "text.txt"}, "data"),
        ({"tokenizer": "tokenizer.json"}, {"export": True}, "data"),
    ],
)
def test_what_training_would_not_do_is_refused(field: dict[str, Any], needed: dict[str, Any], what: str) -> None:
    [name] = field
    swept = {"kind": "sweep", "over": {"global_batch_size": [4, 8]}}
    with pytest.raises(StudyError, match=f"workload.{name}: .* has no effect without {what}. Leave it out"):
        plan_of({"kind": "train"} | field, swept)
    plan_of({"kind": "train"} | field, swept, swept | {"base": needed})
    plan_of({"kind": "train"} | field | needed, swept)


def test_images_have_no_sequence_length() -> None:
    swept = {"kind": "sweep", "over": {"global_batch_size": [4, 8]}}
    images = {"kind": "train", "task": "image_classification"}
    with pytest.raises(StudyError, match=r"workload\.sequence_length: 64 has no effect without a task of texts"):
        plan_of(images | {"sequence_length": 64}, swept)
    plan_of(images, swept)


@pytest.mark.parametrize(
    "field",
    [
        {"max_length": 512},
        {"max_sequences": 8},
        {"kv_cache_gib": 2.0},
        {"prefix_caching": False},
        {"batch_invariant": True},
        {"engine_options": {"max_num_batched_tokens": 2048}},
        {"ready_seconds": 1800.0},
    ],
)
def test_what_only_a_server_of_the_study_can_be_given_is_refused_of_an_endpoint(field: dict[str, Any]) -> None:
    """A sweep over it sent the same traffic to the same server, and compared the two."""
    [name] = field
    there = {"kind": "endpoint", "url": "http://10.0.0.5:8000", "model": "m"}
    study = {"study": "s", "models": [{"id": "synthetic:llama-1m@0", "name": "m"}], "workload": {"kind": "serve"}}
    swept = {"kind": "load", "over": {name: [field[name]]}}

    def plan(experiment: dict[str, Any], *targets: dict[str, Any]) -> Plan:
        given = study | {"experiments": {"e": experiment}, "targets": list(targets)}
        return expand(parse_study(given), [MODEL], {}, lambda _: 5)

    with pytest.raises(StudyError, match=f"workload.{name}: .* has no effect without a server that the study starts"):
        plan(swept, there)
    plan(swept, there, {"kind": "local"})
    plan({"kind": "load", "over": {"rate": [1, 2]}}, there)


def test_a_file_is_named_as_the_study_writes_it() -> None:
    swept = {"kind": "sweep", "over": {"global_batch_size": [4, 8]}}
    work = {"kind": "train", "tokenizer": "own/tokenizer.json"}
    study = {"study": "s", "models": [{"id": "synthetic:llama-1m@0", "name": "m"}], "workload": work}
    with pytest.raises(StudyError, match=r"workload\.tokenizer: own/tokenizer\.json has no effect"):
        expand(parse_study(study | {"experiments": {"e": swept}}), [MODEL], {"own/tokenizer.json": "ab12"}, lambda _: 5)


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"measure": "tensorboard", "combine": "sum"}, "workload.combine: sum has no effect without measure: probe, "),
        ({"measure": "wall", "warmup_steps": 2}, "workload.warmup_steps: 2 has no effect without a measure of single "),
    ],
)
def test_what_the_source_of_a_script_s_figures_does_not_use_is_refused(field: dict[str, Any], problem: str) -> None:
    work, swept = {"kind": "script", "command": ["a.py"]}, {"kind": "sweep", "over": {"params.a": [1, 2]}}
    with pytest.raises(StudyError) as caught:
        plan_of(work | {"params": {"a": 1}} | field, swept)
    assert any(found.startswith(problem) for found in caught.value.problems)
    plan_of(work | {"params": {"a": 1}, "command": ["a.py", "{params.a}"]} | field | {"measure": "probe"}, swept)
