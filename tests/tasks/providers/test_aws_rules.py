"""What is asked of EC2 and what its refusals mean, without a server."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import (  # type: ignore[import-untyped]
    ClientError,
    CredentialRetrievalError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from tasks.providers.aws.errors import call_aws
from tasks.providers.aws.provider import Aws, _node
from tasks.providers.clouds import provider_named
from tasks.providers.ladder import is_excluded, ladder
from tasks.providers.readiness.waiting import NodeWaiting
from tasks.providers.rental import ProviderError, RentalLease, Rung
from tests.support.clouds.stand_in import REGION, SPOT_REQUEST, ZONES, resource

ROOT = Path(__file__).parents[3]


def test_a_placement_group_is_extended_by_its_id() -> None:
    calls: list[Any] = []
    groups = [{"GroupName": "rankwise-r", "GroupId": "pg-1"}, {"GroupName": "other", "GroupId": "pg-2"}]
    ec2 = SimpleNamespace(
        describe_placement_groups=lambda Filters: {"PlacementGroups": groups},
        create_tags=lambda Resources, Tags: calls.append((Resources, Tags[0]["Value"])),
    )
    aws = Aws()
    aws._clients[REGION] = ec2
    aws.extend(resource("placement").model_copy(update={"id": "rankwise-r"}), 77)
    assert calls == [(["pg-1"], "77")]


def test_clients_of_many_regions_are_made_one_at_a_time() -> None:
    """`reap` asks eight regions at once, and a session of boto3 may not be used by two threads."""
    making, met = threading.Lock(), list[str]()

    def client(name: str, **_: Any) -> object:
        assert making.acquire(blocking=False), "two at once"
        time.sleep(0.02)
        met.append(name)
        making.release()
        return object()

    aws = Aws()
    aws._session = SimpleNamespace(client=client)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(aws._ec2, ["a", "b", "c", "d", "a"]))
    assert met == ["ec2"] * 4


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nosuch")
    with pytest.raises(ValueError, match=r"aws: .*nosuch.*AWS_PROFILE"):
        provider_named("aws")


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
    lease = RentalLease(study="s", run="r", owner="o", expires_at=1, request=SPOT_REQUEST)
    with pytest.raises(ProviderError, match="rankwise-r is not visible yet in us-east-1") as caught:
        Aws.create(object.__new__(Aws), lease, "", Rung(region="us-east-1"), "token")
    assert caught.value.problem == "transient"


def test_an_image_of_a_strangers_is_not_taken_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can publish an image under any name, and the newest one is taken."""
    images = {
        "self": {"ImageId": "ami-own", "CreationDate": "2026-01-01"},
        "999999999999": {"ImageId": "ami-stranger", "CreationDate": "2026-11-01"},
    }

    def describe(Filters: Any, Owners: tuple[str, ...] = ()) -> Any:
        return {"Images": [image for owner, image in images.items() if not Owners or owner in Owners]}

    monkeypatch.setattr(Aws, "_ec2", lambda aws, region: SimpleNamespace(describe_images=describe))
    named = SPOT_REQUEST.model_copy(update={"image": "our-gpu-image"})
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
    aws, own = object.__new__(Aws), SPOT_REQUEST.model_copy(update={"network": "vpc-own"})
    with pytest.raises(
        ProviderError, match=r"^us-east-1: vpc-own is not the default VPC.*Name one by `subnet`$"
    ) as caught:
        aws._vpc(own, "us-east-1")
    assert caught.value.problem == "invalid"
    assert aws._vpc(own.model_copy(update={"subnet": "subnet-1"}), "us-east-1") == "vpc-own"
    assert aws._vpc(own.model_copy(update={"network": "vpc-default"}), "us-east-1") == "vpc-default"
    assert aws._vpc(SPOT_REQUEST, "us-east-1") == "vpc-default"


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
    request = SPOT_REQUEST.model_copy(update={"subnet": "subnet-1", "image": "ami-1"})
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
