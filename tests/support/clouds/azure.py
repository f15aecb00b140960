"""Azure Resource Manager for tests: the REST calls in use over HTTPS, with real machines behind.

    with FakeAzure(tmp_path) as azure:             # endpoint, certificate, login and subscription are set meanwhile
        azure.faults.append(Fault("PUT virtualMachines", code="AllocationFailed", zone="1"))
        azure.left()                               # everything that is there

Operations take time and are asked for by Azure-AsyncOperation or Location, as the vendor's pollers do. The vendor's
clients are unmodified: they are pointed here by RANKWISE_AZURE_ENDPOINT, and DefaultAzureCredential gets its token by
IDENTITY_ENDPOINT, as in an App Service.
"""

import base64
import json
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tasks.providers.readiness.node_gpus import gpus_of_instance
from tests.support.clouds.faults import Call, Fault
from tests.support.clouds.hosts import Hosts

Answer = tuple[int, dict[str, str], dict[str, Any] | None]
SUBSCRIPTION = "00000000-1111-2222-3333-444444444444"
REGIONS = {"East US": "eastus", "West US 2": "westus2", "West Europe": "westeurope"}
SIZES = ("Standard_NC4as_T4_v3", "Standard_NC24ads_A100_v4", "Standard_D4s_v5")
_TAGS = "/providers/microsoft.resources/tags/default"
_LATER = {"AllocationFailed", "ZonalAllocationFailed", "OverconstrainedAllocationRequest", "InternalExecutionError"}
"""Codes with which an accepted operation fails."""
_STATUS = {
    "SkuNotAvailable": 409,
    "OperationNotAllowed": 409,
    "TooManyRequests": 429,
    "InternalServerError": 500,
    "ServiceUnavailable": 503,
    "ExpiredAuthenticationToken": 401,
    "AuthorizationFailed": 403,
}
_MESSAGES = {"OperationNotAllowed": "Operation could not be completed as it results in exceeding approved quota"}
_ENVIRONMENT = ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_CONNECTION_STRING")


