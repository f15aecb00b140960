"""Google Compute Engine by google-cloud-compute. Credentials and project come from google.auth's own chain.

What a run makes in a region: instances with their boot disks (deleted with them), three firewall rules, and a compact
placement policy for several nodes. All carry the lease: as labels, or in the description where a kind takes no labels.

The endpoint can be set by CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE, the variable of Google's own command line.

Operations are waited for through the same endpoint and by name: the client's `result()` knows only the public one.
Sources: https://cloud.google.com/compute/docs/instances/multiple/about-bulk-creation (gangs),
https://cloud.google.com/compute/docs/instances/limit-vm-runtime (maxRunDuration).
"""

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import google.auth
from google.api_core.client_options import ClientOptions
from google.cloud import compute_v1 as compute

from configs.hardware.node_names import Cloud
from tasks.providers.gcp.errors import missing_project, operation_failed, translated
from tasks.providers.gcp.requests import (
    accelerator_of,
    firewall_rules,
    gang,
    is_placed,
    node_names,
    placement_policy,
    tags_as_description,
    tags_in,
)
from tasks.providers.rental import (
    TAG_EXPIRES,
    TAG_OWNER,
    TAG_RUN,
    TAG_STUDY,
    Node,
    ProviderError,
    RentalLease,
    Resource,
    ResourceKind,
    Rung,
)

_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
_STATES: dict[str, Literal["pending", "running", "stopping", "gone"]] = {
    "PROVISIONING": "pending",
    "STAGING": "pending",
    "RUNNING": "running",
}
"""Every other state is on the way out, or stopped: it keeps a disk, so it is still listed."""
_OPERATION_SECONDS = 600.0
_LABELLED: tuple[tuple[ResourceKind, Any, str], ...] = (
    ("instance", compute.InstancesClient, "instances"),
    ("disk", compute.DisksClient, "disks"),
    ("address", compute.AddressesClient, "addresses"),
)


