"""Faults of renting, provoked for real: EC2's API over HTTP, real machines with sshd behind each instance.

Each fault ends with nothing left, seen by listing the server itself. `make test-cloud-faults` prints the table.
"""

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.providers.clouds import provider_named
from tasks.providers.connections import ssh_argv
from tasks.providers.giving_back import LeftBehind, Teardown, find_everything
from tasks.providers.leases import read_entries
from tasks.providers.rental import Lease, Provider
from tasks.providers.renting import RentalFailed, extend_run, give_back_run, nodes_of
from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.faults import Fault
from tests.support.clouds.renter import Renter

pytestmark = [
    pytest.mark.nightly,  # a campaign of its own: make test-cloud-faults
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]
Seen = Callable[..., None]


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeAws]:
    with FakeAws(tmp_path_factory.mktemp("aws")) as made:
        yield made


@pytest.fixture(scope="module")
def provider(cloud: FakeAws) -> Provider:
    return provider_named("aws")


@pytest.fixture
def renter(cloud: FakeAws, provider: Provider, tmp_path: Path) -> Iterator[Renter]:
    cloud.faults.clear()
    cloud.hosts.faults.clear()
    cloud.calls.clear()
    made = Renter(cloud, tmp_path / "rented", provider, {"instance": "g4dn.xlarge", "regions": ("us-east-1",)})
    yield made
    cloud.faults.clear()
    if cloud.left():  # of a test that failed
        made.reap(everything=True)
    assert cloud.left() == []


def machines(aws: FakeAws) -> int:
    return len(aws.hosts.running())


def test_nodes_come_up_and_go(renter: Renter, seen: Seen) -> None:
    lease = renter.lease("whole")
    nodes = renter.rent(lease)
    assert machines(renter.cloud) == 2 and len(nodes) == 2
    folder = renter.rented / "whole"
    address = nodes[0].public_address
    assert address is not None
    said = subprocess.run(ssh_argv(folder, "ubuntu", address, ["hostname"]), capture_output=True, text=True)
    assert said.stdout.strip() == nodes[0].id
    tagged = renter.provider.tagged(["us-east-1"], "whole")
    assert {resource.kind for resource in tagged} == {"instance", "disk", "security_group", "placement"}
    assert all((each.study, each.owner, each.expires_at) == ("faults", "tester", lease.expires_at) for each in tagged)
    assert renter.reap().removed == []  # alive and not expired
    with pytest.raises(ValueError, match="up already"):
        renter.rent(lease)
    renter.down(lease)
    assert renter.cloud.left() == [] and nodes_of(folder) == []
    assert not (folder / "id_ed25519").exists() and not (folder / "host_ed25519").exists()
    seen("no fault", "2 nodes up, then down", "nothing left")


@pytest.mark.parametrize(
    ("name", "fault", "wanted", "place"),
    [
        ("no capacity without a zone", {"code": "InsufficientInstanceCapacity", "times": 1}, {}, "us-east-1"),
        ("no capacity in a region", {"code": "InsufficientInstanceCapacity", "region": "us-east-1"}, {}, "us-west-2"),
        ("no spot capacity", {"code": "InsufficientInstanceCapacity", "market": "spot"},
         {"market": "spot", "fall_back": "on_demand"}, "us-east-1"),
        ("quota of a region", {"code": "VcpuLimitExceeded", "region": "us-east-1"}, {}, "us-west-2"),
        ("throttled", {"code": "RequestLimitExceeded", "times": 3}, {}, "us-east-1"),
        ("burst of 5xx", {"code": "InternalError", "times": 2}, {}, "us-east-1"),
        ("answer of create lost", {"lose": True, "times": 1}, {}, "us-east-1"),
        ("region outage", {"action": ".*", "code": "Unavailable", "region": "us-east-1"}, {}, "us-west-2"),
    ],
)  # fmt: skip
def test_the_ladder_finds_nodes(
    renter: Renter, seen: Seen, name: str, fault: dict[str, Any], wanted: dict[str, Any], place: str
) -> None:
    renter.cloud.faults.append(Fault(**({"action": "RunInstances"} | fault)))
    lease = renter.lease(re.sub(r"\W", "-", name), regions=("us-east-1", "us-west-2"), **wanted)
    nodes = renter.rent(lease)
    assert {node.region for node in nodes} == {place}
    assert machines(renter.cloud) == 2  # an answer that was lost made no second pair
    asked = [entry for entry in read_entries(renter.rented / lease.run / "ledger.jsonl") if entry["event"] == "create"]
    if name.startswith("quota"):
        assert [entry["region"] for entry in asked] == ["us-east-1", "us-west-2"]  # no zone was asked in vain
    renter.cloud.faults.clear()
    renter.down(lease)
    assert renter.cloud.left() == []
    seen(name, f"rented at rung {len(asked)}, {renter.cloud.count('RunInstances')} create calls", "nothing left")


