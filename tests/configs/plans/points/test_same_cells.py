"""A cell is measured once: points of one experiment that have the same cell would compare it with itself."""

from typing import Any

import pytest

from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.spec.study import StudyError, parse_study

MODEL = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="unused")
BASE: dict[str, Any] = {
    "study": "s",
    "models": [{"id": "synthetic:llama-1m@0", "name": "m"}],
    "workload": {"kind": "generate", "prompt_tokens": 4, "new_tokens": 4},
}


def plan_of(experiment: dict[str, Any]) -> Plan:
    study = BASE | {"experiments": {"e": experiment}}
    return expand(parse_study(study), [MODEL], {}, lambda _: 5)


@pytest.mark.parametrize(
    ("experiment", "problem"),
    [
        ({"kind": "sweep", "over": {"batch_size": [1, 2, 1]}}, "batch_size 1 is given twice"),
        ({"kind": "sweep", "over": {"batch_size": [2, "2"]}}, "batch_size 2 is given twice"),
        (
            {"kind": "sweep", "over": {"layout": [{"tp": 1}, {"pp": 1}]}},
            "layout pp=1 is the same cell as layout tp=1",
        ),
        (
            {"kind": "optimization", "baseline": {"dtype": "bfloat16"}, "variants": {"half": {"dtype": "bfloat16"}}},
            "half is the same cell as baseline",
        ),
        (
            {"kind": "optimization", "variants": {"one": {"batch_size": 4}, "other": {"batch_size": 4}}},
            "other is the same cell as one",
        ),
    ],
)
def test_two_points_of_one_cell_are_refused(experiment: dict[str, Any], problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        plan_of(experiment)
    assert caught.value.problems == [f"experiments.e: {problem}. Leave one of the two out"]


def test_two_experiments_may_share_a_cell() -> None:
    swept = {"kind": "sweep", "over": {"batch_size": [1, 2]}}
    study = parse_study(BASE | {"experiments": {"first": swept, "second": swept}})
    plan = expand(study, [MODEL], {}, lambda _: 5)
    assert len(plan.cells) == 2 and [len(each.points) for each in plan.experiments] == [2, 2]


def test_a_grid_of_stages_and_balances_measures_one_stage_once() -> None:
    """It was refused, with the advice to leave out a point that a grid cannot leave out."""
    plan = plan_of({"kind": "sweep", "over": {"pp": [1, 2], "stage_balance": ["memory", "speed"]}})
    assert [point.values for point in plan.experiments[0].points] == [
        {"pp": 1, "stage_balance": "memory"},
        {"pp": 2, "stage_balance": "memory"},
        {"pp": 2, "stage_balance": "speed"},
    ]
    with pytest.raises(StudyError, match="Leave one of the two out"):
        plan_of({"kind": "sweep", "over": {"stage_balance": ["memory", "speed"]}})
    with pytest.raises(StudyError, match="pp 2, stage_balance speed is given twice"):
        plan_of({"kind": "sweep", "over": {"pp": [2, 2], "stage_balance": ["speed"]}})


def test_points_are_labelled_in_words() -> None:
    """Tables and headlines showed `compression ['int8']`, `layout {'tp': 2}` and `read_probe True`."""
    over = {"layout": [{}, {"tp": 2}], "compression": [["int8"]], "read_probe": [True], "micro_batch_size": [None]}
    rest = "compression int8, read_probe true, micro_batch_size none"
    points = plan_of({"kind": "sweep", "over": over}).experiments[0].points
    assert [point.label for point in points] == [f"layout default, {rest}", f"layout tp=2, {rest}"]
    assert points[1].values == {name: values[-1] for name, values in over.items()}
