"""A run goes on in the environment in which it was begun, or says in what today's differs."""

import re
from pathlib import Path
from typing import Any

import pytest

from configs.common.files.reading import read_json_object
from configs.plans.paths import RunPaths
from configs.targets.rented import RentedTarget
from configs.targets.target import EndpointTarget, LocalTarget, SshTarget
from tasks.checks.environment import EnvironmentChanged, check_environment, machine_fingerprint


def test_the_environment_of_a_local_run_is_this_machine(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    facts = check_environment(run, accept=False, targets=[LocalTarget()])
    assert {"host", "cores", "memory_gib", "cpu_model", "python", "torch"} <= facts.keys()
    assert machine_fingerprint([LocalTarget()]) == facts


@pytest.mark.usefixtures("eight_gpus")
def test_a_run_on_other_gpus_is_another_environment(tmp_path: Path) -> None:
    assert machine_fingerprint([LocalTarget()])["gpus of target local"] == "8 x NVIDIA H100 80GB HBM3"
    assert machine_fingerprint([LocalTarget(device="cpu")])["gpus of target local"] is None
    run = RunPaths(tmp_path)
    check_environment(run, accept=False, targets=[LocalTarget()])
    with pytest.raises(EnvironmentChanged, match="gpus of target local: was 8 x NVIDIA H100 80GB HBM3, now none"):
        check_environment(run, accept=False, targets=[LocalTarget(device="cpu")])


def test_a_target_that_a_study_has_since_is_no_other_environment(tmp_path: Path) -> None:
    """It was `target g5: was None, now ...`, and to accept it was to accept every other difference."""
    run, here = RunPaths(tmp_path), LocalTarget()
    g5 = RentedTarget.model_validate({"kind": "aws", "name": "g5", "instance": "g5.xlarge", "regions": ["us-east-1"]})
    other = g5.model_copy(update={"instance": "g5.2xlarge"})
    check_environment(run, accept=False, targets=[here])
    check_environment(run, accept=False, targets=[here, g5])
    check_environment(run, accept=False, targets=[here])
    with pytest.raises(EnvironmentChanged, match=r"g5: was instance aws/g5.xlarge, now instance aws/g5.2xlarge\n"):
        check_environment(run, accept=False, targets=[other])
    check_environment(run, accept=True, targets=[other])
    check_environment(run, accept=False, targets=[here, other])
    (tmp_path / "environment.json").write_text("{")  # damaged: written anew
    facts = check_environment(run, accept=False, targets=[here])
    assert read_json_object(tmp_path / "environment.json") == facts


def test_a_target_that_has_become_one_of_another_kind_is_another_environment(tmp_path: Path) -> None:
    """Its name is in the key of a cell and its kind is not: a cluster's records were reported as this machine's."""
    run, here = RunPaths(tmp_path), LocalTarget(name="box")
    g5 = RentedTarget.model_validate({"kind": "aws", "name": "box", "instance": "g5.xlarge", "regions": ["us-east-1"]})
    check_environment(run, accept=False, targets=[here])
    with pytest.raises(EnvironmentChanged, match=r"  target box: was this machine, now instance aws/g5.xlarge\n"):
        check_environment(run, accept=False, targets=[g5])
    check_environment(run, accept=True, targets=[g5])
    check_environment(run, accept=False, targets=[g5])
    with pytest.raises(EnvironmentChanged, match=r"  target box: was instance aws/g5.xlarge, now this machine\n"):
        check_environment(run, accept=False, targets=[here])
    check_environment(run, accept=True, targets=[here])
    check_environment(run, accept=False, targets=[here, g5.model_copy(update={"name": "other"})])


@pytest.mark.parametrize("edited", [{"url": "http://10.0.0.6:8000"}, {"model": "llama-70b"}])
def test_another_server_behind_an_endpoint_is_another_environment(tmp_path: Path, edited: dict[str, str]) -> None:
    """Neither is in the key of a cell: the first server's records were taken for the second one's."""
    run, before = RunPaths(tmp_path), {"url": "http://10.0.0.5:8000", "model": "llama-8b"}
    check_environment(run, accept=False, targets=[EndpointTarget.model_validate(before)])
    check_environment(run, accept=False, targets=[EndpointTarget.model_validate(before | {"max_rate": 5})])
    with pytest.raises(EnvironmentChanged, match=r"server of target endpoint: was llama-8b at http:.*8000, now"):
        check_environment(run, accept=False, targets=[EndpointTarget.model_validate(before | edited)])


@pytest.mark.parametrize(
    "edited", [{"launcher": "deepspeed"}, {"setup": ["module load cuda/12"]}, {"gpus_per_node": 1}], ids=str
)
def test_other_settings_of_a_target_are_another_environment(
    edited: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no key of a cell: what one launcher's ranks measured was given as the figures of another's."""

    async def identity(_: SshTarget) -> str:
        return "hosts"

    monkeypatch.setattr("tasks.checks.environment.identity_of_hosts", identity)

    def check(**fields: Any) -> None:
        target = SshTarget.model_validate({"name": "ssh", "hosts": ["a"], **fields})
        check_environment(RunPaths(tmp_path), accept=False, targets=[target])

    check()
    check(max_ranks=2, env={"A": "b"}, price_usd_per_hour=2, cores_per_rank=2)  # in keys, or of no effect on figures
    [(name, value)] = edited.items()
    said = rf"settings of target ssh: was the defaults, now {name}: {re.escape(str(value))}"
    with pytest.raises(EnvironmentChanged, match=said):
        check(**edited)