@pytest.mark.parametrize(
    ("name", "fault", "machine", "message"),
    [
        ("no capacity anywhere", Fault("RunInstances", code="InsufficientInstanceCapacity"), {}, "no capacity for 2"),
        ("quota everywhere", Fault("RunInstances", code="VcpuLimitExceeded"), {}, "quota"),
        ("refused credentials", Fault("RunInstances", code="UnauthorizedOperation"), {}, "auth"),
        ("create answer lost for ever", Fault("RunInstances", lose=True), {}, "transient"),
        ("instance never reachable", None, {"unreachable": True}, "unreachable"),
        ("reachable too late", None, {"ssh_late_seconds": 60}, "unreachable"),
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
    lease = renter.lease(re.sub(r"\W", "-", name), zones=("us-east-1a",))
    with pytest.raises(RentalFailed, match=message):
        renter.rent(lease)
    assert renter.cloud.left() == []
    assert not (renter.rented / lease.run / "id_ed25519").exists()
    seen(name, "refused, with the reason", "nothing left")


def test_a_node_taken_back_while_it_boots_takes_its_gang_along(renter: Renter, seen: Seen) -> None:
    renter.cloud.hosts.faults += [{}, {"powers_off": True}]
    lease = renter.lease("reclaimed", market="spot", fall_back="on_demand", zones=("us-east-1a",))
    nodes = renter.rent(lease)
    assert {node.market for node in nodes} == {"on_demand"} and machines(renter.cloud) == 2
    renter.down(lease)
    assert renter.cloud.left() == []
    seen("spot node reclaimed while booting", "gang given back, on demand instead", "nothing left")


def test_terminate_fails_at_first(renter: Renter, seen: Seen) -> None:
    lease = renter.lease("terminate-late")
    renter.rent(lease)
    renter.cloud.faults += [Fault("TerminateInstances", code="InternalError", times=3)]
    renter.cloud.shutdown_seconds = 1.0
    renter.down(lease)
    renter.cloud.shutdown_seconds = 0.0
    assert renter.cloud.left() == []
    seen("terminate failing at first, group in use", "tried again", "nothing left")


def test_terminate_always_fails_and_is_named(renter: Renter, seen: Seen) -> None:
    lease = renter.lease("terminate-never")
    nodes = renter.rent(lease)
    renter.cloud.faults.append(Fault("TerminateInstances", code="InternalError"))
    with pytest.raises(LeftBehind) as caught:
        give_back_run(renter.provider, lease, renter.rented / lease.run, renter.printed.append,
                      Teardown(limit_seconds=2, settle_seconds=0))  # fmt: skip
    for node in nodes:
        assert node.id in str(caught.value)
    assert renter.cloud.left() != []
    renter.cloud.faults.clear()
    assert len(renter.reap().removed) >= 4
    assert renter.cloud.left() == []
    seen("terminate failing always", f"{len(caught.value.left)} resources named; reap later", "nothing left")


@pytest.mark.parametrize("action", ["RunInstances", "DescribeInstances"])
def test_credentials_expire(renter: Renter, seen: Seen, action: str) -> None:
    """From this call on every call is refused."""
    lease = renter.lease(f"expired-{action.lower()}")
    fault = Fault(".*", code="ExpiredToken", times=0)

    def begin() -> None:
        fault.times = -1

    renter.cloud.faults += [Fault(action, code="ExpiredToken", times=1, hook=begin), fault]
    with pytest.raises(LeftBehind) as caught:
        renter.rent(lease)
    if action == "DescribeInstances":
        made = [
            entry for entry in read_entries(renter.rented / lease.run / "ledger.jsonl") if entry["event"] == "created"
        ]
        assert all(id in str(caught.value) for id in made[0]["ids"])
    renter.cloud.faults.clear()
    renter.reap()
    assert renter.cloud.left() == []
    seen(f"credentials expire at {action}", "what is left is named; reap with new ones", "nothing left")


@pytest.mark.parametrize(
    ("stage", "fault", "machine"),
    [
        ("CreateSecurityGroup", Fault("CreateSecurityGroup"), {}),
        ("AuthorizeSecurityGroupIngress", Fault("AuthorizeSecurityGroupIngress"), {}),
        ("CreatePlacementGroup", Fault("CreatePlacementGroup"), {}),
        ("create call", Fault("RunInstances"), {}),
        ("create call that succeeds afterwards", Fault("RunInstances", late_seconds=1.0), {}),
        ("waiting until running", Fault("DescribeInstances"), {}),
        ("waiting for SSH", Fault("DescribeInstances", after=2), {"ssh_late_seconds": 3}),
        ("giving back", Fault("TerminateInstances"), {}),
        ("deleting the group", Fault("DeleteSecurityGroup"), {}),
    ],
)  # fmt: skip
def test_sigkill_while_renting_then_reap(
    renter: Renter, seen: Seen, stage: str, fault: Fault, machine: dict[str, Any]
) -> None:
    lease = renter.killed(stage, fault, machine)
    if fault.late_seconds is not None:
        assert renter.reap().problems == []  # possibly too early to see the instance
        time.sleep(fault.late_seconds)
    renter.reap()
    assert renter.cloud.left() == []
    assert lease.run in {path.name for path in renter.rented.iterdir()}
    seen(f"SIGKILL: {stage}", "reap", "nothing left")


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("create call that succeeds afterwards", Fault("RunInstances", late_seconds=1.0)),
        ("waiting until running", Fault("DescribeInstances")),
    ],
)
def test_sigkill_while_renting_then_again(renter: Renter, seen: Seen, stage: str, fault: Fault) -> None:
    lease = renter.killed(f"{stage}-again", fault, {})
    nodes = renter.rent(lease)
    assert sorted(renter.cloud.hosts.running()) == sorted(node.id for node in nodes)
    renter.down(lease)
    assert renter.cloud.left() == []
    seen(f"SIGKILL: {stage}", "the same run again: first gives back, then rents", "nothing left")


