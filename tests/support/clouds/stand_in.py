"""A cloud that is a list: what giving back, reaping and renting do with it, without a network."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from configs.common.base import write_atomically
from tasks.providers import renting, study_nodes
from tasks.providers.giving_back import ReapResult, Teardown, remove_expired
from tasks.providers.ladder import RentalOffer
from tasks.providers.leases import open_ledger
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, Provider, ProviderError, RentalLease, RentalRequest, Resource, Rung
from tasks.providers.renting import rent

REGION = "us-east-1"
REQUEST = RentalRequest(provider="aws", instance="g4dn.xlarge", nodes=2, regions=(REGION,), ssh_from="203.0.113.7/32")
SPOT_REQUEST = RentalRequest(
    provider="aws",
    instance="g4dn.xlarge",
    regions=("us-east-1", "us-west-2"),
    market="spot",
    fall_back="on_demand",
    ssh_from="203.0.113.7/32",
)
ZONES = {"us-east-1": ["us-east-1a", "us-east-1b"], "us-west-2": ["us-west-2a"]}
NODES = [
    Node(id=f"i-{place}", region=REGION, state="running", public_address=f"198.51.100.{place}") for place in range(2)
]


class Cloud:
    """A cloud with a list of resources, which end at once."""

    name, default_user = "aws", "ubuntu"

    def __init__(self, *there: Resource) -> None:
        self.there = list(there)

    def regions(self) -> list[str]:
        return [REGION]

    def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
        return [each for each in self.there if each.region in regions and run in (None, each.run)]

    def delete(self, resource: Resource) -> None:
        self.there.remove(resource)

    def extend(self, resource: Resource, expires_at: int) -> None:
        place = self.there.index(resource)
        self.there[place] = resource.model_copy(update={"expires_at": expires_at})


class LateCloud(Cloud):
    """One whose create calls end as `problems` say, or well; the machine of an unanswered one appears 30 s later.

    A try without an answer takes half a minute, too. `now`: its clock, which stands still otherwise.
    """

    def __init__(self, problems: Sequence[Any]) -> None:
        super().__init__()
        self.now, self.problems = 1_000_000.0, list(problems)
        self._late: list[tuple[float, Resource]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def prepare(self, lease: RentalLease, region: str) -> None:
        pass

    def create(self, lease: RentalLease, user_data: str, rung: Rung, token: str) -> list[Node]:
        if self.problems:
            if self.problems[0] == "transient":
                self.now += 30
                late = resource("instance").model_copy(update={"id": "late", "region": rung.region})
                self._late.append((self.now + 30, late))
            raise ProviderError(self.problems.pop(0), "", "the connection was closed")
        self.there += [machine(node.id, rung.region) for node in NODES]
        return self.nodes(lease.run, rung.region)

    def nodes(self, run: str, region: str) -> list[Node]:
        up = {each.id for each in self.tagged([region], run)}
        return [node.model_copy(update={"region": region}) for node in NODES if node.id in up]

    def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
        self.there += [each for moment, each in self._late if moment <= self.now]
        self._late = [item for item in self._late if item[0] > self.now]
        return super().tagged(regions, run)


class Google(Cloud):
    name = "gcp"


def resource(kind: Any, run: str = "r", left: float = 3600) -> Resource:
    return Resource(provider="aws", kind=kind, id=f"{kind}-{run}", region=REGION, run=run,
                    expires_at=int(time.time() + left))  # fmt: skip


def machine(id: str, region: str) -> Resource:
    return resource("instance").model_copy(update={"id": id, "region": region})


def rental(folder: Path, expires_at: int) -> RentalLease:
    """A run whose two nodes are up."""
    lease = RentalLease(study="s", run=folder.name, owner="o", expires_at=expires_at, request=REQUEST)
    with open_ledger(folder) as ledger:
        ledger.write("opened", attempt=1, expires_at=expires_at)
        ledger.write("prepare", region=REGION)
        ledger.write("ready", nodes=[node.model_dump() for node in NODES])
    write_atomically(folder / "lease.json", lease.model_dump_json())
    return lease


def rented(cloud: LateCloud, folder: Path, rungs: list[Rung]) -> list[Node]:
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(cloud.now) + 3600, request=REQUEST)
    limits = Limits(sleep=cloud.sleep, teardown=Teardown(sleep=cloud.sleep))
    return rent(cast(Provider, cloud), lease, RentalOffer(rungs, []), folder, lambda _: None, limits)


def reap(cloud: Cloud, rented: Path) -> ReapResult:
    patience = Teardown(limit_seconds=1, settle_seconds=0, sleep=lambda _: None)
    return remove_expired([cast(Provider, cloud)], rented, False, False, lambda _: None, patience)


def clouds(monkeypatch: pytest.MonkeyPatch, *those: Cloud) -> None:
    by_name = {each.name: each for each in those}
    for module in (renting, study_nodes):
        monkeypatch.setattr(module, "provider_named", lambda name: by_name[name])
