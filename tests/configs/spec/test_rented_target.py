"""Rented targets: what is required, what follows from the instance, and that a saved study reads as the same."""

from typing import Any

import pytest
from pydantic import ValidationError

from configs.spec.study import StudyError, parse_study
from configs.targets.rented import RentedTarget

G5 = {"kind": "aws", "instance": "g5.12xlarge", "regions": ["us-east-1", "us-west-2"], "gpus_per_node": 4}


def target(**changes: Any) -> RentedTarget:
    return RentedTarget.model_validate(G5 | changes)


def test_the_price_is_looked_up_by_instance_and_first_region() -> None:
    assert target().machine == "aws/g5.12xlarge/us-east-1"
    assert target(machine="lab/a").machine == "lab/a"


def test_each_gpu_has_a_rank_and_a_saved_target_reads_as_the_same() -> None:
    assert target().ranks_per_node == 4
    given = target(nodes=2, market="spot", fall_back="on_demand")
    assert RentedTarget.model_validate_json(given.model_dump_json()) == given


@pytest.mark.parametrize(
    ("field", "value"),
    [("shared", "/scratch"), ("regions", []), ("market", "cheap"), ("instance", "a b"), ("max_usd_per_hour", -1),
     ("lease_hours", 25), ("ssh_from", "everybody"), ("user", "-oProxyCommand=x"), ("ssh_from", "0.0.0.0/0"),
     ("ssh_from", "203.0.113.7/33"), ("ssh_from", "2001:db8::/64")],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        target(**{field: value})


def test_a_study_names_the_field() -> None:
    study = {"study": "s", "workload": {"kind": "noop"}, "experiments": {}, "targets": [G5 | {"zone": "us-east-1a"}]}
    with pytest.raises(StudyError) as refused:
        parse_study(study)
    assert any("targets[0].zone" in problem and "zones" in problem for problem in refused.value.problems)
