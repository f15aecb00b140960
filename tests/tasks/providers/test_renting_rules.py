"""The order of the ladder, what a refusal rules out, the ledger, and what is planted in user data."""

import errno
import fcntl
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from botocore.exceptions import (  # type: ignore[import-untyped]
    ClientError,
    CredentialRetrievalError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from configs.plans.rentals import StudyRental
from configs.targets.rented import RentedTarget
from slurm.staging.packages import run_digest
from tasks.providers import renting, study_nodes
from tasks.providers.attempts import attempts_of
from tasks.providers.aws.errors import call_aws
from tasks.providers.aws.provider import Aws, _node
from tasks.providers.boot import make_keys, remove_keys, user_data
from tasks.providers.clouds import provider_named
from tasks.providers.connections import ssh_argv
from tasks.providers.giving_back import why_doomed
from tasks.providers.labels import label, owner
from tasks.providers.ladder import is_excluded, ladder
from tasks.providers.leases import (
    in_use,
    is_dead,
    not_given_back,
    open_ledger,
    read_entries,
    token_of,
    unsettled_seconds,
)
from tasks.providers.readiness import waiting
from tasks.providers.readiness.waiting import Limits, NodeWaiting
from tasks.providers.rental import Node, Provider, ProviderError, RentalLease, RentalRequest, Resource, Rung
from tasks.providers.renting import RentalFailed, _Renting, extend_run, plan_rental
from tasks.providers.study_nodes import rental_name, request_of

ROOT = Path(__file__).parents[3]
REQUEST = RentalRequest(
    provider="aws",
    instance="g4dn.xlarge",
    regions=("us-east-1", "us-west-2"),
    market="spot",
    fall_back="on_demand",
    ssh_from="203.0.113.7/32",
)
ZONES = {"us-east-1": ["us-east-1a", "us-east-1b"], "us-west-2": ["us-west-2a"]}


def test_no_zone_then_zones_then_regions_then_the_other_market() -> None:
    places = [(rung.market, rung.region, rung.zone) for rung in ladder(REQUEST, ZONES)]
    one_market = [
        ("us-east-1", None),
        ("us-east-1", "us-east-1a"),
        ("us-east-1", "us-east-1b"),
        ("us-west-2", None),
        ("us-west-2", "us-west-2a"),
    ]
    assert places == [(market, *place) for market in ("spot", "on_demand") for place in one_market]


def test_named_zones_are_asked_in_their_order() -> None:
    request = REQUEST.model_copy(update={"zones": ("us-east-1b", "us-east-1a"), "fall_back": None})
    assert [rung.zone for rung in ladder(request, ZONES)] == ["us-east-1b", "us-east-1a"]


def test_zones_of_another_region_are_told() -> None:
    """`--zone` without `--region` is of the provider's home region."""
    elsewhere = REQUEST.model_copy(update={"regions": ("us-east-1",), "zones": ("us-west-2a",)})
    cloud = cast(Provider, SimpleNamespace(zones=lambda instance, region: ZONES[region]))
    with pytest.raises(RentalFailed, match=r"us-east-1: not asked, as .* us-west-2a there, but in us-east-1a, us-east"):
        plan_rental(cloud, elsewhere, None)
    both = plan_rental(cloud, elsewhere.model_copy(update={"regions": ("us-east-1", "us-west-2")}), None)
    assert {rung.zone for rung in both.rungs} == {"us-west-2a"} and both.refused[0].startswith("us-east-1: not asked")


def test_unknown_prices_are_none() -> None:
    priced, unpriced = ladder(REQUEST.model_copy(update={"regions": ("us-east-1", "eu-north-1")}), {})[:2]
    assert priced.usd_per_hour is not None and unpriced.usd_per_hour is None


@pytest.mark.parametrize(
    ("problem", "left"),
    [("capacity", 9), ("quota", 7), ("transient", 4)],
)
def test_a_refusal_rules_out_no_more_than_it_says(problem: str, left: int) -> None:
    rungs = ladder(REQUEST, ZONES)
    kept = [rung for rung in rungs if not is_excluded(rung, problem, rungs[0])]  # type: ignore[arg-type]
    assert len(kept) == left


@pytest.mark.parametrize(
    ("code", "status", "problem"),
    [
        ("InsufficientFreeAddressesInSubnet", 400, "capacity"),  # another zone has another subnet
        ("InsufficientVolumeCapacity", 500, "capacity"),
        ("VolumeLimitExceeded", 400, "quota"),  # another region has another quota
        ("NetworkInterfaceLimitExceeded", 400, "quota"),
        ("RequestLimitExceeded", 503, "throttled"),
        ("InvalidGroup.NotFound", 400, "transient"),  # made a moment ago
        ("InvalidPlacementGroup.Unknown", 400, "transient"),
        ("InvalidParameterValue", 400, "invalid"),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403, "auth"),
        ("SomethingNew", 503, "transient"),
    ],
)
def test_what_ec2_lacks_for_now_or_in_one_place_is_asked_for_again(code: str, status: int, problem: str) -> None:
    def refused() -> None:
        answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise ClientError(answer, "RunInstances")

    with pytest.raises(ProviderError) as caught:
        call_aws(refused)
    assert caught.value.problem == problem


