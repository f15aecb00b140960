"""A study's size is computed from its file: too large a one is refused before any cell is made."""

import time
from typing import Any

import pytest

from configs.plans.expand import expand
from configs.plans.plan import PlannedModel
from configs.spec.study import StudyError, StudySpec, parse_study

MODEL = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="unused")


def study(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "study": "s",
        "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
        "workload": {"kind": "generate", "new_tokens": 4},
        "experiments": sweep(batch_size=[1, 2]),
    }
    return data | changes


def told(**changes: Any) -> str:
    began = time.process_time()
    with pytest.raises(StudyError) as caught:
        parse_study(study(**changes))
    assert time.process_time() - began < 5
    return str(caught.value)


def sweep(**over: list[Any]) -> dict[str, Any]:
    return {"a": {"kind": "sweep", "over": over}}


def test_four_axes_of_a_thousand_values_are_counted_and_refused_at_once() -> None:
    axes = {key: list(range(1, 1001)) for key in ("batch_size", "new_tokens", "prompt_tokens", "num_prompts")}
    assert told(experiments=sweep(**axes)) == (
        "experiments.a: 1,000,000,000,000 points (1,000 x 1,000 x 1,000 x 1,000), expected at most 10,000. "
        "Sweep fewer values, or split the study into several"
    )


def test_models_and_targets_multiply_the_points() -> None:
    models = [{"id": f"synthetic:llama-1m@{seed}", "name": f"m{seed}"} for seed in range(11)]
    targets = [{"kind": "local", "name": name} for name in ("a", "b")]
    experiments = sweep(batch_size=list(range(1, 501)))
    assert "experiments.a: 11,000 points (500 x 11 x 2)" in told(
        models=models, targets=targets, experiments=experiments
    )
    experiments["a"]["models"] = ["m0"]
    assert parse_study(study(models=models, targets=targets, experiments=experiments, measuring={"repeats": 2}))


def test_experiments_and_repeats_add_up() -> None:
    many = {f"e{number}": sweep(batch_size=list(range(1, 4001)))["a"] for number in range(3)}
    assert "experiments: 12,000 points, expected at most 10,000" in told(experiments=many)
    assert told(measuring={"repeats": 1_000_000_000}) == (
        "measuring.repeats: 2 points x 1,000,000,000 repeats are 2,000,000,000 measurements, expected at most 100,000. "
        "Use at most 50,000 repeats"
    )
    assert "1 point x 200,000 repeats are" in told(experiments=sweep(batch_size=[1]), measuring={"repeats": 200_000})


def test_one_problem_that_is_not_listed_is_one() -> None:
    assert StudyError(["x" * 600] * 3 + ["y" * 600]).more == ["and 1 more problem"]


@pytest.mark.parametrize(
    ("experiment", "points"),
    [
        ({"kind": "strong", "grow": "tp", "to": 2}, 2),
        ({"kind": "weak", "grow": "dp", "points": [1, 2, 4]}, 3),
        ({"kind": "sweep", "over": {"batch_size": [1, 2], "dtype": ["float32", "bfloat16"]}}, 4),
        ({"kind": "optimization", "variants": {"a": {"batch_size": 2}, "b": {"batch_size": 4}}}, 3),
        ({"kind": "compression", "passes": ["int8"], "dtypes": ["float32"]}, 4),
        ({"kind": "communication", "ranks": [2, 4]}, 2),
    ],
)
def test_the_number_is_that_of_the_plan(experiment: dict[str, Any], points: int) -> None:
    read: StudySpec = parse_study(study(experiments={"a": experiment}))
    [planned] = expand(read, [MODEL], {}, lambda workload: 5).experiments
    product = 1
    for count in read.experiments["a"].num_values:
        product *= count
    assert product == points == len(planned.points)
