"""Faults of renting, provoked for real: each cloud's API over HTTP, real machines with sshd behind each instance.

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
from tasks.providers.rental import Provider, RentalLease
from tasks.providers.renting import RentalFailed, give_back_run, nodes_of
from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.faults import Fault, FaultyCloud
from tests.support.clouds.gcp import FakeGcp
from tests.support.clouds.renter import Renter
from tests.support.patience import patient

pytestmark = [
    pytest.mark.nightly,  # a campaign of its own: make test-cloud-faults
    pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not())),
]
Seen = Callable[..., None]


WORDS: dict[str, dict[str, str]] = {
    "aws": {
        "instance": "g4dn.xlarge",
        "region": "us-east-1",
        "other region": "us-west-2",
        "zone": "us-east-1a",
        "two cost": r"1\.05",
        "unpriced": "p3.2xlarge",
        "far region": "eu-west-1",
        "create": "RunInstances",
        "look": "DescribeInstances",
        "end": "TerminateInstances",
        "make group": "CreateSecurityGroup",
        "open group": "AuthorizeSecurityGroupIngress",
        "end group": "DeleteSecurityGroup",
        "make placement": "CreatePlacementGroup",
        "no capacity": "InsufficientInstanceCapacity",
        "quota": "VcpuLimitExceeded",
        "throttled": "RequestLimitExceeded",
        "internal": "InternalError",
        "outage": "Unavailable",
        "refused": "UnauthorizedOperation",
        "expired": "ExpiredToken",
    },
    "gcp": {
        "instance": "g2-standard-4",
        "region": "us-central1",
        "other region": "us-west1",
        "zone": "us-central1-a",
        "two cost": r"1\.41",
        "unpriced": "n1-standard-4+t4",
        "far region": "africa-south1",
        "create": "instances.bulkInsert",
        "look": "instances.list",
        "end": "instances.delete",
        "make group": "firewalls.insert",
        "open group": "operations.wait",
        "end group": "firewalls.delete",
        "make placement": "resourcePolicies.insert",
        "no capacity": "ZONE_RESOURCE_POOL_EXHAUSTED",
        "quota": "QUOTA_EXCEEDED",
        "throttled": "rateLimitExceeded",
        "internal": "backendError",
        "outage": "backendError",
        "refused": "forbidden",
        "expired": "authError",
    },
}
"""What each cloud calls its calls, refusals and places."""
LEFT_SWITCHED_OFF = {
    "aws": {"security_group", "placement"},
    "gcp": {"security_group", "placement", "instance", "disk"},  # stopped, not deleted
}


@pytest.fixture(scope="module", params=["aws", "gcp"])
def name_of_cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cloud(name_of_cloud: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCloud]:
    made: FakeAws | FakeGcp
    with {"aws": FakeAws, "gcp": FakeGcp}[name_of_cloud](tmp_path_factory.mktemp(name_of_cloud)) as made:
        yield made


class WordedRenter(Renter):
    """A renter who names places, calls and refusals in general words, and is understood by each cloud."""

    def __init__(self, cloud: FaultyCloud, folder: Path, provider: Provider) -> None:
        super().__init__(cloud, folder, provider, {})
        self.words = WORDS[provider.name]

    def suffer(self, *faults: Fault) -> None:
        super().suffer(*(self.said(fault) for fault in faults))

    def said(self, fault: Fault) -> Fault:
        said = {name: self.word(getattr(fault, name)) for name in ("action", "code", "region", "zone")}
        for name, word in said.items():
            setattr(fault, name, word)
        return fault

    def word(self, general: str | None) -> str | None:
        return None if general is None else self.words.get(general, general)

    def lease(self, run: str, hours: float = 0.25, **wanted: Any) -> RentalLease:
        fields = {"regions": ("region",), "instance": "instance", "zones": (), **wanted}
        said = {name: tuple(self.word(place) for place in fields[name]) for name in ("regions", "zones")}
        return super().lease(run, hours, **fields | said | {"instance": self.word(fields["instance"])})


@pytest.fixture(scope="module")
def provider(cloud: FaultyCloud, name_of_cloud: str) -> Provider:
    return provider_named(name_of_cloud)  # type: ignore[arg-type]


@pytest.fixture
def renter(cloud: FaultyCloud, provider: Provider, tmp_path: Path) -> Iterator[WordedRenter]:
    cloud.faults.clear()
    cloud.hosts.faults.clear()
    cloud.calls.clear()
    made = WordedRenter(cloud, tmp_path / "rented", provider)
    yield made
    cloud.faults.clear()
    if cloud.left():  # of a test that failed
        made.reap(everything=True)
    assert cloud.left() == []


def machines(cloud: FaultyCloud) -> int:
    return len(cloud.hosts.running())


def test_nodes_come_up_and_go(renter: WordedRenter, seen: Seen) -> None:
    lease = renter.lease("whole")
    nodes = renter.rent(lease)
    assert machines(renter.cloud) == 2 and len(nodes) == 2
    folder = renter.rented / "whole"
    address = nodes[0].public_address
    assert address is not None
    said = subprocess.run(ssh_argv(folder, "ubuntu", address, ["hostname"]), capture_output=True, text=True)
    assert said.stdout.strip() == nodes[0].id
    tagged = renter.provider.tagged([renter.words["region"]], "whole")
    assert {resource.kind for resource in tagged} == {"instance", "disk", "security_group", "placement"}
    assert all((each.study, each.owner, each.expires_at) == ("faults", "tester", lease.expires_at) for each in tagged)
    assert renter.reap().removed == []  # alive and not expired
    with pytest.raises(ValueError, match="up already"):
        renter.rent(lease)
    renter.down(lease)
    assert renter.cloud.left() == [] and nodes_of(folder) == []
    assert not (folder / "id_ed25519").exists() and not (folder / "host_ed25519").exists()
    seen(renter.provider.name, "no fault", "2 nodes up, then down", "nothing left")


@pytest.mark.parametrize(
    ("name", "fault", "wanted", "place"),
    [
        ("no capacity without a zone", {"code": "no capacity", "times": 1}, {}, "region"),
        ("no capacity in a region", {"code": "no capacity", "region": "region"}, {}, "other region"),
        ("no spot capacity", {"code": "no capacity", "market": "spot"},
         {"market": "spot", "fall_back": "on_demand"}, "region"),
        ("quota of a region", {"code": "quota", "region": "region"}, {}, "other region"),
        ("throttled", {"code": "throttled", "times": 3}, {}, "region"),
        ("burst of 5xx", {"code": "internal", "times": 2}, {}, "region"),
        ("answer of create lost", {"lose": True, "times": 1}, {}, "region"),
        ("region outage", {"action": ".*", "code": "outage", "region": "region"}, {}, "other region"),
    ],
)  # fmt: skip
def test_the_ladder_finds_nodes(
    renter: WordedRenter, seen: Seen, name: str, fault: dict[str, Any], wanted: dict[str, Any], place: str
) -> None:
    renter.suffer(Fault(**({"action": "create"} | fault)))
    lease = renter.lease(re.sub(r"\W", "-", name), regions=("region", "other region"), **wanted)
    nodes = renter.rent(lease)
    assert {node.region for node in nodes} == {renter.word(place)}
    assert machines(renter.cloud) == 2  # an answer that was lost made no second pair
    asked = [entry for entry in read_entries(renter.rented / lease.run / "ledger.jsonl") if entry["event"] == "create"]
    if name.startswith("quota"):
        assert [entry["region"] for entry in asked] == [
            renter.words["region"],
            renter.words["other region"],
        ]  # no zone was asked in vain
    renter.cloud.faults.clear()
    renter.down(lease)
    assert renter.cloud.left() == []
    seen(
        renter.provider.name,
        name,
        f"rented at rung {len(asked)}, {renter.cloud.count(renter.words['create'])} create calls",
        "nothing left",
    )


@pytest.mark.parametrize(
    ("name", "fault", "machine", "message"),
    [
        ("no capacity anywhere", Fault("create", code="no capacity"), {}, "no capacity for 2"),
        ("quota everywhere", Fault("create", code="quota"), {}, "quota"),
        ("refused credentials", Fault("create", code="refused"), {}, "auth"),
        ("create answer lost for ever", Fault("create", lose=True), {}, "transient"),
        ("instance never reachable", None, {"unreachable": True}, "unreachable"),
        ("reachable too late", None, {"ssh_late_seconds": 60}, "unreachable"),
        ("user data failing", None, {"user_data_fails": True}, "user data failed"),
        ("wrong host key", None, {"wrong_host_key": True}, "host key differs"),
        ("no driver", None, {"gpus": 0}, "hardware: .* shows 0 of 1 GPU: .*not found"),
    ],
)  # fmt: skip
def test_a_failed_rental_leaves_nothing(
    renter: WordedRenter, seen: Seen, name: str, fault: Fault | None, machine: dict[str, Any], message: str
) -> None:
    if fault is not None:
        renter.suffer(replace(fault))
    if machine:
        renter.cloud.hosts.faults += [{}, machine]  # the second of two
    lease = renter.lease(re.sub(r"\W", "-", name), zones=("zone",), gpus_per_node=1 if "gpus" in machine else 0)
    with pytest.raises(RentalFailed, match=message):
        renter.rent(lease)
    assert renter.cloud.left() == []
    assert not (renter.rented / lease.run / "id_ed25519").exists()
    seen(renter.provider.name, name, "refused, with the reason", "nothing left")


def test_a_node_taken_back_while_it_boots_takes_its_gang_along(renter: WordedRenter, seen: Seen) -> None:
    renter.cloud.hosts.faults += [{}, {"powers_off": True}]
    lease = renter.lease("reclaimed", market="spot", fall_back="on_demand", zones=("zone",))
    nodes = renter.rent(lease)
    assert {node.market for node in nodes} == {"on_demand"} and machines(renter.cloud) == 2
    renter.down(lease)
    assert renter.cloud.left() == []
    seen(
        renter.provider.name, "spot node reclaimed while booting", "gang given back, on demand instead", "nothing left"
    )


def test_half_a_gang_is_given_back(renter: WordedRenter, seen: Seen) -> None:
    """Google's bulk request promises all or none; what is left nevertheless goes before the next place is asked."""
    if renter.provider.name != "gcp":
        pytest.skip("EC2 leaves no half of a request")
    renter.cloud.faults.append(Fault("instances.bulkInsert", code="half", times=1))
    lease = renter.lease("half")
    nodes = renter.rent(lease)
    deadline = time.monotonic() + patient(10)
    while sorted(renter.cloud.hosts.running()) != sorted(node.id for node in nodes):
        assert time.monotonic() < deadline, renter.cloud.hosts.running()
        time.sleep(0.1)
    renter.down(lease)
    assert renter.cloud.left() == []
    seen(renter.provider.name, "half a gang", "deleted, then the next zone", "nothing left")


