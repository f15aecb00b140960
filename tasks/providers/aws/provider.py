"""AWS EC2 by boto3. Credentials, region and endpoints come from boto3's own chain (AWS_ENDPOINT_URL included).

What a run makes in a region: instances with their root volumes and interfaces (deleted with them), one security group,
and a cluster placement group for several nodes. No key pair: the login key travels in the user data.

Sources: https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html (tokens),
https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html (what is not known everywhere at once).
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import boto3  # type: ignore[import-untyped]
import botocore.exceptions as failures  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

from configs.hardware.catalog import HOME_REGIONS
from configs.hardware.node_names import Cloud
from tasks.providers.aws.errors import call_aws
from tasks.providers.rental import (
    TAG_EXPIRES,
    TAG_OWNER,
    TAG_RUN,
    TAG_STUDY,
    Node,
    ProviderError,
    RentalLease,
    RentalRequest,
    Resource,
    ResourceKind,
    Rung,
)

_GPU_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
_CPU_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"
"""Public parameters of the AWS Deep Learning AMI and of Ubuntu; both have cloud-init and the user `ubuntu`."""
_IMAGE_OWNERS = ("self", "amazon", "aws-marketplace")
"""Whose images may be named: anybody can publish one under any name, and the newest of a name is taken."""
_STATES: dict[str, Literal["pending", "running", "stopping", "gone"]] = {
    "pending": "pending",
    "running": "running",
    "shutting-down": "stopping",
    "stopping": "stopping",
    "stopped": "stopping",
    "terminated": "gone",
}
_ONCE = Config(retries={"mode": "standard", "total_max_attempts": 1}, connect_timeout=10, read_timeout=60)
"""No retries inside boto3: each one must be a line of the ledger, and no capacity in a zone must be heard at once."""


class Aws:
    """EC2 of all regions, one client for each."""

    name: Cloud = "aws"
    default_user = "ubuntu"

    def __init__(self) -> None:
        try:
            self._session = boto3.Session()
        except failures.BotoCoreError as error:
            raise ValueError(f"aws: {error}. Check AWS_PROFILE and the files in ~/.aws") from error
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()  # a session of boto3 makes one client at a time

    def identity(self) -> str:
        """Return the account and the principal."""
        region = self._session.region_name or HOME_REGIONS["aws"]
        answer = call_aws(lambda: self._session.client("sts", region_name=region, config=_ONCE).get_caller_identity())
        return f"account {answer['Account']}"

    def regions(self) -> list[str]:
        """Return the regions that the account has enabled."""
        home = self._ec2(self._session.region_name or HOME_REGIONS["aws"])
        return sorted(entry["RegionName"] for entry in call_aws(home.describe_regions)["Regions"])

    def zones(self, instance: str, region: str) -> list[str]:
        """Return the zones of a region that offer the instance."""
        wanted = [{"Name": "instance-type", "Values": [instance]}]
        offers = call_aws(
            lambda: self._ec2(region).describe_instance_type_offerings(LocationType="availability-zone", Filters=wanted)
        )["InstanceTypeOfferings"]
        return sorted(offer["Location"] for offer in offers)

    def prepare(self, lease: RentalLease, region: str) -> None:
        """Make the security group, and the placement group of several nodes."""
        ec2 = self._ec2(region)
        if self._group(lease, region) is None:
            vpc = self._vpc(lease.request, region)
            made = {"GroupName": lease.name, "Description": f"Rankwise study {lease.study}", "VpcId": vpc}
            _unless("InvalidGroup.Duplicate", lambda: ec2.create_security_group(**made, **_specify(lease, _GROUP)))
        group = self._visible_group(lease, region)
        inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
        ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": lease.request.ssh_from}]}
        for rule in (inside, ssh):
            rules = {"GroupId": group, "IpPermissions": [rule]}
            _unless("InvalidPermission.Duplicate", partial(ec2.authorize_security_group_ingress, **rules))
        if lease.request.close_together:
            made = {"GroupName": lease.name, "Strategy": "cluster"}
            _unless("InvalidPlacementGroup.Duplicate", lambda: ec2.create_placement_group(
                **made, **_specify(lease, ["placement-group"])))  # fmt: skip

    def create(self, lease: RentalLease, user_data: str, rung: Rung, token: str) -> list[Node]:
        """Create all nodes or none: MinCount and MaxCount are the same."""
        request, ec2 = lease.request, self._ec2(rung.region)
        group = self._visible_group(lease, rung.region)
        if request.subnet is not None and rung.zone is not None:
            own = self._subnet(request.subnet, rung.region)["AvailabilityZone"]
            if own != rung.zone:  # EC2 calls that a wrong parameter, which would end renting
                raise ProviderError("capacity", "", f"{request.subnet} is in {own}")
        id = self._image(request, rung.region)
        images = call_aws(lambda: ec2.describe_images(ImageIds=[id]))["Images"]
        if not images:
            raise ProviderError("invalid", "", f"{rung.region}: no image {id}, or this account may not use it")
        interface: dict[str, Any] = {
            "DeviceIndex": 0,
            "AssociatePublicIpAddress": request.public_address,
            "DeleteOnTermination": True,
            "Groups": [group],
        }
        if request.subnet is not None:
            interface["SubnetId"] = request.subnet
        place: dict[str, Any] = {} if rung.zone is None else {"AvailabilityZone": rung.zone}
        if request.close_together:
            place["GroupName"] = lease.name
        disk = {"VolumeSize": request.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
        wanted: dict[str, Any] = {
            "ImageId": images[0]["ImageId"],
            "InstanceType": request.instance,
            "MinCount": request.nodes,
            "MaxCount": request.nodes,
            "ClientToken": token,
            "UserData": user_data,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "NetworkInterfaces": [interface],
            "BlockDeviceMappings": [{"DeviceName": images[0].get("RootDeviceName") or "/dev/sda1", "Ebs": disk}],
            "MetadataOptions": {"HttpTokens": "required"},
            **_specify(lease, ["instance", "volume", "network-interface"]),
        }
        if place:
            wanted["Placement"] = place
        if rung.market == "spot":
            once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            wanted["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": once}
        if request.profile is not None:
            wanted["IamInstanceProfile"] = {"Name": request.profile}
        made = call_aws(lambda: ec2.run_instances(**wanted))["Instances"]
        return [_node(entry, rung.region) for entry in made]

    def nodes(self, run: str, region: str) -> list[Node]:
        """Describe the instances of a run; EC2 shows terminated ones for about an hour."""
        return [_node(entry, region) for entry in self._instances(region, run)]

    def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
        """List instances, volumes, interfaces, addresses, security and placement groups and key pairs."""
        return [resource for region in regions for resource in self._tagged(region, run)]

    def _tagged(self, region: str, run: str | None) -> Iterator[Resource]:
        ec2 = self._ec2(region)
        for entry in self._instances(region, run):
            state = entry["State"]["Name"]
            if state != "terminated":
                place = {"region": region, "zone": entry["Placement"].get("AvailabilityZone")}
                yield _resource("instance", entry["InstanceId"], entry, f"{entry['InstanceType']} {state}", **place)
        for kind, operation, many, key in _KINDS:
            answer = _pages(ec2, operation, [_filter(run)])
            for page in answer:
                for entry in page[many]:
                    if entry.get("State") not in ("deleting", "deleted"):
                        size = f"{entry['Size']} GiB" if kind == "disk" else ""
                        yield _resource(kind, entry[key], entry, size, region=region)

    def delete(self, resource: Resource) -> None:
        """Terminate or delete one resource."""
        ec2 = self._ec2(resource.region)
        calls: dict[ResourceKind, Callable[[], Any]] = {
            "instance": lambda: ec2.terminate_instances(InstanceIds=[resource.id]),
            "disk": lambda: ec2.delete_volume(VolumeId=resource.id),
            "nic": lambda: ec2.delete_network_interface(NetworkInterfaceId=resource.id),
            "address": lambda: ec2.release_address(AllocationId=resource.id),
            "security_group": lambda: ec2.delete_security_group(GroupId=resource.id),
            "placement": lambda: ec2.delete_placement_group(GroupName=resource.id),
            "key": lambda: ec2.delete_key_pair(KeyPairId=resource.id),
        }
        try:
            call_aws(calls[resource.kind])
        except ProviderError as error:
            if not re.search(r"\.(NotFound|Unknown)$|NotFound$", error.code):
                raise

    def extend(self, resource: Resource, expires_at: int) -> None:
        """Write a later expiry to the tags."""
        tags = [{"Key": TAG_EXPIRES, "Value": str(expires_at)}]
        ec2, ids = self._ec2(resource.region), [resource.id]
        if resource.kind == "placement":  # its id is its name, which create_tags does not take
            groups = call_aws(lambda: ec2.describe_placement_groups(Filters=[_filter(resource.run)]))["PlacementGroups"]
            ids = [each["GroupId"] for each in groups if each["GroupName"] == resource.id and "GroupId" in each]
        if ids:
            call_aws(lambda: ec2.create_tags(Resources=ids, Tags=tags))

    def _ec2(self, region: str) -> Any:
        with self._making:
            if region not in self._clients:
                self._clients[region] = call_aws(lambda: self._session.client("ec2", region_name=region, config=_ONCE))
            return self._clients[region]

    def _instances(self, region: str, run: str | None) -> Iterator[dict[str, Any]]:
        for page in _pages(self._ec2(region), "describe_instances", [_filter(run)]):
            for reservation in page["Reservations"]:
                yield from reservation["Instances"]

    def _group(self, lease: RentalLease, region: str) -> str | None:
        filters = [_filter(lease.run), {"Name": "group-name", "Values": [lease.name]}]
        found = call_aws(lambda: self._ec2(region).describe_security_groups(Filters=filters))["SecurityGroups"]
        return str(found[0]["GroupId"]) if found else None

    def _visible_group(self, lease: RentalLease, region: str) -> str:
        """Return the group that was made. Problem `transient`: it is not known yet where this call was answered."""
        group = self._group(lease, region)
        if group is None:
            raise ProviderError("transient", "", f"security group {lease.name} is not visible yet in {region}")
        return group

    def _vpc(self, request: RentalRequest, region: str) -> str:
        """Return the VPC of the request by id or by its tag Name, that of its subnet, or the default one."""
        ec2 = self._ec2(region)
        if request.subnet is not None:
            return str(self._subnet(request.subnet, region)["VpcId"])
        if request.network is None:
            wanted = {"Name": "is-default", "Values": ["true"]}
        elif request.network.startswith("vpc-"):
            wanted = {"Name": "vpc-id", "Values": [request.network]}
        else:
            wanted = {"Name": "tag:Name", "Values": [request.network]}
        found = call_aws(lambda: ec2.describe_vpcs(Filters=[wanted]))["Vpcs"]
        if len(found) != 1:
            what = request.network or "default VPC"
            told = f"{region}: {what}: {len(found)} VPCs found, expected 1. Name one by `network`"
            raise ProviderError("invalid", "", told)
        if request.network is not None and not found[0].get("IsDefault"):
            # Instances without a subnet go to the default VPC, where this one's security group is refused.
            needs = "is not the default VPC, so that a subnet of it is needed. Name one by `subnet`"
            raise ProviderError("invalid", "", f"{region}: {request.network} {needs}")
        return str(found[0]["VpcId"])

    def _subnet(self, id: str, region: str) -> dict[str, Any]:
        return dict(call_aws(lambda: self._ec2(region).describe_subnets(SubnetIds=[id]))["Subnets"][0])

    def _image(self, request: RentalRequest, region: str) -> str:
        """Return the image of the request by id or name, or the vendor's current one."""
        if request.image is not None and request.image.startswith("ami-"):
            return request.image
        if request.image is not None:
            wanted = [{"Name": "name", "Values": [request.image]}]
            owned = {"Filters": wanted, "Owners": list(_IMAGE_OWNERS)}
            found = call_aws(lambda: self._ec2(region).describe_images(**owned))["Images"]
            if not found:
                whose = "of this account, of Amazon's verified publishers or of its marketplace"
                raise ProviderError(
                    "invalid", "", f"{region}: no image named {request.image!r} {whose}. Name another one by its id"
                )
            return str(max(found, key=lambda image: image.get("CreationDate", ""))["ImageId"])
        parameter = _GPU_IMAGE if request.has_gpu else _CPU_IMAGE
        with self._making:
            ssm = call_aws(lambda: self._session.client("ssm", region_name=region, config=_ONCE))
        return str(call_aws(lambda: ssm.get_parameter(Name=parameter))["Parameter"]["Value"])