def test_a_group_that_is_not_seen_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2's answers come from several places, which learn of a new group one after the other."""
    monkeypatch.setattr(Aws, "_ec2", lambda aws, region: None)
    monkeypatch.setattr(Aws, "_group", lambda aws, lease, region: None)
    lease = RentalLease(study="s", run="r", owner="o", expires_at=1, request=REQUEST)
    with pytest.raises(ProviderError, match="rankwise-r is not visible yet in us-east-1") as caught:
        Aws.create(object.__new__(Aws), lease, "", Rung(region="us-east-1"), "token")
    assert caught.value.problem == "transient"


def test_everybody_may_not_connect() -> None:
    with pytest.raises(ValueError, match="everybody"):
        RentalRequest.model_validate(REQUEST.model_dump() | {"ssh_from": "0.0.0.0/0"})


@pytest.mark.parametrize("written", ["203.0.113.7", "203.0.113.7/32", "203.0.113.7/255.255.255.255"])
def test_an_address_is_a_range_of_one(written: str) -> None:
    """EC2 refused it after the security group had been made: `CIDR block 203.0.113.7 is malformed`."""
    typed = RentalRequest.model_validate(REQUEST.model_dump() | {"ssh_from": written})
    assert typed.ssh_from == "203.0.113.7/32"


def test_an_address_that_no_node_can_be_reached_from_is_refused() -> None:
    """Nodes have IPv4 addresses: they were rented and waited for in vain where the cloud took the rule."""
    with pytest.raises(ValueError, match="2001:db8::/32, but nodes have IPv4 addresses only"):
        RentalRequest.model_validate(REQUEST.model_dump() | {"ssh_from": "2001:db8::/32"})


