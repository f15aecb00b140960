"""The JSON file of `rankwise benchmark --config`: nodes, defaults of measuring, and of each cloud.

    file = read_benchmark_file(Path("my_config.json"))
    file.target("aws-g4dn.xlarge")              # a target of a study, in the regions that the file names

{"nodes": [{"id": "local", "type": "local"}, {"id": "aws-a", "type": "aws", "instance_type": "g4dn.xlarge"}],
 "benchmark_defaults": {"repeats": 3, "batch_sizes": [1, 2], "timeout_seconds": 600},
 "cloud_defaults": {"aws": {"region": "us-west-2"}, "gcp": {"zone": "us-central1-a"}, "azure": {"location": "eastus"}}}
"""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from configs.common.base import Frozen
from configs.common.booleans import boolean_problems
from configs.common.files.reading import read_json_object, read_model
from configs.hardware.catalog import HOME_REGIONS
from configs.hardware.node_names import Cloud, NodeName, parse_node_name
from configs.targets.rented import RentedTarget
from configs.targets.ssh_host import SshHost
from configs.targets.target import LocalTarget, SshTarget, Target

_ALWAYS = {"id", "type", "name"}
_OF_HOSTS = {"host", "user", "key", "port", "known_hosts", "folder", "python"}
_OF_CLOUDS = {"instance_type", "machine_type", "vm_size", "region", "zone", "location", "ssh_from", "python"}
_USED = {"local": _ALWAYS, "ssh": _ALWAYS | _OF_HOSTS} | dict.fromkeys(("aws", "gcp", "azure"), _ALWAYS | _OF_CLOUDS)
"""Fields of a node by its type; `name` is for the reader of the file."""


class _Spelt(Frozen):
    """What clouds call by different names: an instance, and where it is."""

    instance_type: str | None = None
    machine_type: str | None = Field(None, description="as GCP calls it")
    vm_size: str | None = Field(None, description="as Azure calls it")
    region: str | None = None
    location: str | None = Field(None, description="as Azure calls the region")
    zone: str | None = None
    ssh_from: str | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for names in (("instance_type", "machine_type", "vm_size"), ("region", "location")):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} are one thing. Leave one out")
        return self

    @property
    def instance(self) -> str | None:
        """The instance by any of its three names."""
        return self.instance_type or self.machine_type or self.vm_size

    @property
    def place(self) -> str | None:
        """The region by either of its names."""
        return self.region or self.location


class NodeEntry(_Spelt):
    """One node. `id` is what --nodes names; `type` local, ssh, or a cloud with its instance."""

    id: str = Field(min_length=1, max_length=64)
    type: Literal["local", "ssh", "aws", "gcp", "azure"]
    name: str | None = None
    host: str | None = Field(None, description="of type ssh: name or address; none: the id")
    user: str | None = None
    key: str | None = None
    port: PositiveInt | None = None
    known_hosts: str | None = None
    folder: str | None = None
    python: str | None = Field(None, description="interpreter that has the libraries; none: they are installed")

    @model_validator(mode="after")
    def _every_field_is_used(self) -> "NodeEntry":
        unused = [name for name, value in self if value is not None and name not in _USED[self.type]]
        if unused:
            raise ValueError(f"{self.id}.{unused[0]}: not a field of nodes of type {self.type}. Leave it out")
        return self


class BenchmarkDefaults(Frozen):
    """What the command line may override."""

    repeats: PositiveInt | None = None
    batch_sizes: list[PositiveInt] | None = None
    timeout_seconds: PositiveFloat | None = None


class CloudDefaults(_Spelt):
    """Where a cloud is asked, and for which instance where a node names none."""

    python: str | None = None


class BenchmarkFile(Frozen):
    """The whole file; every part may be left out."""

    nodes: list[NodeEntry] = []
    benchmark_defaults: BenchmarkDefaults = BenchmarkDefaults()
    cloud_defaults: dict[Cloud, CloudDefaults] = {}

    def target(self, name: str, region: str | None = None) -> Target:
        """Return the target that a node's id names, or an instance's name. Raises ValueError for neither.

        region: where an instance is wanted that no node of the file is; None: where the file says.
        """
        entry = next((node for node in self.nodes if node.id == name), None)
        if entry is None and name == "local":
            return LocalTarget()
        if entry is None and name.startswith("ssh:"):
            entry = NodeEntry(id=name.removeprefix("ssh:"), type="ssh")
        if entry is None:
            node = parse_node_name(name)
            return self._rented(name, node, NodeEntry(id=name, type=node.provider, region=region))
        if entry.type == "local":
            return LocalTarget(name=entry.id)
        if entry.type == "ssh":
            return _ssh(entry)
        instance = entry.instance or self._defaults(entry.type).instance
        if instance is None:
            raise ValueError(f"nodes: {entry.id}: no instance_type, and none in cloud_defaults.{entry.type}")
        return self._rented(entry.id, parse_node_name(f"{entry.type}/{instance}"), entry)

    def _defaults(self, cloud: Cloud) -> CloudDefaults:
        return self.cloud_defaults.get(cloud, CloudDefaults())

    def _rented(self, name: str, node: NodeName, entry: NodeEntry) -> RentedTarget:
        own = self._defaults(node.provider)
        zone = entry.zone
        region = entry.place or region_of_zone(node.provider, zone)
        if zone is None and (region is None or region_of_zone(node.provider, own.zone) in (None, region)):
            zone = own.zone  # a default zone of another region than the node's would leave nothing to ask
        region = region or own.place or region_of_zone(node.provider, zone)
        fields: dict[str, Any] = {
            "kind": node.provider,
            "name": re.sub(r"[^A-Za-z0-9._+-]", "-", name),
            "instance": node.instance,
            "regions": [region or HOME_REGIONS[node.provider]],
            "zones": [zone] if zone else [],
            "python": entry.python or own.python,
            "ssh_from": entry.ssh_from or own.ssh_from,
        }
        return RentedTarget.model_validate(fields)


def region_of_zone(cloud: Cloud, zone: str | None) -> str | None:
    """Return the region of a zone: `us-central1-a` is in us-central1, `us-east-1a` in us-east-1. Azure's: unknown."""
    if zone is None or cloud == "azure":
        return None
    return zone.rpartition("-")[0] if cloud == "gcp" else zone.rstrip("abcdefghij")


def _ssh(entry: NodeEntry) -> SshTarget:
    host = SshHost(host=entry.host or entry.id, name=entry.id, user=entry.user, key=entry.key, port=entry.port)
    given = {"known_hosts": entry.known_hosts, "folder": entry.folder, "python": entry.python}
    known = {name: value for name, value in given.items() if value is not None}
    return SshTarget.model_validate({"kind": "ssh", "name": entry.id, "hosts": [host], **known})


def read_benchmark_file(path: Path) -> BenchmarkFile:
    """Read the file. Raises ValueError naming the field, FileNotFoundError."""
    file = read_model(path, BenchmarkFile)
    if problems := boolean_problems(read_json_object(path), file, hint=""):
        raise ValueError(f"{path}: {problems[0]}")
    return file