_GROUP = ["security-group"]
_KINDS: tuple[tuple[ResourceKind, str, str, str], ...] = (
    ("disk", "describe_volumes", "Volumes", "VolumeId"),
    ("nic", "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"),
    ("address", "describe_addresses", "Addresses", "AllocationId"),
    ("security_group", "describe_security_groups", "SecurityGroups", "GroupId"),
    ("placement", "describe_placement_groups", "PlacementGroups", "GroupName"),
    ("key", "describe_key_pairs", "KeyPairs", "KeyPairId"),
)


def _specify(lease: RentalLease, kinds: Sequence[str]) -> dict[str, Any]:
    tags = [{"Key": key, "Value": value} for key, value in lease.tags.items()]
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds]}


def _filter(run: str | None) -> dict[str, Any]:
    if run is None:
        return {"Name": "tag-key", "Values": [TAG_RUN]}
    return {"Name": f"tag:{TAG_RUN}", "Values": [run]}


def _pages(ec2: Any, operation: str, filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if ec2.can_paginate(operation):
        return list(call_aws(lambda: list(ec2.get_paginator(operation).paginate(Filters=filters))))
    return [call_aws(lambda: getattr(ec2, operation)(Filters=filters))]


def _node(entry: dict[str, Any], region: str) -> Node:
    state = _STATES[entry["State"]["Name"]]
    return Node(
        id=entry["InstanceId"],
        region=region,
        zone=entry.get("Placement", {}).get("AvailabilityZone"),
        state=state,
        private_address=entry.get("PrivateIpAddress") or None,
        public_address=entry.get("PublicIpAddress") or None,
        market="spot" if entry.get("InstanceLifecycle") == "spot" else "on_demand",
        # Such as a limit of volumes, or a key of encryption that may not be used: these end an instance at its launch.
        reason="" if state in ("pending", "running") else str(entry.get("StateReason", {}).get("Message", "")),
    )


def _resource(
    kind: ResourceKind, id: str, entry: dict[str, Any], detail: str, region: str, zone: str | None = None
) -> Resource:
    """Make a resource of what a describe call returned."""
    tags = {tag["Key"]: tag["Value"] for tag in entry.get("Tags") or entry.get("TagSet") or []}
    expires = tags.get(TAG_EXPIRES, "")
    return Resource(
        provider="aws",
        kind=kind,
        id=id,
        region=region,
        zone=zone,
        study=tags.get(TAG_STUDY, ""),
        run=tags.get(TAG_RUN, ""),
        owner=tags.get(TAG_OWNER, ""),
        expires_at=int(expires) if expires.isdecimal() else None,
        detail=detail,
    )


def _unless(code: str, call: Callable[[], Any]) -> None:
    """Make a call whose effect may be there already."""
    try:
        call_aws(call)
    except ProviderError as error:
        if error.code != code:
            raise