class Gcp:
    """Compute Engine of one project, all regions."""

    name: Cloud = "gcp"
    default_user = "ubuntu"

    def __init__(self) -> None:
        self._clients: dict[type, Any] = {}
        self._signed_in: tuple[Any, str] | None = None
        self._failed: dict[str, int] = {}
        """How many operations of a token have failed."""

    def identity(self) -> str:
        """Return the project."""
        return f"project {self._call(compute.ProjectsClient, 'get').name}"

    def regions(self) -> list[str]:
        """Return the regions of the project."""
        with translated():
            return sorted(region.name for region in self._call(compute.RegionsClient, "list"))

    def zones(self, instance: str, region: str) -> list[str]:
        """Return the zones of a region that offer the machine type, and the accelerator attached to it."""
        machine, accelerator = instance.partition("+")[0], accelerator_of(instance)
        found = self._offered(compute.MachineTypesClient, "machine_types", region, machine)
        if accelerator is not None:
            found &= self._offered(compute.AcceleratorTypesClient, "accelerator_types", region, accelerator[0])
        return sorted(found)

    def prepare(self, lease: RentalLease, region: str) -> None:
        """Make the firewall rules, and the placement policy of several nodes."""
        begun = [
            self._begin_unless_there(compute.FirewallsClient, "insert_unary", firewall_resource=rule)
            for rule in firewall_rules(lease, region)
        ]
        if is_placed(lease.request):
            wanted = {"region": region, "resource_policy_resource": placement_policy(lease, region)}
            begun.append(self._begin_unless_there(compute.ResourcePoliciesClient, "insert_unary", **wanted))
        for operation in begun:
            if operation is not None:
                self._finish(operation)

    def create(self, lease: RentalLease, user_data: str, rung: Rung, token: str) -> list[Node]:
        """Create all nodes or none, with one bulk request. What a failed one has made is deleted.

        Google answers a request id with its operation for good, also one that failed: the next try has another.
        """
        failed = self._failed.get(token, 0)
        request = str(uuid.uuid5(uuid.UUID(token), str(failed))) if failed else token
        resource = gang(lease, user_data, rung, request, self._project)
        wanted: dict[str, Any] = {"bulk_insert_instance_resource_resource": resource, "request_id": request}
        if rung.zone is None:
            kind: type = compute.RegionInstancesClient
            wanted["region"] = rung.region
        else:
            kind = compute.InstancesClient
            wanted["zone"] = rung.zone
        failure = _failure(self._wait(self._call(kind, "bulk_insert_unary", **wanted)))
        if failure is not None:
            self._roll_back(lease, rung.region, set(node_names(lease, request)))
            self._failed[token] = failed + 1
            raise failure
        place = {"region": rung.region, "zone": rung.zone, "market": rung.market}
        return [Node(id=name, state="pending", **place) for name in node_names(lease, request)]

    def nodes(self, run: str, region: str) -> list[Node]:
        """Describe the instances of a run; deleted ones are not among them."""
        found = self._listed(compute.InstancesClient, "instances", [region], run)
        return [_node(entry, zone) for zone, entry in found]

    def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
        """List instances, disks, addresses, firewall rules and placement policies."""
        found = [
            _resource(kind, entry, dict(entry.labels), _region(place), place)
            for kind, client, field in _LABELLED
            for place, entry in self._listed(client, field, regions, run)
        ]
        with translated():
            rules = list(self._call(compute.FirewallsClient, "list"))
        for kind, entry in (
            *(("security_group", rule) for rule in rules),
            *(("placement", policy) for _, policy in self._aggregated(
                compute.ResourcePoliciesClient, "resource_policies", regions)),
        ):  # fmt: skip
            tags, place = tags_in(entry.description)
            if TAG_RUN in tags and run in (None, tags[TAG_RUN]):
                found.append(_resource(cast(ResourceKind, kind), entry, tags, place, place))
        return [resource for resource in found if resource.region in regions]

    def delete(self, resource: Resource) -> None:
        """Delete one resource; a missing one is no error."""
        calls: dict[ResourceKind, tuple[type, dict[str, Any]]] = {
            "instance": (compute.InstancesClient, {"zone": resource.zone, "instance": resource.id}),
            "disk": (compute.DisksClient, {"zone": resource.zone, "disk": resource.id}),
            "address": (compute.AddressesClient, {"region": resource.region, "address": resource.id}),
            "security_group": (compute.FirewallsClient, {"firewall": resource.id}),
            "placement": (
                compute.ResourcePoliciesClient,
                {"region": resource.region, "resource_policy": resource.id},
            ),
        }
        kind, named = calls[resource.kind]
        try:
            self._call(kind, "delete_unary", **named)
        except ProviderError as error:
            if error.code not in ("notFound", "404"):
                raise

    def extend(self, resource: Resource, expires_at: int) -> None:
        """Write a later expiry to labels or description. Raises ProviderError beyond Google's own limit."""
        place = {"zone": resource.zone} if resource.kind in ("instance", "disk") else {"region": resource.region}
        if resource.kind in ("security_group", "placement"):
            self._describe_anew(resource, expires_at)
            return
        kind = {entry[0]: entry[1] for entry in _LABELLED}[resource.kind]
        entry = self._call(kind, "get", **place, **{resource.kind: resource.id})
        if resource.kind == "instance":
            _check_ceiling(entry, expires_at)
        labels = {
            "labels": {**entry.labels, TAG_EXPIRES: str(expires_at)},
            "label_fingerprint": entry.label_fingerprint,
        }
        prefix = {"instance": "instances", "disk": "zone", "address": "region"}[resource.kind]
        named = {"instance": resource.id} if resource.kind == "instance" else {"resource": resource.id}
        wanted = {**place, **named, f"{prefix}_set_labels_request_resource": labels}
        self._finish(self._call(kind, "set_labels_unary", **wanted))

    def _describe_anew(self, resource: Resource, expires_at: int) -> None:
        tags = {
            TAG_STUDY: resource.study,
            TAG_RUN: resource.run,
            TAG_OWNER: resource.owner,
            TAG_EXPIRES: str(expires_at),
        }
        text = {"description": tags_as_description(tags, resource.region)}
        if resource.kind == "security_group":
            wanted: dict[str, Any] = {"firewall": resource.id, "firewall_resource": text}
            self._finish(self._call(compute.FirewallsClient, "patch_unary", **wanted))
        else:
            wanted = {"region": resource.region, "resource_policy": resource.id, "resource_policy_resource": text}
            self._finish(self._call(compute.ResourcePoliciesClient, "patch_unary", **wanted))

    def _roll_back(self, lease: RentalLease, region: str, names: set[str]) -> None:
        """Delete what a failed bulk request has left; the ladder goes on elsewhere."""
        for resource in self.tagged([region], lease.run):
            if resource.kind == "instance" and resource.id in names:
                self.delete(resource)

    def _offered(self, kind: type, field: str, region: str, name: str) -> set[str]:
        return {zone for zone, _ in self._aggregated(kind, field, [region], f'name = "{name}"')}

    def _listed(self, kind: type, field: str, regions: Sequence[str], run: str | None) -> Iterator[tuple[str, Any]]:
        wanted = f"labels.{TAG_RUN}:*" if run is None else f'labels.{TAG_RUN} = "{run}"'
        return self._aggregated(kind, field, regions, wanted)

    def _aggregated(
        self, kind: type, field: str, regions: Sequence[str], wanted: str = ""
    ) -> Iterator[tuple[str, Any]]:
        """List a kind in the zones of these regions, all pages. Raises ProviderError where one did not answer.

        The answer is about the whole world: a zone that is out elsewhere must not keep nodes from being given back.
        """
        with translated():
            pages = list(self._call(kind, "aggregated_list", filter=wanted).pages)
        for page in pages:
            silent = [*page.unreachables]
            silent += [scope for scope, part in page.items.items() if part.warning.code == "UNREACHABLE"]
            if here := [scope for scope in silent if _region(_place(scope)) in regions]:
                raise ProviderError("transient", "UNREACHABLE", f"no answer from {', '.join(here)}")
            for scope, part in page.items.items():
                if _region(_place(scope)) in regions:
                    yield from ((_place(scope), entry) for entry in getattr(part, field))

    def _begin_unless_there(self, kind: type, method: str, **wanted: Any) -> Any:
        try:
            return self._call(kind, method, **wanted)
        except ProviderError as error:
            if error.code not in ("alreadyExists", "409"):
                raise
            return None

    def _finish(self, operation: Any) -> None:
        """Wait for an operation. Raises ProviderError: it failed, or takes too long."""
        failure = _failure(self._wait(operation))
        if failure is not None:
            raise failure

    def _wait(self, operation: Any) -> Any:
        """Return an operation when it is done. Raises ProviderError: it could not be asked, or takes too long."""
        deadline = time.monotonic() + _OPERATION_SECONDS
        while operation.status != compute.Operation.Status.DONE:
            if time.monotonic() > deadline:
                late = f"operation {operation.name} has not finished after {_OPERATION_SECONDS:g} s"
                raise ProviderError("transient", "", late)
            place = {"operation": operation.name}
            if operation.zone:
                kind: type = compute.ZoneOperationsClient
                place["zone"] = operation.zone.rpartition("/")[2]
            elif operation.region:
                kind = compute.RegionOperationsClient
                place["region"] = operation.region.rpartition("/")[2]
            else:
                kind = compute.GlobalOperationsClient
            operation = self._call(kind, "wait", **place)  # answers after two minutes at the latest
        return operation

    @property
    def _project(self) -> str:
        return self._sign_in()[1]

    def _sign_in(self) -> tuple[Any, str]:
        if self._signed_in is None:
            with translated():
                credentials, project = google.auth.default(scopes=_SCOPES)
            if not project:
                raise missing_project()
            self._signed_in = (credentials, project)
        return self._signed_in

    def _call(self, kind: type, method: str, **wanted: Any) -> Any:
        """Make one request. No retries inside the client: each one must be a line of the ledger."""
        credentials, project = self._sign_in()
        with translated():
            if kind not in self._clients:
                endpoint = urlsplit(os.environ.get(_ENDPOINT, ""))
                host = f"{endpoint.scheme}://{endpoint.netloc}" if endpoint.netloc else None
                self._clients[kind] = kind(credentials=credentials, client_options=ClientOptions(api_endpoint=host))
            request = {"project": project, **wanted}
            return getattr(self._clients[kind], method)(request=request, retry=None, timeout=150)


