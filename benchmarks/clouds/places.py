"""Two SSH hosts and local servers of EC2, Compute Engine and Azure, and a study with two nodes of each.

with all_places(folder) as places:
    study = write_study(folder, places, STUDY)
    places.left()          # what no provider should still have
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.azure import FakeAzure
from tests.support.clouds.faults import Fault
from tests.support.clouds.gcp import FakeGcp
from tests.support.cluster.ssh_hosts import SshTestHosts, why_no_hosts

NODES = 2
_RENTED = {
    "aws": {"instance": "c7i.xlarge", "regions": ["us-east-1", "us-west-2"], "market": "spot",
            "fall_back": "on_demand"},
    "gcp": {"instance": "n1-standard-4", "regions": ["us-central1", "us-west1"]},
    "azure": {"instance": "Standard_D4s_v5", "regions": ["eastus", "westus2"]},
}  # fmt: skip


@dataclass
class Places:
    """Everything that a study may run on here."""

    lab: SshTestHosts | None
    clouds: dict[str, Any]

    def left(self) -> list[str]:
        """What the providers still have, asked of the servers themselves."""
        return [f"{name}: {each}" for name, cloud in self.clouds.items() for each in cloud.left()]

    def targets(self) -> list[dict[str, Any]]:
        """Targets of a study: two nodes of each place, side by side."""
        found = [self.lab.target(ranks_per_node=1)] if self.lab is not None else []
        for name in self.clouds:
            found.append(
                {
                    "kind": name,
                    "name": name,
                    "nodes": NODES,
                    "ranks_per_node": 1,
                    "python": sys.prefix,
                    "ssh_from": "203.0.113.7/32",
                    "max_usd_per_hour": 5,
                    "poll_seconds": 0.5,
                    **_RENTED[name],
                }
            )
        return found


def why_not() -> str | None:
    """What is missing here; None where nothing is."""
    return hosts.why_not() or why_no_hosts()


@contextmanager
def all_places(folder: Path, clouds: tuple[str, ...] = ("aws", "gcp", "azure"), lab: bool = True) -> Iterator[Places]:
    """Start the servers and hosts; the environment points vendors' clients at them until the end."""
    kinds: dict[str, Any] = {"aws": FakeAws, "gcp": FakeGcp, "azure": FakeAzure}
    with ExitStack() as stack:
        made: dict[str, Any] = {}
        for name in clouds:
            (folder / name).mkdir(parents=True)
            made[name] = stack.enter_context(kinds[name](folder / name))
        lab_hosts = None
        if lab:
            lab_hosts = SshTestHosts(folder / "lab", NODES)
            stack.callback(lab_hosts.close)
            for host in lab_hosts.hosts:
                host.boot()
        yield Places(lab_hosts, made)


def end_hosts_when_terminated() -> None:
    """Let SIGTERM end this process as an exception, so that servers, hosts and networks go with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def no_spot_in_the_first_region(places: Places) -> None:
    """Let AWS have no spot capacity in its first region: the ladder goes on in the second."""
    refused = Fault("RunInstances", code="InsufficientInstanceCapacity", region="us-east-1", market="spot")
    places.clouds["aws"].faults.append(refused)


def write_study(folder: Path, places: Places, study: dict[str, Any]) -> Path:
    """Write a study on all places; returns its path."""
    path = folder / f"{study['study']}.yaml"
    path.write_text(yaml.safe_dump({**study, "targets": places.targets()}, sort_keys=False))
    return path
