"""The bodies of requests to Google Compute Engine. Pure functions of a lease and a rung.

gang(lease, user_data, rung, token, project)      # of instances.bulkInsert: all nodes or none
firewall_rules(lease, region)                     # SSH from the caller, all inside, nothing else
"""

import hashlib
import re
from typing import Any

from tasks.providers.boot import startup_script
from tasks.providers.clouds import longest_lease_seconds
from tasks.providers.rental import ProviderError, RentalLease, RentalRequest, Rung

_GPU_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580"
_CPU_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts"
"""https://cloud.google.com/deep-learning-vm/docs/images. Startup scripts run on both."""
_ACCELERATORS = {
    "t4": "nvidia-tesla-t4",
    "p4": "nvidia-tesla-p4",
    "p100": "nvidia-tesla-p100",
    "v100": "nvidia-tesla-v100",
}
"""Those that attach to N1: https://cloud.google.com/compute/docs/gpus."""
_HYPERDISK = re.compile(r"(a3-ultragpu|a4|a4x|c4|c4a|c4d|g4|n4)-")
"""Families that take no persistent disks: https://cloud.google.com/compute/docs/disks/hyperdisks."""
_NOT_PLACED = re.compile(r"(e2|f1|g1|n1|t2a|t2d)-")
"""Families without compact placement: https://cloud.google.com/compute/docs/instances/placement-policies-overview."""
_REGION = "rankwise-region"
_PRIORITY = {"ssh": 800, "inside": 800, "others": 900}
"""Below 1000, at which the default network admits SSH from everywhere."""


def accelerator_of(name: str) -> tuple[str, int] | None:
    """Return Google's accelerator type and the number of `n1-standard-8+2xt4`; None: nothing is attached."""
    attached = name.partition("+")[2]
    if not attached:
        return None
    count, device = re.fullmatch(r"(?:(\d+)x)?(.+)", attached).groups()  # type: ignore[union-attr]
    family = device.partition("-")[0]
    if family not in _ACCELERATORS:
        known = ", ".join(_ACCELERATORS)
        raise ProviderError("invalid", "", f"{name}: {device} cannot be attached to a machine of GCP; expected {known}")
    return _ACCELERATORS[family], int(count or 1)


def is_placed(request: RentalRequest) -> bool:
    """Whether a compact placement policy is used. Raises ProviderError where it was asked for and there is none."""
    if not _NOT_PLACED.match(request.instance):
        return request.close_together
    if request.placement:
        raise ProviderError("invalid", "", f"{request.instance}: GCP has no compact placement for it")
    return False


def tags_as_description(tags: dict[str, str], region: str) -> str:
    """Return tags and region as the description of a kind without labels."""
    return " ".join(f"{key}={value}" for key, value in {**tags, _REGION: region}.items())


def tags_in(description: str) -> tuple[dict[str, str], str]:
    """Return the tags and the region of such a description."""
    tags = dict(word.split("=", 1) for word in description.split() if "=" in word)
    return tags, tags.pop(_REGION, "")


def run_name(lease: RentalLease, region: str) -> str:
    """Name of what there is once per run and region, of at most 55 characters: firewall rules are global."""
    return f"{lease.name[:46].rstrip('-')}-{_digest(f'{lease.run}/{region}')}"


def node_names(lease: RentalLease, token: str) -> list[str]:
    """Names of the instances of one create call: another attempt never meets them."""
    stem = f"{lease.name[:46].rstrip('-')}-{_digest(token)}"
    return [f"{stem}-{place}" for place in range(lease.request.nodes)]


def firewall_rules(lease: RentalLease, region: str) -> list[dict[str, Any]]:
    """SSH from the caller's range, everything between the nodes, and nothing else, whatever the network admits."""
    name = run_name(lease, region)
    everything = [{"I_p_protocol": "all"}]
    rules: dict[str, dict[str, Any]] = {
        "ssh": {
            "source_ranges": [lease.request.ssh_from],
            "allowed": [{"I_p_protocol": "tcp", "ports": ["22"]}],
        },
        "inside": {"source_tags": [name], "allowed": everything},
        "others": {"source_ranges": ["0.0.0.0/0"], "denied": everything},
    }
    return [
        {
            "name": f"{name}-{kind}",
            "description": tags_as_description(lease.tags, region),
            "network": f"global/networks/{lease.request.network or 'default'}",
            "direction": "INGRESS",
            "priority": _PRIORITY[kind],
            "target_tags": [name],
            **rule,
        }
        for kind, rule in rules.items()
    ]


