"""EC2 for tests: moto's server over HTTP behind a proxy that provokes what moto cannot, with real machines behind.

    with FakeAws(tmp_path) as aws:                 # AWS_ENDPOINT_URL and credentials are set meanwhile
        aws.faults.append(Fault("RunInstances", code="InsufficientInstanceCapacity", zone="us-east-1a"))
        aws.left()                                 # everything in all regions that is not terminated

The proxy makes ClientToken idempotent, keeps placement groups and image parameters, refuses to delete a security group
in use, and can refuse, delay and lose answers. boto3 is unmodified.
"""

import base64
import hashlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from tasks.providers.readiness.node_gpus import gpus_of_instance
from tests.support.clouds.faults import Answer, Call, FaultyCloud
from tests.support.patience import patient

_STATUS = {"InsufficientInstanceCapacity": 500, "RequestLimitExceeded": 503, "InternalError": 500, "Unavailable": 503}
REGIONS = ("us-east-1", "us-west-2", "eu-west-1")
"""Those that the account has enabled."""
_TAG = re.compile(r"TagSpecification\.1\.Tag\.(\d+)\.Key")


class FakeAws(FaultyCloud):
    """The server, the proxy, and the machines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._placements: dict[tuple[str, str], dict[str, str]] = {}
        self._tokens: dict[str, tuple[dict[str, str], bytes]] = {}
        self._group_of: dict[str, str] = {}
        self._region_of: dict[str, str] = {}
        self._ended: dict[str, float] = {}
        self._clients: dict[tuple[str, str], Any] = {}
        self._creating = threading.Lock()

    def __enter__(self) -> "FakeAws":
        self.hosts.__enter__()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._moto_port = probe.getsockname()[1]
        command = [sys.executable, "-c", "import moto.server as s, sys; s.main(sys.argv[1:])"]
        log = (self.folder / "moto.log").open("w")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        clean |= {"AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto"}
        self._moto = subprocess.Popen(
            [*command, "-H", "127.0.0.1", "-p", str(self._moto_port)], stdout=log, stderr=log, env=clean
        )
        log.close()
        self._wait_for_moto()
        endpoint = self.serve()
        threading.Thread(target=self._watch_power, daemon=True).start()
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY0001",
            "AWS_SECRET_ACCESS_KEY": "canary-of-the-secret-access-key-0001",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }
        self.secrets = [environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]]
        self.point_here(environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_serving()
        self.hosts.__exit__(kind, error, trace)
        self._moto.kill()
        self._moto.wait()

    def _wait_for_moto(self) -> None:
        deadline = time.monotonic() + patient(60)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._moto_port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and self._moto.poll() is None, "moto does not start"
                time.sleep(0.1)

    def _watch_power(self) -> None:
        """A machine that powers itself off is terminated, as InstanceInitiatedShutdownBehavior says."""
        while self._moto.poll() is None:
            for name in self.hosts.powered_off():
                self.hosts.stop(name)
                self.client("ec2", self._region_of[name]).terminate_instances(InstanceIds=[name])
                self._ended[name] = time.monotonic()
            time.sleep(0.2)

    def client(self, service: str, region: str) -> Any:
        """A boto3 client that talks to moto itself, past all faults."""
        import boto3  # type: ignore[import-untyped]

        if (service, region) in self._clients:
            return self._clients[service, region]
        keys = {"aws_access_key_id": "moto", "aws_secret_access_key": "moto"}
        self._clients[service, region] = boto3.client(
            service, region_name=region, endpoint_url=f"http://127.0.0.1:{self._moto_port}", **keys
        )
        return self._clients[service, region]

    def left(self) -> list[str]:
        """Everything with our tags in all regions, asked of moto itself, and the machines that run."""
        found = [f"machine {name}" for name in self.hosts.running()]
        found += [f"placement group {name} in {region}" for region, name in self._placements]
        wanted = [{"Name": "tag-key", "Values": ["rankwise-run"]}]
        for region in REGIONS:
            ec2 = self.client("ec2", region)
            for reservation in ec2.describe_instances(Filters=wanted)["Reservations"]:
                found += [
                    each["InstanceId"] for each in reservation["Instances"] if each["State"]["Name"] != "terminated"
                ]
            found += [each["VolumeId"] for each in ec2.describe_volumes(Filters=wanted)["Volumes"]]
            found += [each["GroupId"] for each in ec2.describe_security_groups(Filters=wanted)["SecurityGroups"]]
            found += [each["AllocationId"] for each in ec2.describe_addresses(Filters=wanted)["Addresses"]]
            found += [each["KeyPairId"] for each in ec2.describe_key_pairs(Filters=wanted)["KeyPairs"]]
            nics = ec2.describe_network_interfaces(Filters=wanted)["NetworkInterfaces"]
            found += [each["NetworkInterfaceId"] for each in nics]
        return found

    def orphan(self, labels: dict[str, str]) -> None:
        """Leave a disk and an address of a run behind."""
        tags = [{"Key": key, "Value": value} for key, value in labels.items()]
        ec2, named = self.client("ec2", "eu-west-1"), "TagSpecifications"
        ec2.create_volume(AvailabilityZone="eu-west-1a", Size=8, **{named: [{"ResourceType": "volume", "Tags": tags}]})
        ec2.allocate_address(Domain="vpc", **{named: [{"ResourceType": "elastic-ip", "Tags": tags}]})

    def _forward(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._moto_port, timeout=600)
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() == "content-type"}
        connection.close()
        return answer.status, kept, data

    def describe(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Call:
        """Action and place of a request."""
        call = {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/", headers.get("Authorization", ""))
        market = call.get("InstanceMarketOptions.MarketType", "on_demand")
        zone = call.get("Placement.AvailabilityZone")
        return Call(call.get("Action", ""), scope[1] if scope else "", zone, market, json.dumps(call))

    def refuse(self, code: str) -> Answer:
        """Refuse as EC2 does."""
        return _refusal(code, _STATUS.get(code, 400))

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """What the cloud does, faults aside."""
        scope = re.search(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/", headers.get("Authorization", ""))
        region = scope[1] if scope else "us-east-1"
        if headers.get("X-Amz-Target", "").endswith("GetParameter"):
            image = self.client("ec2", region).describe_images()["Images"][0]["ImageId"]
            return (
                200,
                {"Content-Type": "application/x-amz-json-1.1"},
                json.dumps({"Parameter": {"Value": image}}).encode(),
            )
        call = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        action = call.get("Action", "")
        if action == "RunInstances":
            with self._creating:
                return self._run(region, call, lambda: self._forward(path, headers, body))
        if action == "DescribeRegions":
            items = "".join(f"<item><regionName>{name}</regionName></item>" for name in REGIONS)
            return _xml(action, f"<regionInfo>{items}</regionInfo>")
        if "PlacementGroup" in action:
            return self._placement(action, region, call)
        if action == "CreateTags" and call["ResourceId.1"].startswith("pg-"):
            [group] = [
                name for name in self._placements if name[0] == region and _group_id(name[1]) == call["ResourceId.1"]
            ]
            self._placements[group][call["Tag.1.Key"]] = call["Tag.1.Value"]
            return _xml(action, "<return>true</return>")
        if action == "DeleteSecurityGroup":
            users = [name for name, group in self._group_of.items() if group == call["GroupId"]]
            if any(time.monotonic() < self._ended.get(name, float("inf")) for name in users):
                return _refusal("DependencyViolation", 400)
        status, kept, data = self._forward(path, headers, body)
        if action == "TerminateInstances" and status == 200:
            for name in re.findall(r"<instanceId>(i-\w+)</instanceId>", data.decode()):
                self._ended.setdefault(name, time.monotonic() + self.shutdown_seconds)
                self.hosts.stop(name)
        return status, kept, data

    def _run(self, region: str, call: dict[str, str], forward: Callable[[], Answer]) -> Answer:
        """RunInstances, once for each token; then the machines boot."""
        token = call.get("ClientToken", "")
        if token in self._tokens:
            earlier, data = self._tokens[token]
            return (
                (200, {"Content-Type": "text/xml"}, data)
                if earlier == call
                else _refusal("IdempotentParameterMismatch", 400)
            )
        status, kept, data = forward()
        if status == 200:
            self._tokens[token] = (call, data)
            user_data = base64.b64decode(call.get("UserData", "")).decode()
            for name in dict.fromkeys(re.findall(r"<instanceId>(i-\w+)</instanceId>", data.decode())):
                self._region_of[name] = region
                self._group_of[name] = call.get("NetworkInterface.1.SecurityGroupId.1", "")
                described = self.client("ec2", region).describe_instances(InstanceIds=[name])
                machine = described["Reservations"][0]["Instances"][0]
                addresses = [machine.get("PrivateIpAddress"), machine.get("PublicIpAddress")]
                gpus = gpus_of_instance("aws", machine["InstanceType"])
                self.hosts.start(name, [address for address in addresses if address], user_data, gpus)
                if name in self._ended:  # terminated before it had booted
                    self.hosts.stop(name)
        return status, kept, data

    def _placement(self, action: str, region: str, call: dict[str, str]) -> Answer:
        name = call.get("GroupName", call.get("GroupName.1", ""))
        if action == "CreatePlacementGroup":
            if (region, name) in self._placements:
                return _refusal("InvalidPlacementGroup.Duplicate", 400)
            numbers = [match[1] for match in map(_TAG.fullmatch, call) if match]
            prefix = "TagSpecification.1.Tag."
            self._placements[region, name] = {call[f"{prefix}{n}.Key"]: call[f"{prefix}{n}.Value"] for n in numbers}
        elif action == "DeletePlacementGroup" and self._placements.pop((region, name), None) is None:
            return _refusal("InvalidPlacementGroup.Unknown", 400)
        items = ""
        if action == "DescribePlacementGroups":
            asked, value = call["Filter.1.Name"], call["Filter.1.Value.1"]
            for (place, group), tags in self._placements.items():
                fits = value in tags if asked == "tag-key" else tags.get(asked.removeprefix("tag:")) == value
                if place == region and fits:
                    pairs = [f"<key>{escape(key)}</key><value>{escape(each)}</value>" for key, each in tags.items()]
                    written = "".join(f"<item>{pair}</item>" for pair in pairs)
                    named = (
                        f"<groupName>{group}</groupName><groupId>{_group_id(group)}</groupId><state>available</state>"
                    )
                    items += f"<item>{named}<tagSet>{written}</tagSet></item>"
            items = f"<placementGroupSet>{items}</placementGroupSet>"
        return _xml(action, items + "<return>true</return>")


def _group_id(name: str) -> str:
    return f"pg-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _xml(action: str, content: str) -> Answer:
    text = f'<{action}Response xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">{content}</{action}Response>'
    return 200, {"Content-Type": "text/xml"}, text.encode()


def _refusal(code: str, status: int) -> Answer:
    error = f"<Error><Code>{code}</Code><Message>refused by the test: {code}</Message></Error>"
    text = f"<Response><Errors>{error}</Errors><RequestID>test</RequestID></Response>"
    return status, {"Content-Type": "text/xml"}, text.encode()