def test_terminate_fails_at_first(renter: WordedRenter, seen: Seen) -> None:
    lease = renter.lease("terminate-late")
    renter.rent(lease)
    renter.suffer(Fault("end", code="internal", times=3))
    renter.cloud.shutdown_seconds = 1.0
    renter.down(lease)
    renter.cloud.shutdown_seconds = 0.0
    assert renter.cloud.left() == []
    seen(renter.provider.name, "terminate failing at first, group in use", "tried again", "nothing left")


def test_terminate_always_fails_and_is_named(renter: WordedRenter, seen: Seen) -> None:
    lease = renter.lease("terminate-never")
    nodes = renter.rent(lease)
    renter.suffer(Fault("end", code="internal"))
    with pytest.raises(LeftBehind) as caught:
        give_back_run(renter.provider, lease, renter.rented / lease.run, renter.printed.append,
                      Teardown(limit_seconds=2, settle_seconds=0))  # fmt: skip
    for node in nodes:
        assert node.id in str(caught.value)
    assert renter.cloud.left() != []
    renter.cloud.faults.clear()
    assert len(renter.reap().removed) >= 4
    assert renter.cloud.left() == []
    seen(
        renter.provider.name,
        "terminate failing always",
        f"{len(caught.value.left)} resources named; reap later",
        "nothing left",
    )


