"""Azure by its own clients. Credentials: DefaultAzureCredential's chain; the account: AZURE_SUBSCRIPTION_ID.

What a run makes in a region is one resource group, named after both. It holds the network, the security group, a
proximity placement group for several nodes, and the machines, each with an interface, an address and a disk that Azure
deletes with it. Deleting the group deletes all of them. Names follow from run, region and token, and every request is
a PUT, so that the same request twice makes nothing twice.

RANKWISE_AZURE_ENDPOINT names another Azure Resource Manager than that of the public cloud; the authority that gives out
tokens is named by AZURE_AUTHORITY_HOST, as the client's documentation says.

Sources: https://learn.microsoft.com/azure/azure-resource-manager/troubleshooting/common-deployment-errors (codes),
https://learn.microsoft.com/azure/virtual-machines/delete (what is deleted with a machine).
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from configs.hardware.node_names import Cloud
from tasks.providers.azure.errors import call_azure
from tasks.providers.azure.requests import machine, refuse_retired, ssh_rule
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

try:
    from azure.identity import DefaultAzureCredential
    from azure.mgmt.compute import ComputeManagementClient
    from azure.mgmt.network import NetworkManagementClient
    from azure.mgmt.resource.resources import ResourceManagementClient
except ImportError as error:
    raise ValueError(f"azure: its clients are missing ({error}). Install them: pip install 'rankwise[azure]'") from None

PUBLIC_ENDPOINT = "https://management.azure.com"
_TYPES: dict[str, ResourceKind] = {
    "microsoft.compute/virtualmachines": "instance",
    "microsoft.compute/disks": "disk",
    "microsoft.network/networkinterfaces": "nic",
    "microsoft.network/publicipaddresses": "address",
    "microsoft.network/networksecuritygroups": "security_group",
    "microsoft.network/virtualnetworks": "network",
    "microsoft.compute/proximityplacementgroups": "placement",
}
_POLL_SECONDS = 5.0
_OPERATION_SECONDS = 900.0
_ONCE: dict[str, Any] = {
    "retry_total": 0,  # each retry must be a line of the ledger
    "connection_timeout": 10,
    "read_timeout": 60,
    "polling_interval": _POLL_SECONDS,
}
_POWER: dict[str, Literal["pending", "running", "stopping", "gone"]] = {
    "PowerState/starting": "pending",
    "PowerState/running": "running",
    "PowerState/stopping": "stopping",
    "PowerState/stopped": "stopping",  # still billed
    "PowerState/deallocating": "stopping",
    "PowerState/deallocated": "stopping",
}


class Azure:
    """The resource groups of one subscription."""

    name: Cloud = "azure"
    default_user = "ubuntu"

    def __init__(self) -> None:
        self._made: dict[str, dict[str, Node]] = {}
        self._clients: tuple[Any, Any, Any] | None = None

    def identity(self) -> str:
        """Return the subscription, after a request that needs a valid token."""
        call_azure(lambda: next(iter(self._resources.resource_groups.list(top=1)), None))
        return f"subscription {os.environ['AZURE_SUBSCRIPTION_ID']}"

    def regions(self) -> list[str]:
        """Return the regions that offer machines."""
        compute = call_azure(lambda: self._resources.providers.get("Microsoft.Compute"))
        machines = [each for each in compute.resource_types if each.resource_type.lower() == "virtualmachines"]
        # Listed by display name: `East US` is eastus.
        return sorted({place.lower().replace(" ", "") for each in machines for place in each.locations})

    def zones(self, instance: str, region: str) -> list[str]:
        """Return the zones of a region that offer the size to this subscription. Problem `invalid`: retired."""
        if _endpoint() == PUBLIC_ENDPOINT:
            refuse_retired(instance)
        wanted = f"location eq '{region}'"
        for sku in call_azure(lambda: list(self._compute.resource_skus.list(filter=wanted))):
            if sku.resource_type == "virtualMachines" and sku.name == instance:
                offered = {zone for place in sku.location_info or [] for zone in place.zones or []}
                for limit in sku.restrictions or []:
                    if limit.type == "Zone" and limit.restriction_info is not None:
                        offered -= set(limit.restriction_info.zones or [])
                return sorted(offered)
        return []

    def prepare(self, lease: RentalLease, region: str) -> None:
        """Make the resource group with security group, network and placement group."""
        request, group, tags = lease.request, _group_of(lease.run, region), lease.tags
        if request.network is not None and request.subnet is None:
            raise ProviderError(
                "invalid", "", "azure: a network needs its subnet: name it by its whole id, as `subnet`"
            )
        common = {"location": region, "tags": tags}
        call_azure(lambda: self._resources.resource_groups.create_or_update(group, common))
        rules = {
            **common,
            "properties": {"securityRules": [ssh_rule(request.ssh_from)]},
        }  # inside the network all may connect by default
        groups = self._network.network_security_groups
        _finish(call_azure(lambda: groups.begin_create_or_update(group, lease.name, rules)))
        if request.subnet is None:
            space = {"addressSpace": {"addressPrefixes": ["10.0.0.0/16"]}}
            subnet = {"name": "nodes", "properties": {"addressPrefix": "10.0.0.0/16"}}
            made = {**common, "properties": {**space, "subnets": [subnet]}}
            _finish(call_azure(lambda: self._network.virtual_networks.begin_create_or_update(group, lease.name, made)))
        if request.close_together:
            near = {**common, "properties": {"proximityPlacementGroupType": "Standard"}}
            call_azure(lambda: self._compute.proximity_placement_groups.create_or_update(group, lease.name, near))

    def create(self, lease: RentalLease, user_data: str, rung: Rung, token: str) -> list[Node]:
        """Create all machines at once and wait for all of them; where one is refused, the others are deleted."""
        group = _group_of(lease.run, rung.region)
        names = [f"node-{token[:8]}-{place}" for place in range(lease.request.nodes)]
        machines = self._compute.virtual_machines
        user = lease.request.user or self.default_user
        earlier = [each.name for each in call_azure(lambda: list(machines.list(group)))]
        self._delete_machines(group, [name for name in earlier if name not in names])  # of a place asked before
        pollers = []
        refused: ProviderError | None = None
        for name in names:
            wanted = machine(lease, user_data, rung, f"{_scope(group)}/providers", name, user)
            try:
                pollers.append(call_azure(partial(machines.begin_create_or_update, group, name, wanted)))
            except ProviderError as error:
                refused = error
                break
        for poller in pollers:
            try:
                _finish(poller)
            except ProviderError as error:
                refused = refused or error
        if refused is not None:
            if refused.problem not in ("transient", "throttled"):  # these are tried again with the same names
                with suppress(ProviderError):  # else before the next place is asked, or with the run's group
                    self._delete_machines(group, names[: len(pollers)])
            raise refused
        made = {node.id: node for node in self.nodes(lease.run, rung.region)}
        for name in names:
            id = f"{group}/{name}"
            self._made.setdefault(group, {})[id] = made.get(id) or _lost(id, rung)
        return [self._made[group][f"{group}/{name}"] for name in names]

    def nodes(self, run: str, region: str) -> list[Node]:
        """Describe the machines of a run. One that this process made and that is not listed any more was evicted."""
        group = _group_of(run, region)
        found = {}
        try:
            addresses = self._addresses(group)
            for entry in call_azure(lambda: list(self._compute.virtual_machines.list(group))):
                node = self._node(group, entry, addresses.get(entry.name.lower(), (None, None)))
                found[node.id] = node
        except ProviderError as error:
            if error.code != "ResourceGroupNotFound":
                raise
        for id, node in self._made.get(group, {}).items():
            found.setdefault(id, node.model_copy(update={"state": "gone"}))
        return list(found.values())

    def _node(self, group: str, entry: Any, addresses: tuple[str | None, str | None]) -> Node:
        state: Literal["pending", "running", "stopping", "gone"] = "pending"
        if entry.properties.provisioning_state in ("Deleting", "Failed"):
            state = "stopping"
        elif entry.properties.provisioning_state == "Succeeded":
            try:
                view = call_azure(lambda: self._compute.virtual_machines.instance_view(group, entry.name))
                state = next((_POWER[each.code] for each in view.statuses or [] if each.code in _POWER), "pending")
            except ProviderError as error:
                if not _is_gone(error):
                    raise
                state = "gone"
        return Node(
            id=f"{group}/{entry.name}",
            region=entry.location,
            zone=(entry.zones or [None])[0],
            state=state,
            private_address=addresses[0],
            public_address=addresses[1],
            market="spot" if entry.properties.priority == "Spot" else "on_demand",
        )

    def _addresses(self, group: str) -> dict[str, tuple[str | None, str | None]]:
        """Return private and public address of each machine, by its name in lower case."""
        listed = call_azure(lambda: list(self._network.public_ip_addresses.list(group)))
        public = {each.id.lower(): each.properties.ip_address for each in listed}
        found = {}
        for nic in call_azure(lambda: list(self._network.network_interfaces.list(group))):
            if nic.properties.virtual_machine is not None and nic.properties.ip_configurations:
                own = nic.properties.ip_configurations[0].properties
                outside = None if own.public_ip_address is None else public.get(own.public_ip_address.id.lower())
                found[nic.properties.virtual_machine.id.rpartition("/")[2].lower()] = (own.private_ip_address, outside)
        return found

    def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
        """List the resource groups with everything in them, and what bears our tags in other groups."""
        value = "" if run is None else f" and tagValue eq '{run}'"
        wanted = f"tagName eq '{TAG_RUN}'{value}"
        found = {}
        for group in call_azure(lambda: list(self._resources.resource_groups.list(filter=wanted))):
            if group.location in regions:
                found[group.id.lower()] = _resource("group", group.name, group, group.tags)
                try:
                    inside = call_azure(partial(self._inside, group.name))
                except ProviderError as error:
                    if not _is_gone(error):
                        raise
                    inside = []
                found |= {each.id.lower(): made for each in inside for made in _known(each, group.tags)}
        for each in call_azure(lambda: list(self._resources.resources.list(filter=wanted))):
            if each.location in regions and each.id.lower() not in found and each.type.lower() in _TYPES:
                for made in _known(each, self._tags(each)):
                    found[each.id.lower()] = made
                    group = made.id.partition("/")[0]
                    if group == _group_of(made.run, made.region):  # it has lost its own tags
                        found[group] = made.model_copy(update={"kind": "group", "id": group})
        return list(found.values())

    def _tags(self, entry: Any) -> dict[str, str]:
        """Return the tags of a resource that was listed by them: such a list leaves them out."""
        try:
            return dict(call_azure(lambda: self._resources.tags.get_at_scope(entry.id)).properties.tags or {})
        except ProviderError as error:
            if not _is_gone(error):
                raise
            return {}

    def delete(self, resource: Resource) -> None:
        """Ask for the end of one resource. What lies in a run's own group ends with the group."""
        group, _, name = resource.id.partition("/")
        network, compute = self._network, self._compute
        own = group == _group_of(resource.run, resource.region)
        if own and resource.kind not in ("instance", "group"):
            return
        calls: dict[ResourceKind, Callable[[], Any]] = {
            "group": lambda: self._resources.resource_groups.begin_delete(group, polling=False),
            "instance": lambda: compute.virtual_machines.begin_delete(group, name, force_deletion=True, polling=False),
            "disk": lambda: compute.disks.begin_delete(group, name, polling=False),
            "nic": lambda: network.network_interfaces.begin_delete(group, name, polling=False),
            "address": lambda: network.public_ip_addresses.begin_delete(group, name, polling=False),
            "security_group": lambda: network.network_security_groups.begin_delete(group, name, polling=False),
            "network": lambda: network.virtual_networks.begin_delete(group, name, polling=False),
            "placement": lambda: compute.proximity_placement_groups.delete(group, name),
        }
        try:
            call_azure(calls[resource.kind])
        except ProviderError as error:
            if not _is_gone(error):
                raise

    def extend(self, resource: Resource, expires_at: int) -> None:
        """Write a later expiry to the tags of a group, which hold for all that is in it, or of one resource."""
        change = {"operation": "Merge", "properties": {"tags": {TAG_EXPIRES: str(expires_at)}}}
        group, _, name = resource.id.partition("/")
        scope = _scope(group)
        if name:
            kinds = {kind: type for type, kind in _TYPES.items()}
            scope += f"/providers/{kinds[resource.kind]}/{name}"
        _finish(call_azure(lambda: self._resources.tags.begin_update_at_scope(scope, change)))

    def _delete_machines(self, group: str, names: Sequence[str]) -> None:
        """Give back a part of a gang, so that the next place is asked for a whole one."""
        machines = self._compute.virtual_machines
        for name in names:
            try:
                _finish(call_azure(partial(machines.begin_delete, group, name, force_deletion=True)))
            except ProviderError as error:
                if not _is_gone(error):
                    raise

    def _inside(self, group: str) -> list[Any]:
        return list(self._resources.resources.list_by_resource_group(group))

    @property
    def _resources(self) -> Any:
        return self._connect()[0]

    @property
    def _compute(self) -> Any:
        return self._connect()[1]

    @property
    def _network(self) -> Any:
        return self._connect()[2]

    def _connect(self) -> tuple[Any, Any, Any]:
        """Return the three clients. Problem `auth`: no subscription is named."""
        subscription = os.environ.get("AZURE_SUBSCRIPTION_ID")
        if not subscription:
            storage = "AZURE_STORAGE_CONNECTION_STRING opens a storage account and cannot rent. "
            said = storage if os.environ.get("AZURE_STORAGE_CONNECTION_STRING") else ""
            raise ProviderError("auth", "", f"azure: {said}Set AZURE_SUBSCRIPTION_ID and log in, such as by `az login`")
        if self._clients is None:
            endpoint = _endpoint()
            given = {"base_url": endpoint, "credential_scopes": [f"{endpoint}/.default"], **_ONCE}
            login = DefaultAzureCredential()
            clients = (ResourceManagementClient, ComputeManagementClient, NetworkManagementClient)
            resources, compute, network = (client(login, subscription, **given) for client in clients)
            self._clients = (resources, compute, network)
        return self._clients


