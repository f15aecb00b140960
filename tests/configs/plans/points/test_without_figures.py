"""Experiments that compare throughput are refused for kinds of workload whose figures another experiment shows."""

from typing import Any

import pytest

from configs.plans.expand import expand
from configs.plans.plan import Plan, PlannedModel
from configs.spec.study import StudyError, parse_study
from configs.workloads import STUDIED

MODEL = PlannedModel(name="m", identity="synthetic:llama-1m@0", manifest="unused")


def plan_of(work: dict[str, Any], experiment: dict[str, Any]) -> Plan:
    models = [{"id": "synthetic:llama-1m@0", "name": "m"}]
    study = {"study": "s", "models": models, "workload": work, "experiments": {"e": experiment}}
    return expand(parse_study(study), [MODEL], {}, lambda _: 5)


def test_every_kind_that_is_not_compared_names_its_experiment() -> None:
    assert all(bool(known.shown_by) is not known.compared for known in STUDIED.values())


@pytest.mark.parametrize(
    "experiment",
    [
        {"kind": "sweep", "over": {"users": [1, 2]}},
        {"kind": "optimization", "variants": {"one": {"users": 1}}},
        {"kind": "strong", "grow": "tp", "to": 2},
        {"kind": "weak", "grow": "dp", "to": 2},
    ],
)
def test_a_server_is_measured_by_load_alone(experiment: dict[str, Any]) -> None:
    """All points were measured, and the report had a figure of none."""
    kind = experiment["kind"]
    with pytest.raises(StudyError) as caught:
        plan_of({"kind": "serve"}, experiment)
    assert caught.value.problems == [
        f"experiments.e.kind: got {kind}, which shows no figure of a serve workload. Use `kind: load`"
    ]
    given = experiment | ({"base": {"workload": {"kind": "serve"}}} if kind != "sweep" else {})
    if kind != "sweep":
        with pytest.raises(StudyError, match="shows no figure of a serve workload"):
            plan_of({"kind": "noop"}, given)


def test_the_experiment_that_shows_them_is_not_refused() -> None:
    assert len(plan_of({"kind": "serve"}, {"kind": "load", "over": {"users": [1, 2]}}).cells) == 2
    assert plan_of({"kind": "communication"}, {"kind": "communication"}).cells
    with pytest.raises(StudyError, match="Use `kind: communication`"):
        plan_of({"kind": "communication"}, {"kind": "sweep", "over": {"tp": [2], "transport": ["auto", "gloo"]}})


@pytest.mark.parametrize(("kind", "other"), [("serve", "load"), ("communication", "communication"), ("noop", "strong")])
def test_layouts_names_what_the_kind_has(kind: str, other: str) -> None:
    with pytest.raises(StudyError, match=f"a {kind} workload does not have. Use {other}$"):
        plan_of({"kind": kind}, {"kind": "layouts"})