def _failure(operation: Any) -> ProviderError | None:
    """Return why an operation that is done has failed; None: it has not."""
    status = int(operation.http_error_status_code)
    errors = [(each.code, each.message) for each in operation.error.errors]
    return operation_failed(errors, status) if errors or status >= 400 else None


def _place(scope: str) -> str:
    """Return the zone or region of `zones/us-central1-a`, whatever stands before it."""
    return scope.rpartition("/")[2]


def _region(place: str) -> str:
    """Return the region of a zone: us-central1 of us-central1-a; a region is its own."""
    return place.rpartition("-")[0] if place.count("-") > 1 else place


def _node(entry: Any, zone: str) -> Node:
    interface = entry.network_interfaces[0] if entry.network_interfaces else None
    public = [config.nat_i_p for config in interface.access_configs] if interface is not None else []
    return Node(
        id=entry.name,
        region=_region(zone),
        zone=zone,
        state=_STATES.get(entry.status, "stopping"),
        private_address=(interface.network_i_p or None) if interface is not None else None,
        public_address=next((address for address in public if address), None),
        market="spot" if entry.scheduling.provisioning_model == "SPOT" else "on_demand",
    )


def _resource(kind: ResourceKind, entry: Any, tags: dict[str, str], region: str, place: str) -> Resource:
    expires = tags.get(TAG_EXPIRES, "")
    detail = ""
    if kind == "instance":
        detail = f"{entry.machine_type.rpartition('/')[2]} {entry.status.lower()}"
    elif kind == "disk":
        detail = f"{entry.size_gb} GB"
    return Resource(
        provider="gcp",
        kind=kind,
        id=entry.name,
        region=region,
        zone=place if place != region else None,
        study=tags.get(TAG_STUDY, ""),
        run=tags.get(TAG_RUN, ""),
        owner=tags.get(TAG_OWNER, ""),
        expires_at=int(expires) if expires.isdecimal() else None,
        detail=detail,
    )


def _check_ceiling(entry: Any, expires_at: int) -> None:
    """Raise ProviderError where Google ends the machine before: maxRunDuration cannot be changed while it runs."""
    seconds = int(entry.scheduling.max_run_duration.seconds)
    if seconds and entry.creation_timestamp:
        end = int(datetime.fromisoformat(entry.creation_timestamp).timestamp()) + seconds
        if expires_at > end:
            until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(end))
            raise ProviderError("invalid", "", f"{entry.name}: Google deletes it at {until}; rent anew for longer")