def placement_policy(lease: RentalLease, region: str) -> dict[str, Any]:
    """The compact policy of a run in a region."""
    policy = {"collocation": "COLLOCATED", "vm_count": lease.request.nodes}
    name, text = run_name(lease, region), tags_as_description(lease.tags, region)
    return {"name": name, "description": text, "group_placement_policy": policy}


def gang(lease: RentalLease, user_data: str, rung: Rung, token: str, project: str) -> dict[str, Any]:
    """All nodes of a run: min_count is count, in one zone."""
    request, names = lease.request, node_names(lease, token)
    wanted: dict[str, Any] = {
        "count": len(names),
        "min_count": len(names),
        "per_instance_properties": {name: {"name": name} for name in names},
        "instance_properties": _properties(lease, user_data, rung, project),
    }
    if rung.zone is None:
        wanted["location_policy"] = {"target_shape": "ANY_SINGLE_ZONE"}
        if request.zones:
            wanted["location_policy"]["zones"] = [{"zone": f"zones/{zone}"} for zone in request.zones]
    return wanted


def _properties(lease: RentalLease, user_data: str, rung: Rung, project: str) -> dict[str, Any]:
    request = lease.request
    machine, accelerator = request.instance.partition("+")[0], accelerator_of(request.instance)
    interface: dict[str, Any] = {"network": f"global/networks/{request.network or 'default'}"}
    if request.subnet is not None:
        interface["subnetwork"] = f"regions/{rung.region}/subnetworks/{request.subnet}"
    if request.public_address:
        interface["access_configs"] = [{"name": "External NAT", "type_": "ONE_TO_ONE_NAT"}]
    metadata = {
        "startup-script": startup_script(user_data, request.user or "ubuntu"),
        "block-project-ssh-keys": "TRUE",
        "enable-oslogin": "FALSE",
    }
    disk = {
        "labels": lease.tags,
        "disk_size_gb": request.disk_gb,
        "disk_type": "hyperdisk-balanced" if _HYPERDISK.match(machine) else "pd-balanced",
        "source_image": _image(request, project),
    }
    properties: dict[str, Any] = {
        "machine_type": machine,
        "labels": lease.tags,
        "tags": {"items": [run_name(lease, rung.region)]},
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items()]},
        "disks": [{"boot": True, "auto_delete": True, "initialize_params": disk}],
        "network_interfaces": [interface],
        "scheduling": _scheduling(request, rung),
    }
    if accelerator is not None:
        kind, count = accelerator
        properties["guest_accelerators"] = [{"accelerator_type": kind, "accelerator_count": count}]
    if is_placed(request):
        properties["resource_policies"] = [run_name(lease, rung.region)]
    if request.profile is not None:
        scopes = ["https://www.googleapis.com/auth/cloud-platform"]
        properties["service_accounts"] = [{"email": request.profile, "scopes": scopes}]
    return properties


def _scheduling(request: RentalRequest, rung: Rung) -> dict[str, Any]:
    """The market, and Google's own end of the machine: it cannot be moved later."""
    wanted: dict[str, Any] = {
        "automatic_restart": False,
        "instance_termination_action": "DELETE",
        "max_run_duration": {"seconds": longest_lease_seconds("gcp", request.hours)},
        "provisioning_model": "SPOT" if rung.market == "spot" else "STANDARD",
    }
    if rung.market == "spot" or request.has_gpu is not False:  # every machine may end at maintenance
        wanted["on_host_maintenance"] = "TERMINATE"
    return wanted


def _image(request: RentalRequest, project: str) -> str:
    """The image of the request, by path or by name in the project, or the vendor's."""
    if request.image is None:
        return _GPU_IMAGE if request.has_gpu else _CPU_IMAGE
    return request.image if "/" in request.image else f"projects/{project}/global/images/{request.image}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