class FakeAzure:
    """The server, its resources and the machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, str, str]] = []
        self.hosts = Hosts(folder / "hosts")
        self.operation_seconds = 0.2
        self.resources: dict[str, dict[str, Any]] = {}
        self._operations: dict[str, tuple[threading.Thread, list[str]]] = {}
        self._count = 0
        self._lock = threading.RLock()
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> "FakeAzure":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hosts.__enter__()
        certificate, key = self.folder / "certificate.pem", self.folder / "key.pem"
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*made, *names], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"https://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "RANKWISE_AZURE_ENDPOINT": self.url,
            "REQUESTS_CA_BUNDLE": str(certificate),
            "AZURE_SUBSCRIPTION_ID": SUBSCRIPTION,
            "IDENTITY_ENDPOINT": f"{self.url}/token",
            "IDENTITY_HEADER": "canary-of-the-identity-header-0001",
        }
        self._before = {name: os.environ.get(name) for name in (*self.environment, *_ENVIRONMENT)}
        for name in _ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(self.environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._server.shutdown()
        self._server.server_close()
        for thread, _ in list(self._operations.values()):
            thread.join()
        self.hosts.__exit__(kind, error, trace)

    def left(self) -> list[str]:
        """Every resource, asked of the server itself, and the machines that run."""
        return [f"machine {name}" for name in self.hosts.running()] + list(self.resources)

    def count(self, action: str) -> int:
        """How often an action was called."""
        return sum(name == action for name, _, _ in self.calls)

    def put(self, path: str, location: str, tags: dict[str, str], **body: Any) -> None:
        """Make a resource past the API; path: from the subscription on."""
        self._store(f"/subscriptions/{SUBSCRIPTION}{path}", {"location": location, "tags": tags, **body})

    def evict(self) -> None:
        """Take one machine away with all that is deleted with it, as an eviction of spot does."""
        first = next(id for id in self.resources if "/virtualmachines/" in id)
        self._remove_machine(first)

    def _store(self, id: str, body: dict[str, Any]) -> dict[str, Any]:
        parts = id.split("/")
        kind = f"{parts[-3]}/{parts[-2]}" if len(parts) > 5 else "Microsoft.Resources/resourceGroups"
        made = {**body, "id": id, "name": parts[-1], "type": kind}
        if "location" in body:  # `East US` and `EastUS` are answered as eastus
            made["location"] = body["location"].replace(" ", "").lower()
        made.setdefault("properties", {}).setdefault("provisioningState", "Succeeded")
        with self._lock:
            self.resources[id.lower()] = made
        return made

    def _begin(self, work: Callable[[], str | None], location: bool) -> dict[str, str]:
        """Run an operation in the background; returns the headers that name it. work returns an error code or None."""
        outcome: list[str] = []

        def later() -> None:
            time.sleep(self.operation_seconds)
            code = work()
            if code is not None:
                outcome.append(code)

        with self._lock:
            self._count += 1
            name = f"operation-{self._count}"
            thread = threading.Thread(target=later, daemon=True)
            self._operations[name] = (thread, outcome)
        thread.start()
        header = "Location" if location else "Azure-AsyncOperation"
        return {header: f"{self.url}/{'results' if location else 'operations'}/{name}", "Retry-After": "1"}

    def _operation(self, path: str) -> Answer:
        _, style, name = path.split("/")
        thread, outcome = self._operations[name]
        if thread.is_alive():
            body = None if style == "results" else {"status": "InProgress"}
            again = {"Retry-After": "1", "Location": f"{self.url}{path}"}
            return (202 if style == "results" else 200), again, body
        if outcome:
            error = {"code": outcome[0], "message": f"refused by the test: {outcome[0]}"}
            return 200, {}, {"status": "Failed", "error": error}
        return 200, {}, {"status": "Succeeded"}

    def _answer(
        self, method: str, path: str, query: dict[str, str], body: dict[str, Any], failing: str | None
    ) -> Answer:
        """What the cloud does; failing: the code with which its operation ends."""
        if path.startswith(("/operations/", "/results/")):
            return self._operation(path)
        inside = path.removeprefix(f"/subscriptions/{SUBSCRIPTION}").lower()
        if method == "GET":
            return self._get(path, inside, query)
        if inside.endswith(_TAGS):
            scope = path.lower().removesuffix(_TAGS)
            self.resources[scope].setdefault("tags", {}).update(body["properties"]["tags"])
            return 200, {}, {"id": path, "properties": {"tags": self.resources[scope]["tags"]}}
        if method == "PUT":
            return self._put(path, body, failing)
        assert method == "DELETE", method
        if path.lower() not in self.resources:
            return _refusal("ResourceNotFound", 404)
        self.resources[path.lower()]["properties"]["provisioningState"] = "Deleting"
        return 202, self._begin(lambda: self._delete(path.lower()), location=True), None

    def _delete(self, id: str) -> str | None:
        if "/virtualmachines/" in id:
            self._remove_machine(id)
        elif "/providers/" not in id:
            for machine in [
                each for each in self.resources if each.startswith(f"{id}/") and "/virtualmachines/" in each
            ]:
                self._remove_machine(machine)
            with self._lock:
                for each in [each for each in self.resources if each == id or each.startswith(f"{id}/")]:
                    del self.resources[each]
        else:
            self.resources.pop(id, None)
        return None

    def _remove_machine(self, id: str) -> None:
        name = id.rpartition("/")[2]
        self.hosts.stop(name)
        with self._lock:
            for each in [each for each in self.resources if each.rpartition("/")[2] == name]:
                del self.resources[each]

    def _put(self, path: str, body: dict[str, Any], failing: str | None) -> Answer:
        id = path.lower()
        group = id.partition("/providers/")[0]
        known = self.resources.get(group)
        if "/providers/" in id and known is None:
            return _refusal("ResourceGroupNotFound", 404)
        if known is not None and known["properties"]["provisioningState"] == "Deleting":
            return _refusal("ResourceGroupBeingDeleted", 409)
        if "/virtualmachines/" not in id:
            return (200 if id in self.resources else 201), {}, self._store(path, body)
        with self._lock:
            if id in self.resources and self.resources[id]["properties"]["provisioningState"] != "Failed":
                if self.resources[id]["sent"] != json.dumps(body, sort_keys=True):
                    return _refusal("PropertyChangeNotAllowed", 409)
                return 200, {}, self.resources[id]
            return self._make_machine(path, body, failing)

    def _make_machine(self, path: str, body: dict[str, Any], failing: str | None) -> Answer:
        """Make machine, interface, address and disk; the machine boots while the operation runs."""
        before, name = path.partition("/providers/")[0], path.rpartition("/")[2]
        sent = json.dumps(body, sort_keys=True)
        self._count += 1
        own = os.getpid() % 12000
        end = f"{own // 250}.{own % 250}.{self._count % 250 + 1}"
        private, public = f"10.{end}", f"100.{64 + own // 250}.{own % 250}.{self._count % 250 + 1}"
        machine = self._store(path, {**body, "sent": sent})
        machine["properties"]["provisioningState"] = "Creating"
        nic = body["properties"]["networkProfile"]["networkInterfaceConfigurations"][0]
        address = nic["properties"]["ipConfigurations"][0]["properties"].get("publicIPAddressConfiguration")
        common = {"location": body["location"]}
        configuration: dict[str, Any] = {"privateIPAddress": private}
        addresses = [private]
        if address is not None:
            outside = f"{before}/providers/Microsoft.Network/publicIPAddresses/{name}"
            self._store(outside, {**common, "tags": address["tags"], "properties": {"ipAddress": public}})
            configuration["publicIPAddress"] = {"id": outside}
            addresses.append(public)
        inner = {"virtualMachine": {"id": path}, "ipConfigurations": [{"name": name, "properties": configuration}]}
        interface = {**common, "tags": nic["tags"], "properties": inner}
        self._store(f"{before}/providers/Microsoft.Network/networkInterfaces/{name}", interface)
        self._store(f"{before}/providers/Microsoft.Compute/disks/{name}", {**common, "tags": body["tags"]})
        user_data = base64.b64decode(body["properties"]["osProfile"]["customData"]).decode()
        gpus = gpus_of_instance("azure", body["properties"]["hardwareProfile"]["vmSize"])

        def boot() -> str | None:
            if failing is not None:
                machine["properties"]["provisioningState"] = "Failed"
                return failing
            if path.lower() in self.resources:  # not deleted before it had booted
                self.hosts.start(name, addresses, user_data, gpus)
                machine["properties"]["provisioningState"] = "Succeeded"
            if path.lower() not in self.resources:
                self.hosts.stop(name)
            return None

        return 201, self._begin(boot, location=False), machine

    def _get(self, path: str, inside: str, query: dict[str, str]) -> Answer:
        id = path.lower()
        if inside == "/providers/microsoft.compute":
            places = {"resourceType": "virtualMachines", "locations": list(REGIONS)}
            return 200, {}, {"namespace": "Microsoft.Compute", "resourceTypes": [places]}
        if inside == "/providers/microsoft.compute/skus":
            region = query["$filter"].split("'")[1]
            info = [{"location": region, "zones": ["1", "2"]}]
            skus = [{"resourceType": "virtualMachines", "name": size, "locationInfo": info} for size in SIZES]
            return 200, {}, {"value": skus}
        if id.endswith("/instanceview"):
            name = id.split("/")[-2]
            state = "running" if name in self.hosts.running() else "stopped"
            return 200, {}, {"statuses": [{"code": f"PowerState/{state}"}]}
        if id.endswith(_TAGS):
            tagged = self.resources.get(id.removesuffix(_TAGS))
            if tagged is None:
                return _refusal("ResourceNotFound", 404)
            return 200, {}, {"id": path, "properties": {"tags": tagged.get("tags", {})}}
        if id in self.resources:
            return 200, {}, self.resources[id]
        with self._lock:
            everything = dict(self.resources)
        if inside in ("/resourcegroups", "/resources"):
            groups = inside == "/resourcegroups"
            found = [each for key, each in everything.items() if ("/providers/" not in key) == groups]
            wanted = query.get("$filter")
            listed = [_as_listed(each) for each in found if _fits(each, wanted)]
            if wanted is not None and not groups:  # Azure's list of resources by their tags leaves these out
                listed = [{name: value for name, value in each.items() if name != "tags"} for each in listed]
            return 200, {}, {"value": listed}
        group = re.match(r"/resourcegroups/[^/]+", inside)
        if group is None or f"/subscriptions/{SUBSCRIPTION}{group[0]}".lower() not in everything:
            return _refusal("ResourceGroupNotFound", 404)
        if inside.count("/") > 5:
            return _refusal("ResourceNotFound", 404)
        if "/providers/" in inside:
            return (
                200,
                {},
                {"value": [_as_listed(each) for key, each in everything.items() if key.startswith(f"{id}/")]},
            )
        start = f"{id.removesuffix('/resources')}/providers/"
        return 200, {}, {"value": [_as_listed(each) for key, each in everything.items() if key.startswith(start)]}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        azure = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                return

            def _serve(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                url = urlsplit(self.path)
                path, query = unquote(url.path), {name: values[0] for name, values in parse_qs(url.query).items()}
                if path == "/token":
                    return self._send(azure._token(self.headers.get("X-IDENTITY-HEADER"), query))
                if self.headers.get("Authorization") != "Bearer token-of-the-test":
                    return self._send(_refusal("AuthenticationFailed", 401))
                body = json.loads(sent) if sent else {}
                action, region = f"{self.command} {_kind(path)}", azure._region(path, body, query)
                azure.calls.append((action, region, sent.decode()))
                market = "spot" if body.get("properties", {}).get("priority") == "Spot" else "on_demand"
                zone = (body.get("zones") or [None])[0]
                fault = next((fault for fault in azure.faults if fault.takes(Call(action, region, zone, market))), None)
                if fault is not None and fault.hook is not None:
                    fault.hook()
                code = None if fault is None else fault.code
                work = (self.command, path, query, body, code)
                if fault is not None and fault.late_seconds is not None:
                    threading.Timer(fault.late_seconds, azure._answer, work).start()
                    return self._hang_up()
                answer = azure._answer(*work) if code is None or code in _LATER else _refusal(code, _STATUS[code])
                if fault is not None and fault.lose:
                    return self._hang_up()
                self._send(answer)

            do_GET = do_PUT = do_DELETE = do_PATCH = _serve

            def _send(self, answer: Answer) -> None:
                status, headers, body = answer
                data = b"" if body is None else json.dumps(body).encode()
                try:
                    self.send_response(status)
                    for name, value in {**headers, "Content-Type": "application/json"}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True  # the caller has been killed

            def _hang_up(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        return Handler

    def _token(self, secret: str | None, query: dict[str, str]) -> Answer:
        if secret != self.environment["IDENTITY_HEADER"]:
            return _refusal("AuthenticationFailed", 401)
        until = str(int(time.time() + 3600))
        given = {"access_token": "token-of-the-test", "expires_on": until, "token_type": "Bearer"}
        return 200, {}, {**given, "resource": query["resource"]}

    def _region(self, path: str, body: dict[str, Any], query: dict[str, str]) -> str:
        if "location" in body:
            return str(body["location"])
        if "location eq" in query.get("$filter", ""):
            return query["$filter"].split("'")[1]
        group = re.match(r"/subscriptions/[^/]+/resourcegroups/[^/]+", path.lower())
        known = None if group is None else self.resources.get(group[0])
        return "" if known is None else str(known["location"])


def _kind(path: str) -> str:
    """The type of resource of a path, such as virtualMachines; `operations` for those."""
    parts = path.strip("/").split("/")
    if parts[0] != "subscriptions":
        return parts[0]
    if "providers" in parts[2:]:
        place = parts.index("providers")
        return parts[place + 2] if len(parts) > place + 2 else "providers"
    return "resources" if parts[-1] == "resources" else "resourceGroups"


def _as_listed(resource: dict[str, Any]) -> dict[str, Any]:
    """A resource as a list has it: the compute service writes the group in capitals, which are the same name."""
    if not resource["type"].startswith("Microsoft.Compute/"):
        return resource
    parts = resource["id"].split("/")
    return {**resource, "id": "/".join([*parts[:4], parts[4].upper(), *parts[5:]])}


def _fits(resource: dict[str, Any], wanted: str | None) -> bool:
    """Whether a resource has the tag of a filter."""
    if wanted is None:
        return True
    match = re.fullmatch(r"tagName eq '([^']*)'(?: and tagValue eq '([^']*)')?", wanted)
    assert match is not None, wanted
    tags = resource.get("tags") or {}
    return match[1] in tags and match[2] in (None, tags[match[1]])


def _refusal(code: str, status: int) -> Answer:
    message = _MESSAGES.get(code, f"refused by the test: {code}")
    headers = {"Retry-After": "1"} if status == 429 else {}
    return status, headers, {"error": {"code": code, "message": message}}