@pytest.mark.parametrize("action", ["create", "look"])
def test_credentials_expire(renter: WordedRenter, seen: Seen, action: str) -> None:
    """From this call on every call is refused."""
    lease = renter.lease(f"expired-{action}")
    fault = Fault(".*", code="expired", times=0)

    def begin() -> None:
        fault.times = -1

    asked_before = 1 if action == "look" else 0  # for nodes of this name
    renter.suffer(Fault(action, code="expired", times=1, after=asked_before, hook=begin), fault)
    with pytest.raises(LeftBehind) as caught:
        renter.rent(lease)
    if action == "look":
        made = [
            entry for entry in read_entries(renter.rented / lease.run / "ledger.jsonl") if entry["event"] == "created"
        ]
        assert all(id in str(caught.value) for id in made[0]["ids"])
    renter.cloud.faults.clear()
    renter.reap()
    assert renter.cloud.left() == []
    seen(
        renter.provider.name,
        f"credentials expire at {action}",
        "what is left is named; reap with new ones",
        "nothing left",
    )


@pytest.mark.parametrize(
    ("stage", "fault", "machine"),
    [
        ("make group", Fault("make group"), {}),
        ("open group", Fault("open group"), {}),
        ("make placement", Fault("make placement"), {}),
        ("create call", Fault("create"), {}),
        ("create call that succeeds afterwards", Fault("create", late_seconds=1.0), {}),
        ("waiting until running", Fault("look", after=1), {}),
        ("waiting for SSH", Fault("look", after=3), {"ssh_late_seconds": 3}),
        ("giving back", Fault("end"), {}),
        ("deleting the group", Fault("end group"), {}),
    ],
)  # fmt: skip
def test_sigkill_while_renting_then_reap(
    renter: WordedRenter, seen: Seen, stage: str, fault: Fault, machine: dict[str, Any]
) -> None:
    lease = renter.killed(stage, fault, machine)
    if fault.late_seconds is not None:
        assert renter.reap().problems == []  # possibly too early to see the instance
        time.sleep(fault.late_seconds)
    renter.reap()
    assert renter.cloud.left() == []
    assert lease.run in {path.name for path in renter.rented.iterdir()}
    seen(renter.provider.name, f"SIGKILL: {stage}", "reap", "nothing left")


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("create call that succeeds afterwards", Fault("create", late_seconds=1.0)),
        ("waiting until running", Fault("look", after=1)),
    ],
)
def test_sigkill_while_renting_then_again(renter: WordedRenter, seen: Seen, stage: str, fault: Fault) -> None:
    lease = renter.killed(f"{stage}-again", fault, {})
    nodes = renter.rent(lease)
    assert sorted(renter.cloud.hosts.running()) == sorted(node.id for node in nodes)
    renter.down(lease)
    assert renter.cloud.left() == []
    seen(renter.provider.name, f"SIGKILL: {stage}", "the same run again: first gives back, then rents", "nothing left")


