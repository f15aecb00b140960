"""What is sent to Azure: the bodies of its requests. Pure functions.

Source of the fields: https://learn.microsoft.com/rest/api/compute/virtual-machines/create-or-update.
"""

import base64
import json
from typing import Any

from configs.hardware.catalog import catalog
from tasks.providers.rental import ProviderError, RentalLease, RentalRequest, Rung

_GPU_IMAGE = "microsoft-dsvm:ubuntu-hpc:2204:latest"
_CPU_IMAGE = "Canonical:0001-com-ubuntu-server-jammy:22_04-lts-gen2:latest"
"""Azure's image with NVIDIA's driver and CUDA, and Ubuntu; both have cloud-init."""


def ssh_rule(source: str) -> dict[str, Any]:
    """Return the rule that lets an address range connect to port 22; inside the network all may connect by default."""
    return {
        "name": "ssh",
        "properties": {
            "priority": 1000,
            "direction": "Inbound",
            "access": "Allow",
            "protocol": "Tcp",
            "sourceAddressPrefix": source,
            "sourcePortRange": "*",
            "destinationAddressPrefix": "*",
            "destinationPortRange": "22",
        },
    }


def machine(lease: RentalLease, user_data: str, rung: Rung, inside: str, name: str, user: str) -> dict[str, Any]:
    """Return one machine with interface, address and disk, which are made, and deleted, with it.

    inside: path of the providers of its resource group. user: login name.
    """
    request, tags = lease.request, lease.tags
    subnet = request.subnet or f"{inside}/Microsoft.Network/virtualNetworks/{lease.name}/subnets/nodes"
    address: dict[str, Any] = {"primary": True, "subnet": {"id": subnet}}
    if request.public_address:
        public = {"publicIPAllocationMethod": "Static", "deleteOption": "Delete"}
        sku = {"name": "Standard", "tier": "Regional"}
        address["publicIPAddressConfiguration"] = {"name": name, "tags": tags, "sku": sku, "properties": public}
    interface = {
        "primary": True,
        "deleteOption": "Delete",
        "networkSecurityGroup": {"id": f"{inside}/Microsoft.Network/networkSecurityGroups/{lease.name}"},
        "ipConfigurations": [{"name": name, "properties": address}],
    }
    keys = json.loads(user_data.partition("\n")[2])["ssh_authorized_keys"]
    login = [{"path": f"/home/{user}/.ssh/authorized_keys", "keyData": key} for key in keys]
    disk = {"createOption": "FromImage", "deleteOption": "Delete", "diskSizeGB": request.disk_gb}
    properties: dict[str, Any] = {
        "hardwareProfile": {"vmSize": request.instance},
        "storageProfile": {
            "imageReference": _image(request),
            "osDisk": {**disk, "name": name, "managedDisk": {"storageAccountType": "Premium_LRS"}},
        },
        "osProfile": {
            "computerName": name,
            "adminUsername": user,
            "customData": base64.b64encode(user_data.encode()).decode(),
            "linuxConfiguration": {"disablePasswordAuthentication": True, "ssh": {"publicKeys": login}},
        },
        "networkProfile": {
            "networkApiVersion": "2022-11-01",
            "networkInterfaceConfigurations": [{"name": name, "tags": tags, "properties": interface}],
        },
    }
    if rung.market == "spot":
        # -1: up to the price on demand, and no eviction for the price.
        properties |= {"priority": "Spot", "evictionPolicy": "Delete", "billingProfile": {"maxPrice": -1}}
    if request.close_together:
        near = f"{inside}/Microsoft.Compute/proximityPlacementGroups/{lease.name}"
        properties["proximityPlacementGroup"] = {"id": near}
    wanted: dict[str, Any] = {"location": rung.region, "tags": tags, "properties": properties}
    if rung.zone is not None:
        wanted["zones"] = [rung.zone]
    if request.profile is not None:
        wanted["identity"] = {"type": "UserAssigned", "userAssignedIdentities": {request.profile: {}}}
    return wanted


def _image(request: RentalRequest) -> dict[str, str]:
    """Return an image of our own by its id, or one of the marketplace: publisher:offer:sku:version."""
    image = request.image
    if image is not None and image.startswith("/"):
        return {"id": image}
    urn = image or (_GPU_IMAGE if request.has_gpu else _CPU_IMAGE)
    if urn.count(":") != 3:
        raise ProviderError("invalid", "", f"azure: image {urn!r}: expected publisher:offer:sku:version or an id")
    return dict(zip(("publisher", "offer", "sku", "version"), urn.split(":"), strict=True))


def refuse_retired(size: str) -> None:
    """Raise ProviderError for a size that the catalog knows as withdrawn."""
    try:
        catalog().refuse_retired(f"azure/{size}")
    except ValueError as error:
        raise ProviderError("invalid", "", f"azure: {error}") from error