def _endpoint() -> str:
    """Return the Azure Resource Manager that is asked."""
    return os.environ.get("RANKWISE_AZURE_ENDPOINT", PUBLIC_ENDPOINT).rstrip("/")


def _finish(poller: Any) -> None:
    """Wait for the end of an operation. Raises ProviderError: it failed, or takes too long."""
    call_azure(lambda: poller.wait(_OPERATION_SECONDS))
    if not poller.done():
        raise ProviderError("transient", "", f"no end of an operation after {_OPERATION_SECONDS:g} s")
    call_azure(poller.result)


def _group_of(run: str, region: str) -> str:
    return f"rankwise-{run}-{region}"


def _scope(group: str) -> str:
    return f"/subscriptions/{os.environ['AZURE_SUBSCRIPTION_ID']}/resourceGroups/{group}"


def _known(entry: Any, tags: dict[str, str] | None) -> Iterator[Resource]:
    """Make a resource of a listed one; none of a kind that a rental has not. tags: those of its group, or its own.

    Azure's names have no case, and its compute service answers with groups in capitals: ours are lower-case, as in
    `_group_of`, or a node would not be known as one that was made.
    """
    kind = _TYPES.get(entry.type.lower())
    if kind is not None:
        group = re.search(r"/resourcegroups/([^/]+)/", entry.id, re.IGNORECASE)
        assert group is not None, entry.id
        yield _resource(kind, f"{group[1].lower()}/{entry.name}", entry, {**(entry.tags or {}), **(tags or {})})


def _resource(kind: ResourceKind, id: str, entry: Any, tags: dict[str, str] | None) -> Resource:
    known = tags or {}
    expires = known.get(TAG_EXPIRES, "")
    return Resource(
        provider="azure",
        kind=kind,
        id=id,
        region=entry.location,
        study=known.get(TAG_STUDY, ""),
        run=known.get(TAG_RUN, ""),
        owner=known.get(TAG_OWNER, ""),
        expires_at=int(expires) if expires.isdecimal() else None,
    )


def _lost(id: str, rung: Rung) -> Node:
    return Node(id=id, region=rung.region, zone=rung.zone, state="gone", market=rung.market)


def _is_gone(error: ProviderError) -> bool:
    return error.code.endswith("NotFound") or error.code == "ResourceGroupBeingDeleted"
