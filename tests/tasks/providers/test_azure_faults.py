"""Faults of renting from Azure, provoked for real: its REST calls over HTTPS, real machines with sshd behind each.

Each fault ends with nothing left, seen by listing the server itself. `make test-cloud-faults` prints the table.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.providers.clouds import provider_named
from tasks.providers.connections import ssh_argv
from tasks.providers.giving_back import LeftBehind, Teardown
from tasks.providers.leases import read_entries
from tasks.providers.rental import Provider
from tasks.providers.renting import RentalFailed, give_back_run, nodes_of
from tests.support.clouds import hosts
from tests.support.clouds.azure import FakeAzure
from tests.support.clouds.faults import Fault
from tests.support.clouds.renter import Renter

pytestmark = [
    pytest.mark.nightly,  # a campaign of its own: make test-cloud-faults
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]
Seen = Callable[..., None]
MACHINE = "PUT virtualMachines"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeAzure]:
    with FakeAzure(tmp_path_factory.mktemp("azure")) as made:
        yield made


@pytest.fixture(scope="module")
def provider(cloud: FakeAzure) -> Provider:
    return provider_named("azure")


@pytest.fixture
def renter(cloud: FakeAzure, provider: Provider, tmp_path: Path) -> Iterator[Renter]:
    cloud.faults.clear()
    cloud.hosts.faults.clear()
    cloud.calls.clear()
    made = Renter(cloud, tmp_path / "rented", provider, {"instance": "Standard_NC4as_T4_v3", "regions": ("eastus",)})
    yield made
    cloud.faults.clear()
    if cloud.left():  # of a test that failed
        made.reap(everything=True)
    assert cloud.left() == []


def test_nodes_come_up_and_go(renter: Renter, seen: Seen) -> None:
    assert renter.provider.regions() == ["eastus", "westeurope", "westus2"]
    assert renter.provider.zones("Standard_NC4as_T4_v3", "eastus") == ["1", "2"]
    lease = renter.lease("whole", market="spot")
    nodes = renter.rent(lease)
    assert len(renter.cloud.hosts.running()) == 2 and {node.market for node in nodes} == {"spot"}
    folder = renter.rented / "whole"
    address = nodes[0].public_address
    assert address is not None
    said = subprocess.run(ssh_argv(folder, "ubuntu", address, ["hostname"]), capture_output=True, text=True)
    assert said.stdout.strip() == nodes[0].id.rpartition("/")[2]
    tagged = renter.provider.tagged(["eastus"], "whole")
    kinds = {"instance", "disk", "nic", "address", "security_group", "network", "placement", "group"}
    assert {resource.kind for resource in tagged} == kinds
    assert all((each.study, each.owner, each.expires_at) == ("faults", "tester", lease.expires_at) for each in tagged)
    own = [each for each in renter.cloud.resources.values() if each["type"] != "Microsoft.Resources/resourceGroups"]
    assert all(each["tags"] == lease.tags for each in own)
    assert renter.reap().removed == []  # alive and not expired
    later = lease.expires_at + 60
    for resource in tagged:
        renter.provider.extend(resource, later)
    assert {each.expires_at for each in renter.provider.tagged(["eastus"], "whole")} == {later}
    renter.down(lease)
    assert renter.cloud.left() == [] and nodes_of(folder) == []
    seen("azure", "no fault", "2 nodes up, then down", "nothing left")


@pytest.mark.parametrize(
    ("name", "fault", "wanted", "place"),
    [
        ("no capacity without a zone", {"code": "AllocationFailed", "times": 1}, {}, "eastus"),
        ("half a gang", {"code": "OverconstrainedAllocationRequest", "times": 1, "after": 1}, {}, "eastus"),
        ("no capacity in a zone", {"code": "ZonalAllocationFailed", "zone": "1"}, {"zones": ("1", "2")}, "eastus"),
        ("no capacity in a region", {"code": "SkuNotAvailable", "region": "eastus"}, {}, "westus2"),
        ("no spot capacity", {"code": "AllocationFailed", "market": "spot"},
         {"market": "spot", "fall_back": "on_demand", "regions": ("eastus",)}, "eastus"),
        ("quota of a region", {"code": "OperationNotAllowed", "region": "eastus"}, {}, "westus2"),
        ("throttled", {"code": "TooManyRequests", "times": 3}, {}, "eastus"),
        ("throttled in the middle of a gang", {"code": "TooManyRequests", "after": 1, "times": 6}, {}, "eastus"),
        ("burst of 5xx", {"code": "InternalServerError", "times": 2}, {}, "eastus"),
        ("internal error of an operation", {"code": "InternalExecutionError", "times": 1, "after": 1}, {}, "eastus"),
        ("answer of create lost", {"lose": True, "times": 1}, {}, "eastus"),
        ("region outage", {"action": ".*", "code": "ServiceUnavailable", "region": "eastus"}, {}, "westus2"),
    ],
)  # fmt: skip
def test_the_ladder_finds_nodes(
    renter: Renter, seen: Seen, name: str, fault: dict[str, Any], wanted: dict[str, Any], place: str
) -> None:
    renter.cloud.faults.append(Fault(**({"action": MACHINE} | fault)))
    lease = renter.lease(re.sub(r"\W", "-", name), **({"regions": ("eastus", "westus2")} | wanted))
    nodes = renter.rent(lease)
    assert {node.region for node in nodes} == {place}
    assert len(renter.cloud.hosts.running()) == 2  # no second pair, no half of an earlier one
    asked = [entry for entry in read_entries(renter.rented / lease.run / "ledger.jsonl") if entry["event"] == "create"]
    if name.startswith("quota"):
        assert [entry["region"] for entry in asked] == ["eastus", "westus2"]  # no zone was asked in vain
    renter.cloud.faults.clear()
    renter.down(lease)
    assert renter.cloud.left() == []
    seen("azure", name, f"rented at rung {len(asked)}, {renter.cloud.count(MACHINE)} create calls", "nothing left")


@pytest.mark.parametrize(
    ("name", "fault", "machine", "message"),
    [
        ("no capacity anywhere", Fault(MACHINE, code="AllocationFailed"), {}, "no capacity for 2"),
        ("quota everywhere", Fault(MACHINE, code="OperationNotAllowed"), {}, "quota"),
        ("refused credentials", Fault(MACHINE, code="AuthorizationFailed"), {}, "auth"),
        ("create answer lost for ever", Fault(MACHINE, lose=True), {}, "transient"),
        ("instance never reachable", None, {"unreachable": True}, "unreachable"),
        ("user data failing", None, {"user_data_fails": True}, "user data failed"),
        ("wrong host key", None, {"wrong_host_key": True}, "host key differs"),
    ],
)  # fmt: skip
def test_a_failed_rental_leaves_nothing(
    renter: Renter, seen: Seen, name: str, fault: Fault | None, machine: dict[str, Any], message: str
) -> None:
    if fault is not None:
        renter.cloud.faults.append(replace(fault))
    if machine:
        renter.cloud.hosts.faults += [{}, machine]  # the second of two
    lease = renter.lease(re.sub(r"\W", "-", name), zones=("1",))
    with pytest.raises(RentalFailed, match=message):
        renter.rent(lease)
    assert renter.cloud.left() == []
    assert not (renter.rented / lease.run / "id_ed25519").exists()
    seen("azure", name, "refused, with the reason", "nothing left")


def test_an_evicted_node_takes_its_gang_along(renter: Renter, seen: Seen) -> None:
    renter.cloud.hosts.faults += [{"ssh_late_seconds": 60}, {}]
    renter.cloud.faults.append(Fault("GET virtualMachines", after=7, times=1, hook=renter.cloud.evict))
    lease = renter.lease("evicted", market="spot", fall_back="on_demand", zones=("1",))
    nodes = renter.rent(lease)
    assert {node.market for node in nodes} == {"on_demand"} and len(renter.cloud.hosts.running()) == 2
    renter.down(lease)
    assert renter.cloud.left() == []
    seen("azure", "spot node evicted before it is ready", "gang given back, on demand instead", "nothing left")


def test_a_region_by_another_spelling(renter: Renter, seen: Seen) -> None:
    """Azure takes it and lists what is there under its own: nothing was found to be given back."""
    lease = renter.lease("spelling", nodes=1, regions=("EastUS",))
    renter.rent(lease)
    renter.down(lease)
    assert renter.cloud.left() == []
    seen("azure", "region by another spelling", "found under Azure's own", "nothing left")


def test_deleting_fails_at_first(renter: Renter, seen: Seen) -> None:
    lease = renter.lease("delete-late")
    renter.rent(lease)
    renter.cloud.faults += [Fault("DELETE .*", code="InternalServerError", times=3)]
    renter.down(lease)
    assert renter.cloud.left() == []
    seen("azure", "deleting fails at first", "tried again", "nothing left")


def test_deleting_always_fails_and_is_named(renter: Renter, seen: Seen) -> None:
    lease = renter.lease("delete-never")
    nodes = renter.rent(lease)
    renter.cloud.faults.append(Fault("DELETE .*", code="InternalServerError"))
    with pytest.raises(LeftBehind) as caught:
        give_back_run(renter.provider, lease, renter.rented / lease.run, renter.printed.append,
                      Teardown(limit_seconds=2, settle_seconds=0))  # fmt: skip
    assert all(node.id in str(caught.value) for node in nodes)
    assert renter.cloud.left() != []
    renter.cloud.faults.clear()
    renter.reap()
    assert renter.cloud.left() == []
    seen("azure", "deleting always fails", f"{len(caught.value.left)} resources named; reap later", "nothing left")


@pytest.mark.parametrize("action", [MACHINE, "GET virtualMachines"])
def test_credentials_expire(renter: Renter, seen: Seen, action: str) -> None:
    """From this call on every call is refused."""
    lease = renter.lease(f"expired-{action[:3].lower()}")
    fault = Fault(".*", code="ExpiredAuthenticationToken", times=0)

    def begin() -> None:
        fault.times = -1

    renter.cloud.faults += [Fault(action, code="ExpiredAuthenticationToken", times=1, hook=begin), fault]
    with pytest.raises(LeftBehind):
        renter.rent(lease)
    renter.cloud.faults.clear()
    renter.reap()
    assert renter.cloud.left() == []
    seen("azure", f"credentials expire at {action}", "told; reap with new ones", "nothing left")


@pytest.mark.parametrize(
    ("stage", "fault", "machine"),
    [
        ("resource group", Fault("PUT resourceGroups"), {}),
        ("security group", Fault("PUT networkSecurityGroups"), {}),
        ("network", Fault("PUT virtualNetworks"), {}),
        ("placement group", Fault("PUT proximityPlacementGroups"), {}),
        ("create call", Fault(MACHINE), {}),
        ("create call that succeeds afterwards", Fault(MACHINE, late_seconds=1.0), {}),
        ("waiting for the operation", Fault("GET operations"), {}),
        ("waiting for SSH", Fault("GET virtualMachines", after=7), {"ssh_late_seconds": 3}),
        ("giving back", Fault("DELETE virtualMachines"), {}),
        ("deleting the group", Fault("DELETE resourceGroups"), {}),
    ],
)  # fmt: skip
def test_sigkill_while_renting_then_reap(
    renter: Renter, seen: Seen, stage: str, fault: Fault, machine: dict[str, Any]
) -> None:
    renter.killed(stage, fault, machine)
    if fault.late_seconds is not None:
        assert renter.reap().problems == []  # possibly too early to see the machine
        time.sleep(fault.late_seconds)
    renter.reap()
    assert renter.cloud.left() == []
    seen("azure", f"SIGKILL: {stage}", "reap", "nothing left")


def test_sigkill_while_renting_then_again(renter: Renter, seen: Seen) -> None:
    lease = renter.killed("again", Fault(MACHINE, late_seconds=1.0), {})
    nodes = renter.rent(lease)
    assert sorted(renter.cloud.hosts.running()) == sorted(node.id.rpartition("/")[2] for node in nodes)
    renter.down(lease)
    assert renter.cloud.left() == []
    seen("azure", "SIGKILL: create call", "the same run again: first gives back, then rents", "nothing left")


def test_a_node_that_powers_itself_off_is_reaped(renter: Renter, seen: Seen) -> None:
    """Azure goes on billing it, so it must be listed, and deleted once it has expired."""
    lease = renter.lease("switch")
    renter.rent(lease)
    renter.switched_off(lease)
    assert {node.state for node in renter.provider.nodes(lease.run, "eastus")} == {"stopping"}
    assert any("virtualmachines" in id for id in renter.cloud.left())
    renter.reap()
    assert renter.cloud.left() == []
    seen("azure", "nobody gives back", "the nodes power off, are billed, and reap deletes them", "nothing left")


def test_orphaned_disk_and_address(renter: Renter, seen: Seen) -> None:
    """Of a run that this machine knows nothing about, in somebody else's resource group and another region."""
    lease = renter.lease("orphan", hours=-1)
    place = "/resourceGroups/others/providers"
    renter.cloud.put(f"{place}/Microsoft.Compute/disks/lost", "westeurope", lease.tags)
    renter.cloud.put(f"{place}/Microsoft.Network/publicIPAddresses/lost", "westeurope", lease.tags)
    assert len(renter.reap(dry_run=True).doomed) == 2 and len(renter.cloud.left()) == 2
    assert len(renter.reap().removed) == 2
    assert renter.cloud.left() == []
    seen("azure", "orphaned disk and address", "found by tag in another region", "nothing left")


def test_no_secret_is_written(renter: Renter, seen: Seen) -> None:
    lease = renter.lease("canary", nodes=1)
    renter.rent(lease)
    renter.down(lease)
    everything = json.dumps(renter.cloud.calls) + "\n".join(renter.printed)
    for path in [*renter.rented.rglob("*"), *renter.cloud.folder.rglob("user_data*")]:
        everything += path.read_text() if path.is_file() else ""
    assert renter.cloud.environment["IDENTITY_HEADER"] not in everything and "token-of-the-test" not in everything
    seen("azure", "canary credentials", "in no file, tag, user data or line", "nothing left")