def test_two_runs_at_once(renter: Renter, seen: Seen) -> None:
    leases = [renter.lease(name, nodes=1) for name in ("twin-a", "twin-b", "twin-b")]
    outcomes: list[object] = []

    def one(lease: Lease) -> None:
        try:
            outcomes.append(renter.rent(lease))
        except ValueError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=one, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(refused) == 1 and re.search("another process|up already", refused[0])
    assert machines(renter.cloud) == 2
    renter.down(leases[0])
    assert machines(renter.cloud) == 1  # the other run's node is none of its business
    renter.down(leases[1])
    assert renter.cloud.left() == []
    seen("two runs at once, one name twice", "the second of a name is refused", "nothing left")


def test_price_cap(renter: Renter, seen: Seen) -> None:
    with pytest.raises(RentalFailed, match=r"1\.05 USD/h exceeds the cap of 1 USD/h"):
        renter.rent(renter.lease("cap", zones=("us-east-1a",)), cap=1.0)
    with pytest.raises(RentalFailed, match="price unknown"):
        renter.rent(renter.lease("cap", regions=("eu-west-1",), instance="p3.2xlarge"), cap=1000.0)
    assert renter.cloud.count("RunInstances") == 0 and renter.cloud.left() == []
    seen("price cap", "nothing asked for", "nothing left")


def test_orphaned_disk_and_address(renter: Renter, seen: Seen) -> None:
    """Of a run that this machine knows nothing about, in a region that no study here names."""
    lease = renter.lease("orphan", hours=-1)
    tags = [{"Key": key, "Value": value} for key, value in lease.tags.items()]
    ec2 = renter.cloud.client("ec2", "eu-west-1")
    ec2.create_volume(
        AvailabilityZone="eu-west-1a", Size=8, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
    )
    ec2.allocate_address(Domain="vpc", TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": tags}])
    assert len(renter.reap(dry_run=True).doomed) == 2 and len(renter.cloud.left()) == 2
    assert len(renter.reap().removed) == 2
    assert renter.cloud.left() == []
    seen("orphaned disk and address", "found by tag in another region", "nothing left")


def test_dead_mans_switch_needs_nobody(renter: Renter, seen: Seen) -> None:
    lease = renter.lease("switch")
    renter.rent(lease)
    extend_run(renter.provider, lease, renter.rented / lease.run, int(time.time()) + 4)
    deadline = time.monotonic() + 30
    while machines(renter.cloud):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    found, problems = find_everything([renter.provider])
    assert problems == [] and {resource.kind for resource in found} == {"security_group", "placement"}
    renter.reap()
    assert renter.cloud.left() == []
    seen("nobody gives back", "the nodes power off and are terminated; reap takes the groups", "nothing left")


def test_no_secret_is_written(renter: Renter, tmp_path: Path, seen: Seen) -> None:
    lease = renter.lease("canary", nodes=1)
    renter.rent(lease)
    secret = renter.cloud.environment["AWS_SECRET_ACCESS_KEY"]
    renter.down(lease)
    everything = json.dumps([call for _, _, call in renter.cloud.calls]) + "\n".join(renter.printed)
    for path in [*renter.rented.rglob("*"), *renter.cloud.folder.rglob("user_data*")]:
        everything += path.read_text() if path.is_file() else ""
    assert secret not in everything and renter.cloud.environment["AWS_ACCESS_KEY_ID"] not in everything
    seen("canary credentials", "in no file, tag, user data or line", "nothing left")