def test_private_nodes_are_not_rented_for_a_machine_that_they_do_not_admit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They see its private address; a rule for its public one, the default, let nobody in."""
    monkeypatch.setattr(study_nodes, "callers_address", lambda _: "203.0.113.7/32")
    target = RentedTarget(kind="gcp", name="g", instance="g2-standard-4", regions=["us-central1"], public_address=False)
    with pytest.raises(ValueError, match=r"^target g: ssh_from: is needed with public_address: false, because"):
        request_of(target)
    assert request_of(target.model_copy(update={"ssh_from": "10.0.0.5/32"})).ssh_from == "10.0.0.5/32"
    assert request_of(target.model_copy(update={"kind": "azure"})).ssh_from == "203.0.113.7/32"
    assert request_of(target.model_copy(update={"public_address": True})).ssh_from == "203.0.113.7/32"


def test_the_address_that_nobody_tells_is_asked_for_where_the_user_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study was told to set `--ssh-from`, which `rankwise run` has not."""

    def refused(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("tasks.providers.callers_address.urlopen", refused)
    target = RentedTarget(kind="aws", name="g", instance="g5.xlarge", regions=["us-east-1"])
    with pytest.raises(ValueError, match=r"^target g: ssh_from: .*\(no network\). Set it, such as 203.0.113.7/32$"):
        request_of(target)


@pytest.mark.parametrize("written", ["East US", "EastUS", "eastus"])
def test_a_region_is_found_again_however_it_was_written(written: str) -> None:
    """Azure takes all three, and lists what is there as of eastus."""
    fields = {"kind": "azure", "instance": "Standard_NC4as_T4_v3", "ssh_from": REQUEST.ssh_from}
    target = RentedTarget.model_validate(fields | {"regions": [written]})
    assert target.machine == "azure/Standard_NC4as_T4_v3/eastus" and request_of(target).regions == ("eastus",)
    typed = RentalRequest(provider="azure", instance="x", regions=(written,), ssh_from=REQUEST.ssh_from)
    assert typed.regions == ("eastus",)


def test_an_image_of_a_strangers_is_not_taken_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can publish an image under any name, and the newest one is taken."""
    images = {
        "self": {"ImageId": "ami-own", "CreationDate": "2026-01-01"},
        "999999999999": {"ImageId": "ami-stranger", "CreationDate": "2026-11-01"},
    }

    def describe(Filters: Any, Owners: tuple[str, ...] = ()) -> Any:
        return {"Images": [image for owner, image in images.items() if not Owners or owner in Owners]}

    monkeypatch.setattr(Aws, "_ec2", lambda aws, region: SimpleNamespace(describe_images=describe))
    named = REQUEST.model_copy(update={"image": "our-gpu-image"})
    assert Aws._image(object.__new__(Aws), named, "us-east-1") == "ami-own"
    del images["self"]
    with pytest.raises(ProviderError, match=r"us-east-1: no image named 'our-gpu-image' of this account.*by its id"):
        Aws._image(object.__new__(Aws), named, "us-east-1")


def test_a_vpc_that_is_not_the_default_one_needs_a_subnet(monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2 starts instances without one in the default VPC, and refuses another VPC's security group there."""
    vpcs = {
        "vpc-own": {"VpcId": "vpc-own", "IsDefault": False},
        "vpc-default": {"VpcId": "vpc-default", "IsDefault": True},
    }
    client = SimpleNamespace(
        describe_vpcs=lambda Filters: {"Vpcs": [vpcs[Filters[0]["Values"][0].replace("true", "vpc-default")]]},
        describe_subnets=lambda SubnetIds: {"Subnets": [{"VpcId": "vpc-own", "AvailabilityZone": "us-east-1b"}]},
    )
    monkeypatch.setattr(Aws, "_ec2", lambda aws, region: client)
    aws, own = object.__new__(Aws), REQUEST.model_copy(update={"network": "vpc-own"})
    with pytest.raises(
        ProviderError, match=r"^us-east-1: vpc-own is not the default VPC.*Name one by `subnet`$"
    ) as caught:
        aws._vpc(own, "us-east-1")
    assert caught.value.problem == "invalid"
    assert aws._vpc(own.model_copy(update={"subnet": "subnet-1"}), "us-east-1") == "vpc-own"
    assert aws._vpc(own.model_copy(update={"network": "vpc-default"}), "us-east-1") == "vpc-default"
    assert aws._vpc(REQUEST, "us-east-1") == "vpc-default"


@pytest.mark.parametrize(("zone", "asked"), [("us-east-1a", False), ("us-east-1b", True), (None, True)])
def test_a_zone_without_the_subnet_has_no_capacity(
    monkeypatch: pytest.MonkeyPatch, zone: str | None, asked: bool
) -> None:
    """EC2 calls another zone than the subnet's a wrong parameter, which ended renting before the other market."""
    wanted: list[dict[str, Any]] = []

    def run_instances(**given: Any) -> Any:
        wanted.append(given)
        return {"Instances": []}

    client = SimpleNamespace(
        describe_subnets=lambda SubnetIds: {"Subnets": [{"VpcId": "vpc-1", "AvailabilityZone": "us-east-1b"}]},
        describe_images=lambda ImageIds: {"Images": [{"ImageId": ImageIds[0]}]},
        run_instances=run_instances,
    )
    monkeypatch.setattr(Aws, "_ec2", lambda aws, region: client)
    monkeypatch.setattr(Aws, "_visible_group", lambda aws, lease, region: "sg-1")
    request = REQUEST.model_copy(update={"subnet": "subnet-1", "image": "ami-1"})
    lease = RentalLease(study="s", run="r", owner="o", expires_at=1, request=request)
    rung = Rung(region="us-east-1", zone=zone)
    if asked:
        assert object.__new__(Aws).create(lease, "", rung, "token") == []
        assert wanted[0]["NetworkInterfaces"][0]["SubnetId"] == "subnet-1"
        return
    with pytest.raises(ProviderError, match=r"^subnet-1 is in us-east-1b$") as caught:
        object.__new__(Aws).create(lease, "", rung, "token")
    assert caught.value.problem == "capacity" and not wanted
    left = [other for other in ladder(request, ZONES) if not is_excluded(other, "capacity", rung)]
    assert {other.market for other in left} == {"spot", "on_demand"}


@pytest.mark.parametrize(("state", "told"), [("terminated", True), ("shutting-down", True), ("running", False)])
def test_why_ec2_ended_an_instance_is_told(state: str, told: bool) -> None:
    """A key of encryption that may not be used ended every instance at its launch, and was told as no capacity."""
    why = "Client.InternalError: Client error on launch"
    entry = {
        "InstanceId": "i-1",
        "State": {"Name": state},
        "StateReason": {"Code": "Client.InternalError", "Message": why},
    }
    node = _node(entry, "us-east-1")
    ready = object.__new__(NodeWaiting)
    if not told:
        ready._check_not_taken_back({"i-1"}, [node])
        return
    with pytest.raises(ProviderError, match=f"^i-1 was taken back before it was ready: {why}$"):
        ready._check_not_taken_back({"i-1"}, [node])
    with pytest.raises(ProviderError, match=r"before it was ready$"):
        ready._check_not_taken_back({"i-1"}, [])


@pytest.mark.parametrize("code", ["MissingInput", "InvalidInput"])
def test_a_zone_without_a_default_subnet_has_no_capacity(code: str) -> None:
    """As zones that AWS opened after the VPC was made: the other zones and markets were not asked."""

    def refused() -> None:
        message = "No default subnet for availability zone: 'us-east-1e'."
        answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": 400}}
        raise ClientError(answer, "RunInstances")

    with pytest.raises(ProviderError, match="us-east-1e") as caught:
        call_aws(refused)
    assert caught.value.problem == "capacity"


@pytest.mark.parametrize(
    "error",
    [
        UnauthorizedSSOTokenError(),
        CredentialRetrievalError(provider="custom-process", error_msg="exit code 1"),
        TokenRetrievalError(provider="sso", error_msg="Token has expired and refresh failed"),
    ],
)
def test_credentials_that_expire_meanwhile_are_no_wrong_parameter(error: Exception) -> None:
    """Giving back waits a quarter of an hour for what may pass, and not for a login."""

    def expired() -> None:
        raise error

    with pytest.raises(ProviderError) as caught:
        call_aws(expired)
    assert caught.value.problem == "auth"


def test_the_policy_of_the_documents_allows_every_call() -> None:
    """The first spot instance of an account needs a role, which EC2 makes with the caller's permissions."""
    statements = json.loads((ROOT / "docs" / "how-to" / "clouds" / "aws-policy.json").read_text())["Statement"]
    actions = [each["Action"] for each in statements]
    allowed = {name for each in actions for name in ([each] if isinstance(each, str) else each)}
    source = (ROOT / "tasks" / "providers" / "aws" / "provider.py").read_text()
    calls = set(re.findall(r"(?:ec2|\(region\)|home)\.([a-z]+_[a-z_]+)", source)) - {"can_paginate", "get_paginator"}
    calls |= set(re.findall(r'"(describe_[a-z_]+)"', source))
    asked = {f"ec2:{''.join(word.capitalize() for word in call.split('_'))}" for call in calls}
    asked |= {"ssm:GetParameter", "sts:GetCallerIdentity", "iam:CreateServiceLinkedRole"}
    assert len(calls) > 20 and asked <= allowed


@pytest.mark.parametrize("hours", [float("nan"), float("inf"), -1, 0, 721])
def test_hours_are_bounded(hours: float) -> None:
    with pytest.raises(ValueError, match="hours"):
        RentalRequest.model_validate(REQUEST.model_dump() | {"hours": hours})


@pytest.mark.parametrize("cap", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_cap_that_holds_nothing_back_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="max_usd_per_hour"):
        plan_rental(provider_named("aws"), REQUEST, cap)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_machine_that_the_catalog_does_not_know_needs_an_image(cloud: str) -> None:
    """Renting one that the study prices began, and ended as an unknown instance after the network's rules were made."""
    request = RentalRequest.model_validate(REQUEST.model_dump() | {"provider": cloud, "instance": "e2-standard-8"})
    provider = cast(Provider, SimpleNamespace(name=cloud, zones=lambda instance, region: []))
    with pytest.raises(RentalFailed, match=f"^{cloud}/e2-standard-8: not in the catalog, .* Name one by `image`$"):
        plan_rental(provider, request, None)
    offer = plan_rental(provider, request.model_copy(update={"image": "ours"}), None)
    assert {rung.usd_per_hour for rung in offer.rungs} == {None} and offer.max_usd_per_hour is None


@pytest.mark.parametrize("seconds", [-10, 31 * 24 * 3600])
def test_an_end_in_the_past_or_far_away_is_refused(tmp_path: Path, seconds: int) -> None:
    lease = RentalLease(study="s", run="r", owner="o", expires_at=7, request=REQUEST)
    with pytest.raises(ValueError, match="hours"):
        extend_run(provider_named("aws"), lease, tmp_path, int(time.time()) + seconds)


def test_tokens_are_the_same_again_and_differ_between_attempts_and_rentals() -> None:
    """Of one name, too: a cloud remembers the token of another data folder's rental after its nodes are gone."""
    rung = Rung(region="us-east-1")
    lease = RentalLease(study="s", run="r", owner="o", expires_at=7, request=REQUEST)
    assert token_of(lease, 1, rung) == token_of(lease, 1, rung)
    changes = ({"run": "q"}, {"owner": "p"}, {"expires_at": 8})
    others = {token_of(lease.model_copy(update=change), 1, rung) for change in changes}
    others |= {token_of(lease, 2, rung), token_of(lease, 1, Rung(region="us-east-1", market="spot"))}
    assert token_of(lease, 1, rung) not in others and len(others) == 5


def test_a_cut_line_loses_nothing_else(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("opened")
    path = tmp_path / "r" / "ledger.jsonl"
    with path.open("a") as file:
        file.write('{"event": "create", "tok')
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("given_back")
    assert [entry["event"] for entry in read_entries(path)] == ["opened", "given_back"]


def test_an_unanswered_create_call_is_waited_for(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("create", token="a")
        ledger.write("create", token="b")
        ledger.write("refused", token="a")
    entries = read_entries(tmp_path / "r" / "ledger.jsonl")
    asked = entries[1]["epoch"]
    assert unsettled_seconds(entries, asked + 1, 60) == pytest.approx(59)
    assert unsettled_seconds(entries, asked + 60, 60) == pytest.approx(0, abs=1e-3)


def test_one_limit_holds_from_the_answer_to_the_last_node_that_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait_minutes` was counted twice: until the nodes ran, and again until they answered."""
    now = [0.0]
    for module in (renting, waiting):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(waiting, "probe", lambda *_: "pending")
    node = Node(id="i-1", region="us-east-1", zone=None, market="spot", state="pending", public_address="192.0.2.1")
    booted = node.model_copy(update={"state": "running"})
    cloud = SimpleNamespace(
        name="aws",
        default_user="ubuntu",
        prepare=lambda *_: None,
        create=lambda *_: [node],
        nodes=lambda *_: [booted if now[0] >= 400 else node],
        destroy=lambda *_: None,
        resources=lambda *_: [],
    )
    limits = Limits(ready_seconds=600, sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    lease = RentalLease(study="s", run="r", owner="me", expires_at=int(time.time()) + 7200, request=REQUEST)
    monkeypatch.setattr(renting, "give_back", lambda *_: 0)
    with open_ledger(tmp_path / "r") as ledger, pytest.raises(RentalFailed, match="not finished after 600 s"):
        make_keys(tmp_path / "r")
        climb = _Renting(cast(Provider, cloud), lease, tmp_path / "r", ledger, lambda _: None, limits, 1)
        climb.climb(ladder(REQUEST, {})[:1])
    assert 600 < now[0] < 620


def test_a_ledger_has_one_writer_and_its_run_is_alive_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with open_ledger(folder) as ledger:
        ledger.write("opened")
        assert not is_dead(folder)
        with pytest.raises(ValueError, match="another command"), open_ledger(folder):
            pass
    assert is_dead(folder)
    with open_ledger(folder) as ledger:
        ledger.write("ready", nodes=[])
    assert not is_dead(folder)


@pytest.mark.parametrize("last", ["opened", "ready"])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """The message was `No locks available` alone; that its run is alive, or has ended, is not known there."""
    folder = tmp_path / "r"
    with in_use(folder), open_ledger(folder) as ledger:
        ledger.write("opened")
        ledger.write(last, nodes=[])

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    told = f"^{re.escape(str(folder))}: this file system has no locks .* set RANKWISE_DATA to a folder of another one"
    for opened in (open_ledger, in_use):
        with pytest.raises(ValueError, match=told), opened(folder):
            pass
    with pytest.raises(ValueError, match=told):
        is_dead(folder)
    assert not_given_back(tmp_path) == {}
    resource = Resource(provider="aws", kind="disk", id="v", region="us-east-1", run="r", expires_at=1000)
    with pytest.raises(ValueError, match=told):
        why_doomed(resource, tmp_path, False, now=100)


@pytest.mark.parametrize(
    ("expires_at", "run", "everything", "doomed"),
    [
        (10, "r", False, True),
        (1000, "r", False, False),
        (1000, "r", True, True),
        (None, "r", False, False),
        (10, "../elsewhere", False, False),
        (10, "..", False, False),
        (10, "", True, False),
    ],
)
def test_what_is_reaped(tmp_path: Path, expires_at: int | None, run: str, everything: bool, doomed: bool) -> None:
    resource = Resource(provider="aws", kind="disk", id="v", region="us-east-1", run=run, expires_at=expires_at)
    assert (why_doomed(resource, tmp_path, everything, now=100) is not None) is doomed


def test_nodes_of_a_study_that_ended_without_them_are_reaped(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with in_use(folder):
        with open_ledger(folder) as ledger:
            ledger.write("ready", nodes=[])
        assert not is_dead(folder)
        with pytest.raises(ValueError, match="another run"), in_use(folder):
            pass
    assert is_dead(folder)


@pytest.mark.parametrize("opened", [open_ledger, in_use])
def test_who_only_looks_keeps_no_command_from_a_rental(
    opened: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    """`rankwise deployments` or `reap` in a loop ended others with `another command is at work on it`."""
    with opened(tmp_path):
        pass
    [file] = tmp_path.iterdir()
    looking = file.open()
    fcntl.flock(looking, fcntl.LOCK_SH)
    timer = threading.Timer(0.05, looking.close)
    timer.start()
    with opened(tmp_path):
        pass
    timer.join()


def test_the_story_of_a_rental_is_told_over_all_its_runs() -> None:
    """Refused, then rented by a run that was killed, then given back by the next one, whose nodes are up now."""
    ask = {"event": "create", "region": "us-east-1", "market": "spot", "usd_per_hour": 2.0}
    entries = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        ask | {"epoch": 1, "zone": "a"},
        {"event": "refused", "epoch": 2},
        {"event": "no_nodes", "epoch": 2, "problem": "capacity: none"},
        ask | {"epoch": 3, "zone": "b"},
        {"event": "created", "epoch": 10},
        {"event": "given_back", "epoch": 1810},
        {"event": "opened", "epoch": 1900, "expires_at": 5500},
        ask | {"epoch": 1901, "market": "on_demand"},
        {"event": "created", "epoch": 2000},
    ]
    refused, killed, up = attempts_of(entries, now=2900)
    assert (refused.problem, refused.usd(2)) == ("capacity: none", 0.0)
    assert (killed.problem, killed.seconds, killed.usd(2)) == (None, 1800, 2.0)
    assert (up.market, up.seconds, up.zone) == ("on_demand", 900, None)
    assert attempts_of(entries, now=90_000)[2].seconds == 3500, "the nodes ended by themselves with their lease"
    assert (killed.unused_seconds, up.unused_seconds) == (1800, 0), "killed before its nodes were ready"


def test_nodes_of_an_earlier_run_cost_what_so_many_of_them_cost() -> None:
    """The study asks for four nodes by now; its first run, which was killed, had two for an hour."""
    ask = {"event": "create", "region": "us-east-1", "market": "spot", "usd_per_hour": 2.0}
    entries = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        ask | {"epoch": 0},
        {"event": "created", "epoch": 0, "ids": ["i-1", "i-2"]},
        {"event": "given_back", "epoch": 3600},
        {"event": "opened", "epoch": 3600, "expires_at": 7200},
        ask | {"epoch": 3600},
        {"event": "created", "epoch": 3600, "ids": ["i-3", "i-4", "i-5", "i-6"]},
    ]
    rental = StudyRental(
        target="t", provider="aws", instance="x", nodes=4, name="r", attempts=attempts_of(entries, 7200)
    )
    assert [attempt.usd(rental.nodes) for attempt in rental.attempts] == [4.0, 8.0] and rental.usd == 12.0


def test_nodes_between_two_runs_are_counted_as_unused() -> None:
    """The second run took them over 300 s after the first was killed, the third 60 s after the second."""
    entries: list[dict[str, Any]] = [
        {"event": "create", "region": "r", "market": "spot", "usd_per_hour": 2.0, "epoch": 0},
        {"event": "created", "epoch": 10},
        {"event": "ready", "epoch": 40},
        {"event": "extended", "epoch": 500, "expires_at": 9000, "unused_seconds": 300},
        {"event": "extended", "epoch": 700, "expires_at": 9000, "unused_seconds": 0},
        {"event": "extended", "epoch": 900, "expires_at": 9000, "unused_seconds": 60},
        {"event": "given_back", "epoch": 1810},
    ]
    (attempt,) = attempts_of(entries, now=5000)
    assert (attempt.seconds, attempt.unused_seconds, attempt.unused_usd(2)) == (1800, 360, 0.4)


@pytest.mark.parametrize(
    ("end", "off", "unused"),
    [
        (2000, False, 1400),  # given back before their lease ended
        (90_000, False, 3000),  # the lease ended at 3600
        (90_000, True, 89_400),  # where a cloud charges for nodes that are off
    ],
)
def test_nodes_that_no_run_takes_over_are_unused_from_the_kill_to_their_end(end: int, off: bool, unused: int) -> None:
    """Their whole time was called used. A try that was in vain, and what an extension has counted, count once."""
    entries: list[dict[str, Any]] = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        {"event": "create", "region": "r", "market": "spot", "usd_per_hour": 2.0, "epoch": 0},
        {"event": "created", "epoch": 10},
        {"event": "ready", "epoch": 40},
        {"event": "abandoned", "epoch": end - 100, "last_used": 600.0},
        {"event": "left", "epoch": end - 50},
        {"event": "abandoned", "epoch": end, "last_used": 600.0},
        {"event": "given_back", "epoch": end + 30},
    ]
    (attempt,) = attempts_of(entries, end + 60, off)
    assert attempt.unused_seconds == unused and attempt.seconds >= unused
    entries[4:5] = [{"event": "extended", "epoch": 1000, "expires_at": 3600, "unused_seconds": 400.0}]
    assert attempts_of(entries, end + 60, off)[0].unused_seconds == unused


def test_a_rental_is_named_after_run_and_target() -> None:
    names = {rental_name("My study", Path(run), target) for run in ("/a", "/b") for target in ("x", "y")}
    assert len(names) == 4 and rental_name("My study", Path("/a"), "x") in names
    assert all(label(name) == name for name in names)


def test_a_target_may_be_named_without_a_letter_that_tags_take() -> None:
    """The study's own check takes such names, and renting for them ended with `name: got ...`."""
    names = {rental_name("study", Path("/a"), target) for target in ("模型", "узел", "--")}
    assert len(names) == 3 and all(label(name) == name and name.startswith("study-") for name in names)


def test_a_run_folder_that_is_reached_through_a_link_has_the_same_rental(tmp_path: Path) -> None:
    """Nodes that `keep` had left up stayed unused, and others were rented beside them."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    assert rental_name("s", tmp_path / "home" / "s", "x") == rental_name("s", tmp_path / "disk" / "s", "x")
    assert run_digest(tmp_path / "home" / "s") == run_digest(tmp_path / "disk" / "s") != run_digest(tmp_path / "s")


def test_a_user_whom_no_file_names_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert owner().startswith(f"uid-{os.getuid()}-")


def test_tags_name_study_run_owner_and_expiry() -> None:
    lease = RentalLease(study="s", run="r", owner="o", expires_at=7, request=REQUEST)
    assert sorted(lease.tags.values()) == ["7", "o", "r", "s"]


def test_user_data_plants_the_host_key_and_the_switch(tmp_path: Path) -> None:
    make_keys(tmp_path)
    assert os.stat(tmp_path / "id_ed25519").st_mode & 0o077 == 0
    boot = user_data(tmp_path, 3600)
    config = json.loads(boot.removeprefix("#cloud-config\n"))
    assert config["ssh_keys"]["ed25519_private"] == (tmp_path / "host_ed25519").read_text()
    secret = "".join((tmp_path / "id_ed25519").read_text().splitlines()[1:-1])
    # The login key stays here. Its lines do not stand together in JSON.
    assert len(secret) > 100 and secret not in boot.replace("\\n", "")
    files = {file["path"]: file["content"] for file in config["write_files"]}
    assert files["/var/lib/rankwise/remaining_seconds"] == "3600\n"
    assert len(boot) < 16384  # EC2's limit
    remove_keys(tmp_path)
    assert not (tmp_path / "id_ed25519").exists()


@pytest.mark.parametrize("name", ["my data", "100%", "50 %done", "a"])
def test_keys_are_found_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    """OpenSSH splits an option at blanks and replaces what follows a %: no node of such a data folder was reached."""
    folder = tmp_path / name
    folder.mkdir()
    _, *argv = ssh_argv(folder, "ubuntu", "198.51.100.7")
    done = subprocess.run(["ssh", "-G", *argv], capture_output=True, text=True)
    found = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert found["userknownhostsfile"] == f"{folder}/known_hosts"
    assert found["identityfile"].replace("%%", "%") == f"{folder}/id_ed25519"  # replaced when it is opened


def test_why_no_keys_could_be_made_is_told_in_a_sentence(tmp_path: Path) -> None:
    """As `No user exists for uid 4242` in a container whose user no file names: it was a traceback."""
    with pytest.raises(ValueError, match=r"^ssh-keygen: .*No such file or directory\. Nothing was rented$"):
        make_keys(tmp_path / "missing")


def test_other_clouds_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="oracle: nodes cannot be rented there"):
        provider_named("oracle")  # type: ignore[arg-type]