def test_two_runs_at_once(renter: WordedRenter, seen: Seen) -> None:
    leases = [renter.lease(name, nodes=1) for name in ("twin-a", "twin-b", "twin-b")]
    outcomes: list[object] = []

    def one(lease: RentalLease) -> None:
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
    assert len(refused) == 1 and re.search("another command|up already", refused[0])
    assert machines(renter.cloud) == 2
    renter.down(leases[0])
    assert machines(renter.cloud) == 1  # the other run's node is none of its business
    renter.down(leases[1])
    assert renter.cloud.left() == []
    seen(renter.provider.name, "two runs at once, one name twice", "the second of a name is refused", "nothing left")


def test_a_name_that_another_machine_has_taken(renter: WordedRenter, tmp_path: Path, seen: Seen) -> None:
    lease = renter.lease("taken", nodes=1)
    renter.rent(lease)
    other = WordedRenter(renter.cloud, tmp_path / "elsewhere", renter.provider)
    with pytest.raises(RentalFailed, match=r"^taken: tester has rented under this name"):
        other.rent(other.lease("taken", nodes=1))
    assert other.reap().removed == [] and machines(renter.cloud) == 1
    renter.down(lease)
    assert renter.cloud.left() == []
    seen(renter.provider.name, "a name that another machine has taken", "refused", "nothing left")


def test_price_cap(renter: WordedRenter, seen: Seen) -> None:
    with pytest.raises(RentalFailed, match=renter.words["two cost"] + " USD/h exceeds the cap of 1 USD/h"):
        renter.rent(renter.lease("cap", zones=("zone",)), cap=1.0)
    with pytest.raises(RentalFailed, match="price unknown"):
        renter.rent(renter.lease("cap", regions=("far region",), instance="unpriced"), cap=1000.0)
    assert renter.cloud.count(renter.words["create"]) == 0 and renter.cloud.left() == []
    seen(renter.provider.name, "price cap", "nothing asked for", "nothing left")


def test_orphaned_disk_and_address(renter: WordedRenter, seen: Seen) -> None:
    """Of a run that this machine knows nothing about, in a region that no study here names."""
    lease = renter.lease("orphan", hours=-1)
    renter.cloud.orphan(lease.tags)
    assert len(renter.reap(dry_run=True).doomed) == 2 and len(renter.cloud.left()) == 2
    assert len(renter.reap().removed) == 2
    assert renter.cloud.left() == []
    seen(renter.provider.name, "orphaned disk and address", "found by tag in another region", "nothing left")


def test_dead_mans_switch_needs_nobody(renter: WordedRenter, seen: Seen) -> None:
    lease = renter.lease("switch")
    renter.rent(lease)
    renter.switched_off(lease)
    deadline = time.monotonic() + patient(10)  # the cloud sees a moment later that a machine has gone
    while True:
        found, problems, _ = find_everything([renter.provider])
        kinds = {resource.kind for resource in found}
        if kinds == LEFT_SWITCHED_OFF[renter.provider.name] or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert problems == [] and kinds == LEFT_SWITCHED_OFF[renter.provider.name]
    renter.reap()
    assert renter.cloud.left() == []
    seen(
        renter.provider.name,
        "nobody gives back",
        "the nodes power off; reap takes the rest",
        "nothing left",
    )


def test_no_secret_is_written(renter: WordedRenter, tmp_path: Path, seen: Seen) -> None:
    lease = renter.lease("canary", nodes=1)
    renter.rent(lease)
    renter.down(lease)
    everything = json.dumps([call.text for call in renter.cloud.calls]) + "\n".join(renter.printed)
    for path in [*renter.rented.rglob("*"), *renter.cloud.folder.rglob("user_data*")]:
        everything += path.read_text() if path.is_file() else ""
    assert renter.cloud.secrets and not any(secret in everything for secret in renter.cloud.secrets)
    seen(renter.provider.name, "canary credentials", "in no file, tag, user data or line", "nothing left")
