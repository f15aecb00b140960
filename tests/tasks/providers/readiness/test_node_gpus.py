"""A rented node whose driver shows fewer GPUs than its instance has is given back and named, and measures nothing."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from configs.targets.rented import RentedTarget
from tasks.providers import renting
from tasks.providers.giving_back import Teardown
from tasks.providers.ladder import RentalOffer
from tasks.providers.leases import read_entries
from tasks.providers.readiness import node_gpus, waiting
from tasks.providers.readiness.node_gpus import gpus_of_instance, lacking_gpus
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, Provider, RentalLease, RentalRequest, Resource, Rung
from tasks.providers.renting import RentalFailed, plan_rental, rent
from tasks.providers.study_nodes import request_of

REGION = "us-east-1"
T4 = "GPU 0: Tesla T4 (UUID: GPU-5e1a7b2c)\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\n"
LOST = "Unable to determine the device handle for gpu 0000:00:1E.0: GPU is lost.  Reboot the system\n"
Driver = Callable[[str], "tuple[int, str, str] | None"]


def request(instance: str = "g4dn.xlarge", **given: Any) -> RentalRequest:
    wanted = {"kind": "aws", "instance": instance, "regions": [REGION], "ssh_from": "203.0.113.7/32", **given}
    return request_of(RentedTarget.model_validate(wanted))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], list[str]]:
    """Let nodes answer as this says; returns the commands that they are asked."""

    def made(answer: Driver) -> list[str]:
        asked: list[str] = []

        def run_there(folder: Path, user: str, address: str, command: str, seconds: float) -> Any:
            asked.append(command)
            said = answer(address)
            return None if said is None else subprocess.CompletedProcess([], *said)

        monkeypatch.setattr(node_gpus, "run_there", run_there)
        return asked

    return made


def test_every_gpu_that_is_paid_for_must_be_there_unless_the_cores_compute() -> None:
    assert gpus_of_instance("aws", "g5.12xlarge") == 4 and gpus_of_instance("azure", "Standard_ND96isr_MI300X_v5") == 8
    assert gpus_of_instance("aws", "c7i.xlarge") == gpus_of_instance("aws", "nobody.knows") == 0
    assert gpus_of_instance("aws", "trn1.32xlarge") == 0  # no engine here runs on it
    assert request("g5.12xlarge").gpus_per_node == request("g5.12xlarge", gpus_per_node=1).gpus_per_node == 4
    assert request("g5.12xlarge", device="cpu").gpus_per_node == request("c7i.xlarge").gpus_per_node == 0
    assert request("nobody.knows", image="ami-1", gpus_per_node=2).gpus_per_node == 2


@pytest.mark.parametrize(
    ("instance", "said", "lacking"),
    [
        ("g4dn.xlarge", (0, T4, ""), None),
        ("g4dn.xlarge", (127, "", "bash: line 1: nvidia-smi: command not found\n"),
         "shows 0 of 1 GPU: bash: line 1: nvidia-smi: command not found"),
        ("g4dn.xlarge", (18, MISMATCH, ""), f"shows 0 of 1 GPU: {MISMATCH.strip()}"),
        ("g5.12xlarge", (0, T4 * 3 + LOST, ""), f"shows 3 of 4 GPUs: {LOST.strip()}"),
        ("g5.12xlarge", (0, T4 * 4 + "  MIG 3g.20gb     Device  0: (UUID: MIG-1)\n", ""), None),
        ("g4dn.xlarge", None, "no answer to `nvidia-smi -L` within 90 s"),
    ],
)  # fmt: skip
def test_what_a_driver_says_is_told(
    driver: Callable[[Driver], list[str]], tmp_path: Path, instance: str, said: Any, lacking: str | None
) -> None:
    assert driver(lambda address: said) == []
    wanted = request(instance)
    found = lacking_gpus(tmp_path, "ubuntu", ["198.51.100.1"], wanted, wanted.gpus_per_node)
    assert found == ({} if lacking is None else {"198.51.100.1": lacking})


def test_gpus_of_amd_are_nodes_of_their_driver(driver: Callable[[Driver], list[str]], tmp_path: Path) -> None:
    wanted = RentalRequest(
        provider="azure", instance="Standard_ND96isr_MI300X_v5", regions=("eastus",), ssh_from="203.0.113.7/32"
    )
    asked = driver(lambda address: (0, "0\n0\n" + "54123\n" * int(address), ""))
    found = lacking_gpus(tmp_path, "azureuser", ["8", "7"], wanted, 8)
    assert found == {"7": "shows 7 of 8 GPUs"} and "kfd" in asked[0]


def test_an_instance_with_amd_gpus_is_not_rented_without_an_image_that_has_their_driver() -> None:
    wanted = RentedTarget.model_validate(
        {"kind": "azure", "instance": "Standard_ND96isr_MI300X_v5", "regions": ["eastus"], "ssh_from": "203.0.113.7/32"}
    )
    with pytest.raises(RentalFailed, match=r"no driver for its AMD GPUs\. Name one that has by `image`"):
        plan_rental(cast(Provider, Cloud()), request_of(wanted), None)
    for more in ({"image": "a:b:c:d"}, {"device": "cpu"}):
        asked = request_of(wanted.model_copy(update=more))
        assert plan_rental(cast(Provider, Cloud()), asked, None).rungs


class Cloud:
    """A cloud whose nodes are up at once."""

    name, default_user = "aws", "ubuntu"

    def __init__(self) -> None:
        self.there: list[Resource] = []

    def zones(self, instance: str, region: str) -> list[str]:
        return []

    def prepare(self, lease: RentalLease, region: str) -> None:
        pass

    def create(self, lease: RentalLease, user_data: str, rung: Rung, token: str) -> list[Node]:
        for place in range(lease.request.nodes):
            made = Resource(provider="aws", kind="instance", id=f"i-{place}", region=rung.region, run=lease.run)
            self.there.append(made)
        return self.nodes(lease.run, rung.region)

    def nodes(self, run: str, region: str) -> list[Node]:
        return [
            Node(id=each.id, region=region, state="running", public_address=each.id.replace("i-", "198.51.100."))
            for each in self.there
        ]

    def tagged(self, regions: list[str], run: str | None = None) -> list[Resource]:
        return list(self.there)

    def delete(self, resource: Resource) -> None:
        self.there.remove(resource)


@pytest.fixture
def rented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Node]]:
    """Rents two nodes of a cloud whose machines answer over SSH."""
    for name in ("make_keys", "remove_keys"):
        monkeypatch.setattr(renting, name, lambda folder: None)
    monkeypatch.setattr(renting, "user_data", lambda folder, lives_seconds: "")
    monkeypatch.setattr(waiting, "write_known_hosts", lambda folder, addresses: None)
    monkeypatch.setattr(waiting, "probe", lambda folder, user, address: "ready")

    def made(cloud: Cloud, driver_seconds: float = 0.0, **given: Any) -> list[Node]:
        wanted = request(nodes=2, **given)
        lease = RentalLease(study="s", run="r", owner="o", expires_at=4_000_000_000, request=wanted)
        patience = Teardown(settle_seconds=0, sleep=lambda _: None)
        limits = Limits(driver_seconds=driver_seconds, sleep=lambda _: None, teardown=patience)
        offer = RentalOffer([Rung(region=REGION), Rung(region="us-west-2")], [])
        return rent(cast(Provider, cloud), lease, offer, tmp_path / "r", lambda _: None, limits)

    return made


def test_nodes_whose_driver_fails_are_given_back_and_named(
    driver: Callable[[Driver], list[str]], rented: Callable[..., list[Node]], tmp_path: Path
) -> None:
    """They computed on their cores, for the price of their GPUs, and their figures were taken for those of GPUs."""
    cloud = Cloud()
    driver(lambda address: (18, MISMATCH, "") if address.endswith("1") else (0, T4, ""))
    with pytest.raises(RentalFailed) as failed:
        rented(cloud)
    said = str(failed.value)
    assert "hardware: i-1 (198.51.100.1) shows 0 of 1 GPU: Failed to initialize NVML" in said
    assert "i-0" not in said and "`device: cpu` of the target" in said and "us-west-2" not in said
    assert cloud.there == []
    assert read_entries(tmp_path / "r" / "ledger.jsonl")[-1]["event"] == "given_back"
    asked = driver(lambda address: (18, MISMATCH, ""))
    assert len(rented(cloud, device="cpu")) == 2 and asked == []


def test_a_driver_that_starts_late_is_waited_for(
    driver: Callable[[Driver], list[str]], rented: Callable[..., list[Node]]
) -> None:
    """Some images install it at the first boot; nodes that show their GPUs are not asked again."""
    looks: dict[str, int] = {}

    def late(address: str) -> tuple[int, str, str]:
        looks[address] = looks.get(address, 0) + 1
        return (0, T4, "") if address.endswith("0") or looks[address] > 2 else (9, "no driver\n", "")

    driver(late)
    assert len(rented(Cloud(), driver_seconds=600.0)) == 2
    assert looks == {"198.51.100.0": 1, "198.51.100.1": 3}
