"""Compute Engine for tests: a server of its REST calls that Rankwise uses, with real machines behind the instances.

    with FakeGcp(tmp_path) as gcp:                 # endpoint, project and credentials are set meanwhile
        gcp.faults.append(Fault("instances.bulkInsert", code="ZONE_RESOURCE_POOL_EXHAUSTED", zone="us-central1-a"))
        gcp.left()                                 # everything that is there

Google's client is unmodified: CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE names this server, and the credentials are a
service account's key, made here, with which the client signs its own tokens.

Operations take `operation_seconds`; capacity and quota are refused by the operation, not by the request, as Google
does. The same requestId is the same operation. Lists have pages of two entries.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tasks.providers.readiness.node_gpus import gpus_of_instance
from tests.support.clouds.faults import Answer, Call, FaultyCloud

PROJECT = "rankwise-tests"
REGIONS = ("us-central1", "us-west1", "europe-west4")
ZONES = {region: [f"{region}-{letter}" for letter in "abc"] for region in REGIONS}
_TYPES = ("n1-standard-4", "g2-standard-4")
_BY_OPERATION = {"ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "QUOTA_EXCEEDED", "half"}
"""`half`: no capacity after half of the instances have been made, and those are left."""
_STATUS = {"rateLimitExceeded": 403, "backendError": 503, "authError": 401, "forbidden": 403, "notFound": 404}
_PAGE = 2
_ROUTE = re.compile(
    r"/compute/v1/projects/(?P<project>[^/]+)"
    r"(?:/(?:zones/(?P<zone>[^/]+)|regions/(?P<region>[^/]+)|(?P<scope>global|aggregated)))?"
    r"(?:/(?P<kind>\w+)(?:/(?P<name>[\w-]+)(?:/(?P<verb>\w+))?)?)?"
)
_ITEM_VERBS = {"POST": "insert", "DELETE": "delete", "PATCH": "patch", "GET": "get"}
Key = tuple[str, str, str]


class FakeGcp(FaultyCloud):
    """The server, its resources by (kind, zone or region or `global`, name), and the machines."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.operation_seconds = 0.2
        self.resources: dict[Key, dict[str, Any]] = {}
        self._operations: dict[str, dict[str, Any]] = {}
        self._requests: dict[str, tuple[bytes, dict[str, Any]]] = {}
        self._lock = threading.RLock()
        self._count = 0
        self._on = True

    def __enter__(self) -> "FakeGcp":
        self.hosts.__enter__()
        endpoint = self.serve()
        threading.Thread(target=self._watch_power, daemon=True).start()
        key = self.folder / "key.json"
        self.secrets = [_write_key(key)]
        self.point_here(
            {
                "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{endpoint}/compute/v1/",
                "GOOGLE_APPLICATION_CREDENTIALS": str(key),
                "GOOGLE_CLOUD_PROJECT": PROJECT,
                "NO_GCE_CHECK": "true",
            }
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on = False
        self.stop_serving()
        self.hosts.__exit__(kind, error, trace)

    def left(self) -> list[str]:
        """Everything that is there, and the machines that run."""
        with self._lock:
            return [f"{kind} {name} in {place}" for kind, place, name in self.resources] + self.hosts.running()

    def orphan(self, labels: dict[str, str]) -> None:
        """Leave a disk and an address of a run behind."""
        with self._lock:
            self._make("disks", "europe-west4-a", {"name": "orphan-disk", "labels": labels, "sizeGb": "8"})
            self._make("addresses", "europe-west4", {"name": "orphan-address", "labels": labels})

    def describe(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Call:
        """Action, place and market of a request."""
        match = _ROUTE.fullmatch(urlsplit(path).path)
        assert match is not None, path
        verb, name, kind = match["verb"], match["name"], match["kind"] or "projects"
        if name == "bulkInsert":
            verb = name
        elif verb is None:
            verb = _ITEM_VERBS[method] if name or method == "POST" or kind == "projects" else "list"
        zone = match["zone"]
        region = match["region"] or (zone.rpartition("-")[0] if zone else "")
        market = "spot" if b'"SPOT"' in body else "on_demand"
        return Call(f"{kind}.{verb}", region, zone, market, f"{path} {body.decode()}")

    def refuse(self, code: str) -> Answer:
        """Refuse the request; codes of operations are kept for `_respond`."""
        status = _STATUS.get(code, 400)
        message = f"refused by the test: {code}"
        error = {
            "code": status,
            "message": message,
            "errors": [{"domain": "global", "reason": code, "message": message}],
        }
        return _json({"error": error}, status)

    def _respond(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        call = self.describe(method, path, headers, body)
        if call.action == "instances.bulkInsert":
            fault = next((each for each in self.faults if each.code in _BY_OPERATION and each.takes(call)), None)
            if fault is not None:
                self.calls.append(call)
                return self._refuse_by_operation(str(fault.code), path, body)
        return super()._respond(method, path, headers, body)

    def _refuse_by_operation(self, code: str, path: str, body: bytes) -> Answer:
        url = urlsplit(path)
        match = _ROUTE.fullmatch(url.path)
        assert match is not None
        place = match["zone"] or match["region"]
        with self._lock:
            if code == "half":
                code, wanted = "ZONE_RESOURCE_POOL_EXHAUSTED", json.loads(body)
                names = sorted(wanted["perInstanceProperties"])[: int(wanted["count"]) // 2]
                zone = match["zone"] or ZONES[place][0]
                boots = [self._instance(name, zone, wanted["instanceProperties"]) for name in names]
                for boot in boots:
                    threading.Thread(target=boot, daemon=True).start()
            request = parse_qs(url.query).get("requestId", [""])[0]
            if request not in self._requests:
                self._requests[request] = (body, self._operation(place, errors=[code]))
            return _json(self._requests[request][1])

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """What the cloud does, faults aside."""
        if not headers.get("authorization", "").startswith("Bearer ey"):
            return self.refuse("authError")
        url = urlsplit(path)
        match = _ROUTE.fullmatch(url.path)
        assert match is not None, path
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        kind, name, verb = match["kind"], match["name"], match["verb"]
        place = match["zone"] or match["region"] or match["scope"] or ""
        if kind == "operations":
            return self._wait(name)
        with self._lock:
            if kind is None and not place:
                return _json({"name": PROJECT})
            if match["scope"] == "aggregated":
                return self._aggregated(kind, query)
            if name == "bulkInsert":
                return self._bulk_insert(place, json.loads(body), body, query["requestId"])
            if method == "GET" and name is None:
                found = self._everything(url.path.rpartition("/")[2] if kind is None else kind)
                start = int(query.get("pageToken", 0))
                following = {"nextPageToken": str(start + _PAGE)} if start + _PAGE < len(found) else {}
                return _json({"items": [entry for _, entry in found[start : start + _PAGE]], **following})
            wanted = json.loads(body or b"{}")
            if method == "POST" and name is None:
                if (kind, place, wanted["name"]) in self.resources:
                    return self.refuse("alreadyExists")
                self._make(kind, place, wanted)
                return _json(self._operation(place))
            entry = self.resources.get((kind, place, name))
            if entry is None:
                return self.refuse("notFound")
            if method == "GET":
                return _json(entry)
            return self._change(method, (kind, place, name), entry, verb, wanted)

    def _change(self, method: str, key: Key, entry: dict[str, Any], verb: str | None, wanted: dict[str, Any]) -> Answer:
        kind, place, name = key
        if verb == "setLabels":
            if wanted["labelFingerprint"] != entry["labelFingerprint"]:
                return self.refuse("conditionNotMet")
            self._count += 1
            entry.update(labels=wanted["labels"], labelFingerprint=f"f{self._count}")
        elif method == "PATCH":
            entry.update(wanted)
        elif kind == "instances":
            self._end(name, place)
        elif kind == "resourcePolicies" and any(
            name in each.get("resourcePolicies", []) for each in self.resources.values()
        ):
            return self.refuse("resourceInUseByAnotherResource")
        else:
            del self.resources[key]
        return _json(self._operation(place))

    def _bulk_insert(self, place: str, wanted: dict[str, Any], body: bytes, request: str) -> Answer:
        """All instances in one zone, once for each requestId; they boot while the operation runs."""
        if request in self._requests:
            before, operation = self._requests[request]
            return _json(operation) if before == body else self.refuse("invalid")
        zone = place if place.count("-") > 1 else ZONES[place][0]
        assert wanted["count"] == wanted["minCount"] == str(len(wanted["perInstanceProperties"]))
        properties = wanted["instanceProperties"]
        assert properties["machineType"] in _TYPES and "/" not in properties["machineType"]
        for policy in properties.get("resourcePolicies", []):
            if ("resourcePolicies", zone.rpartition("-")[0], policy) not in self.resources:
                return self.refuse("invalid")
        boots = [self._instance(name, zone, properties) for name in wanted["perInstanceProperties"]]
        for boot in boots:
            threading.Thread(target=boot, daemon=True).start()
        operation = self._operation(place)
        self._requests[request] = (body, operation)
        return _json(operation)

    def _instance(self, name: str, zone: str, properties: dict[str, Any]) -> Callable[[], None]:
        """Make an instance with its disk; returns what boots it."""
        self._count += 1
        own = os.getpid() % 12000  # other processes have machines too, and Azure's are below 10.48
        private, public = f"10.{64 + own // 250}.{own % 250}.{self._count % 250 + 1}", None
        interface = dict(properties["networkInterfaces"][0], networkIP=private)
        if "accessConfigs" in interface:
            public = f"198.{18 + own % 2}.{own // 2 % 250}.{self._count % 250 + 1}"
            interface["accessConfigs"] = [dict(interface["accessConfigs"][0], natIP=public)]
        metadata = {item["key"]: item["value"] for item in properties["metadata"]["items"]}
        entry = {
            **properties,
            "name": name,
            "networkInterfaces": [interface],
            "status": "STAGING",
            "creationTimestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        self._make("instances", zone, entry)
        attached = [int(each["acceleratorCount"]) for each in properties.get("guestAccelerators", ())]
        gpus = sum(attached) or gpus_of_instance("gcp", properties["machineType"])
        disk = properties["disks"][0]["initializeParams"]
        self._make("disks", zone, {"name": name, "labels": disk["labels"], "sizeGb": disk["diskSizeGb"]})

        def boot() -> None:
            addresses = [address for address in (private, public) if address]
            self.hosts.start(name, addresses, metadata["startup-script"], gpus)
            with self._lock:
                if ("instances", zone, name) in self.resources:
                    self.resources["instances", zone, name]["status"] = "RUNNING"
                    return
            self.hosts.stop(name)  # deleted before it had booted

        return boot

    def _end(self, name: str, zone: str) -> None:
        """Delete an instance after a while, and with it its disk."""
        entry = self.resources["instances", zone, name]
        if entry["status"] == "STOPPING":
            return
        entry["status"] = "STOPPING"

        def end() -> None:
            self.hosts.stop(name)
            with self._lock:
                self.resources.pop(("instances", zone, name), None)
                self.resources.pop(("disks", zone, name), None)

        threading.Timer(max(self.shutdown_seconds, self.operation_seconds), end).start()

    def _watch_power(self) -> None:
        """An instance that powers itself off is TERMINATED and keeps its disk; a spot one counts as preempted here."""
        while self._on:
            for name in self.hosts.powered_off():
                self.hosts.stop(name)
                with self._lock:
                    for (kind, place, each), entry in self.resources.items():
                        if (kind, each) != ("instances", name) or entry["status"] == "STOPPING":
                            continue
                        if entry["scheduling"]["provisioningModel"] == "SPOT":
                            self._end(name, place)
                        else:
                            entry["status"] = "TERMINATED"
            time.sleep(0.2)

    def _make(self, kind: str, place: str, entry: dict[str, Any]) -> None:
        self._count += 1
        self.resources[kind, place, entry["name"]] = {**entry, "labelFingerprint": f"f{self._count}"}

    def _operation(self, place: str, errors: list[str] | None = None) -> dict[str, Any]:
        self._count += 1
        operation: dict[str, Any] = {"name": f"operation-{self._count}", "status": "RUNNING"}
        if place != "global":
            operation["zone" if place.count("-") > 1 else "region"] = f"https://compute/projects/{PROJECT}/x/{place}"
        done = dict(operation, status="DONE")
        if errors:
            refused = [{"code": code, "message": f"refused by the test: {code}"} for code in errors]
            done |= {"error": {"errors": refused}, "httpErrorStatusCode": 503}
        self._operations[operation["name"]] = {"at": time.monotonic() + self.operation_seconds, "done": done}
        return operation

    def _wait(self, name: str) -> Answer:
        operation = self._operations[name]
        time.sleep(max(0.0, operation["at"] - time.monotonic()))
        return _json(operation["done"])

    def _everything(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """All resources of a kind with their places, in one order."""
        if kind == "regions":
            return [("global", {"name": region}) for region in REGIONS]
        zones = [zone for region in REGIONS for zone in ZONES[region]]
        if kind == "machineTypes":
            return [(zone, {"name": name}) for zone in zones for name in _TYPES]
        if kind == "acceleratorTypes":
            return [(zone, {"name": "nvidia-tesla-t4"}) for zone in zones if not zone.endswith("c")]
        return sorted(
            ((place, entry) for (each, place, _), entry in self.resources.items() if each == kind),
            key=lambda found: (found[0], found[1]["name"]),
        )

    def _aggregated(self, kind: str, query: dict[str, str]) -> Answer:
        found = [item for item in self._everything(kind) if _fits(item[1], query.get("filter", ""))]
        start = int(query.get("pageToken", 0))
        items: dict[str, dict[str, list[Any]]] = {}
        for place, entry in found[start : start + _PAGE]:
            scope = f"{'zones' if place.count('-') > 1 else 'regions'}/{place}"
            items.setdefault(scope, {kind: []})[kind].append(entry)
        following = {"nextPageToken": str(start + _PAGE)} if start + _PAGE < len(found) else {}
        return _json({"items": items, **following})


def _fits(entry: dict[str, Any], wanted: str) -> bool:
    """Whether an entry fits one of the filters in use."""
    if not wanted:
        return True
    match = re.fullmatch(r'(?:labels\.)?([\w-]+)(?::\*| = "([^"]*)")', wanted)
    assert match is not None, wanted
    held = entry.get("labels", {}) if wanted.startswith("labels.") else entry
    return match[1] in held if match[2] is None else held.get(match[1]) == match[2]


def _write_key(path: Path) -> str:
    """Write the key file of a service account; returns a line of its private key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    text = key.private_bytes(encoding, form, serialization.NoEncryption()).decode()
    account = {
        "type": "service_account",
        "project_id": PROJECT,
        "private_key_id": "canary",
        "private_key": text,
        "client_email": f"canary@{PROJECT}.iam.gserviceaccount.com",
        "token_uri": "http://127.0.0.1:9/token",
    }
    path.write_text(json.dumps(account))
    return text.splitlines()[1]


def _json(content: dict[str, Any], status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()
