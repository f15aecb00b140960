"""Giving back and reaping by a stand-in for a cloud: what may be removed, a full disk, ends that move meanwhile."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from configs.common.base import write_atomically
from configs.targets.rented import RentedTarget
from flows.cli.main import app
from flows.cli.nodes import command
from tasks.providers import connections, giving_back, leases, renting, study_nodes
from tasks.providers.attempts import attempts_of
from tasks.providers.aws.provider import Aws
from tasks.providers.clouds import provider_named
from tasks.providers.giving_back import ReapResult, Teardown, remove_expired, why_doomed
from tasks.providers.ladder import RentalOffer
from tasks.providers.leases import is_dead, open_ledger, read_entries
from tasks.providers.readiness import waiting
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, Provider, ProviderError, RentalLease, RentalRequest, Resource, Rung
from tasks.providers.renting import RentalFailed, extend_run, give_back_run, rent
from tasks.providers.study_nodes import StudyNodes

REGION = "us-east-1"
REQUEST = RentalRequest(provider="aws", instance="g4dn.xlarge", nodes=2, regions=(REGION,), ssh_from="203.0.113.7/32")
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


def resource(kind: Any, run: str = "r", left: float = 3600) -> Resource:
    return Resource(provider="aws", kind=kind, id=f"{kind}-{run}", region=REGION, run=run,
                    expires_at=int(time.time() + left))  # fmt: skip


def reap(cloud: Cloud, rented: Path) -> ReapResult:
    patience = Teardown(limit_seconds=1, settle_seconds=0, sleep=lambda _: None)
    return remove_expired([cast(Provider, cloud)], rented, False, False, lambda _: None, patience)


def rental(folder: Path, expires_at: int) -> RentalLease:
    """A run whose two nodes are up."""
    lease = RentalLease(study="s", run=folder.name, owner="o", expires_at=expires_at, request=REQUEST)
    with open_ledger(folder) as ledger:
        ledger.write("opened", attempt=1, expires_at=expires_at)
        ledger.write("prepare", region=REGION)
        ledger.write("ready", nodes=[node.model_dump() for node in NODES])
    write_atomically(folder / "lease.json", lease.model_dump_json())
    return lease


def test_a_run_that_was_extended_outlives_a_tag_with_its_old_end(tmp_path: Path) -> None:
    cloud = Cloud(resource("instance"), resource("placement", left=-5), resource("disk", "other", left=-5))
    swept = reap(cloud, tmp_path)
    assert [each.id for each in swept.removed] == ["disk-other"] and len(swept.kept) == 2
    assert [each.id for each in cloud.there] == ["instance-r", "placement-r"]


def test_what_was_extended_while_others_were_removed_is_kept(tmp_path: Path) -> None:
    class Extended(Cloud):
        def delete(self, resource: Resource) -> None:
            super().delete(resource)
            self.there = [each.model_copy(update={"expires_at": int(time.time()) + 60}) for each in self.there]

    cloud = Extended(resource("instance", "a", left=-5), resource("instance", "b", left=-5))
    swept = reap(cloud, tmp_path)
    assert [each.id for each in cloud.there] == ["instance-b"]
    assert [each.run for each, _ in swept.doomed] == ["a"] and [each.run for each, _ in swept.kept] == ["b"]


@pytest.mark.parametrize("refusal", ["folder", "permission"])
def test_a_ledger_that_cannot_be_read_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """As that of nodes that were rented with sudo: other runs' nodes stayed up, and were paid for."""
    ledger = tmp_path / "damaged" / "ledger.jsonl"
    ledger.mkdir(parents=True)
    if refusal == "permission":  # root may read anything
        read = leases.read_entries

        def refused(path: Path) -> list[dict[str, Any]]:
            if path == ledger:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return read(path)

        monkeypatch.setattr(leases, "read_entries", refused)
    cloud = Cloud(resource("instance", "damaged"), resource("disk", "damaged"), resource("instance", "b", left=-5))
    swept = reap(cloud, tmp_path)
    assert [each.id for each in swept.removed] == ["instance-b"]
    assert [each.id for each, _ in swept.kept] == ["instance-damaged", "disk-damaged"]
    said = "Permission denied" if refusal == "permission" else "is a folder, expected a file"
    assert swept.problems == [f"run damaged: whether it has ended is not known: {ledger}: {said}"]


def test_a_run_of_another_machine_that_rents_anew_is_not_taken_for_dead(tmp_path: Path) -> None:
    cloud = Cloud(resource("instance", left=-5))
    assert len(reap(cloud, tmp_path).removed) == 1 and (tmp_path / "r").is_dir()
    assert not is_dead(tmp_path / "r")
    cloud.there = [resource("instance")]  # it goes on under the same name
    assert reap(cloud, tmp_path).removed == [] and len(cloud.there) == 1


def test_a_run_is_not_called_given_back_while_one_of_its_regions_does_not_answer(tmp_path: Path) -> None:
    class Silent(Cloud):
        silent = True

        def regions(self) -> list[str]:
            return [REGION, "eu-west-1"]

        def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
            if self.silent and "eu-west-1" in regions:
                raise ProviderError("unreachable", "", "no answer")
            return super().tagged(regions, run)

    far = resource("instance", left=-5).model_copy(update={"region": "eu-west-1", "id": "i-far"})
    cloud = Silent(resource("instance", left=-5), far)
    with open_ledger(tmp_path / "r") as ledger:
        for region, name in ((REGION, "instance-r"), ("eu-west-1", "i-far")):
            ledger.write("prepare", region=region)
            ledger.write("created", region=region, ids=[name])
    swept = reap(cloud, tmp_path)
    assert [each.id for each in swept.removed] == ["instance-r"] and [each.id for each in cloud.there] == ["i-far"]
    assert "aws instance i-far in eu-west-1" in swept.problems[-1] and "instance-r" not in swept.problems[-1]
    entries = tmp_path / "r" / "ledger.jsonl"
    assert "given_back" not in {entry["event"] for entry in read_entries(entries)}
    cloud.silent = False
    assert [each.id for each in reap(cloud, tmp_path).removed] == ["i-far"]
    assert read_entries(entries)[-1]["event"] == "given_back"


def full_disk(monkeypatch: pytest.MonkeyPatch, begins_with: bytes = b"") -> None:
    """Nothing can be written any more, from the first line that holds these bytes on."""
    full = False

    def refuse(handle: int, data: bytes) -> int:
        nonlocal full
        full = full or begins_with in data
        if not full:
            return os.write(handle, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(leases, "os", SimpleNamespace(**vars(os) | {"write": refuse}))


def test_nodes_are_given_back_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Cloud(resource("instance"), resource("disk"))
    full_disk(monkeypatch)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, Teardown()) == 2
    assert cloud.there == []


def test_nodes_are_given_back_where_the_disk_is_full_when_they_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = Cloud()

    def climb(renting_: Any, rungs: Any) -> list[Node]:
        renting_.ledger.write("prepare", region=REGION)
        cloud.there.append(resource("instance"))
        return NODES

    monkeypatch.setattr(renting._Renting, "climb", climb)
    full_disk(monkeypatch, b'"ready"')
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(time.time()) + 60, request=REQUEST)
    with pytest.raises(OSError, match="No space left"):
        rent(cast(Provider, cloud), lease, RentalOffer([], []), tmp_path / "r", lambda _: None, Limits())
    assert cloud.there == []


def test_machines_that_are_listed_late_are_given_back(tmp_path: Path) -> None:
    """AWS may leave an instance out of a list for some seconds after the create call has named it."""

    class Late(Cloud):
        asked = 0

        def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
            self.asked += 1
            found = super().tagged(regions, run)
            return found if self.asked > 2 else [each for each in found if each.kind != "instance"]

    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Late(resource("instance"), resource("placement"))
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("create", token="t", region=REGION)
        ledger.write("created", token="t", region=REGION, ids=["instance-r"])
    patience = Teardown(sleep=lambda _: None)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, patience) == 2
    assert cloud.there == [] and read_entries(tmp_path / "r" / "ledger.jsonl")[-1]["event"] == "given_back"


def test_machines_that_are_gone_are_not_waited_for_when_lists_have_settled(tmp_path: Path) -> None:
    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Cloud()
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("created", token="t", region=REGION, ids=["instance-r"])
    patience = Teardown(settle_seconds=0, limit_seconds=0)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, patience) == 0


def test_a_clock_that_was_set_back_does_not_keep_giving_back_from_its_end(tmp_path: Path) -> None:
    lease, cloud = rental(tmp_path / "r", int(time.time()) + 60), Cloud(resource("instance"))
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("create", token="unanswered", region=REGION)
        later = ledger.path.read_text().replace('"epoch": ', '"epoch": 9')  # in the future
        ledger.path.write_text(later)
    patience = Teardown(limit_seconds=5, settle_seconds=0.2)
    assert give_back_run(cast(Provider, cloud), lease, tmp_path / "r", lambda _: None, patience) == 1


def test_a_line_that_the_disk_cuts_is_an_error_and_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("opened")
        with monkeypatch.context() as nearly_full:
            short = {"write": lambda handle, data: os.write(handle, data[:9])}
            nearly_full.setattr(leases, "os", SimpleNamespace(**vars(os) | short))
            with pytest.raises(OSError, match="No space left"):
                ledger.write("create")
        ledger.write("given_back")
    assert [entry["event"] for entry in read_entries(ledger.path)] == ["opened", "given_back"]
    assert [entry["event"] for entry in ledger.entries] == ["opened", "given_back"]


def test_a_node_that_was_taken_back_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prolonged = []

    def prolong(folder: Path, user: str, address: str, lives_seconds: int) -> bool:
        prolonged.append(address)
        return address != "198.51.100.0"

    monkeypatch.setattr(renting, "prolong", prolong)
    folder, until = tmp_path / "r", int(time.time()) + 7200
    lease, cloud = rental(folder, until - 7000), Cloud(resource("instance"))
    with pytest.raises(ValueError, match="i-0 did not take"):
        extend_run(cast(Provider, cloud), lease, folder, until)
    assert sorted(prolonged) == ["198.51.100.0", "198.51.100.1"] and cloud.there[0].expires_at == until
    assert leases.read_lease(folder).expires_at == until


def test_nodes_whose_tags_keep_the_old_end_cost_money_until_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials expired in the middle of a run: the nodes went on, but the report priced them up to the old end."""

    class Expired(Cloud):
        def extend(self, resource: Resource, expires_at: int) -> None:
            raise ProviderError("auth", "ExpiredToken", "the security token is expired")

    monkeypatch.setattr(renting, "prolong", lambda *_: True)
    now, folder = int(time.time()), tmp_path / "r"
    lease = rental(folder, now + 60)
    with open_ledger(folder) as ledger:
        ledger.write("create", region=REGION, market="on_demand", usd_per_hour=2.0)
        ledger.write("created", region=REGION, ids=["i-0", "i-1"])
    with pytest.raises(ProviderError, match="expired"):
        extend_run(cast(Provider, Expired(resource("instance"))), lease, folder, now + 7200)
    entries = read_entries(folder / "ledger.jsonl")
    (attempt,) = attempts_of(entries, now + 3600)
    assert attempt.seconds == pytest.approx(3600, abs=60) and attempt.usd(2) == pytest.approx(4.0, rel=0.02)
    with open_ledger(folder) as ledger:
        assert not leases.is_over(ledger)


@pytest.mark.parametrize(("given", "looks"), [({}, 2.0), ({"poll_seconds": 30}, 30.0)])
def test_rented_nodes_are_looked_at_as_often_as_their_target_says(
    tmp_path: Path, given: dict[str, Any], looks: float
) -> None:
    """`poll_seconds` was taken and never used."""
    rental(tmp_path / "r", int(time.time()) + 3600)
    (tmp_path / "r" / "host_ed25519.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI comment\n")
    wanted = {"kind": "aws", "instance": REQUEST.instance, "nodes": 2, "regions": [REGION], **given}
    hosts = study_nodes.hosts_of_nodes(RentedTarget.model_validate(wanted), NODES, tmp_path / "r", "ubuntu")
    assert hosts.poll_seconds == looks and [host.name for host in hosts.hosts] == ["i-0", "i-1"]


def test_giving_back_waits_for_an_extension_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud, begun = Cloud(resource("instance")), threading.Event()

    def prolong(*_: Any) -> bool:
        begun.set()
        time.sleep(0.3)
        return True

    monkeypatch.setattr(study_nodes, "provider_named", lambda _: cloud)
    monkeypatch.setattr(renting, "prolong", prolong)
    monkeypatch.setattr(
        study_nodes, "mark_used", lambda _: os.utime(tmp_path / "away")
    )  # a folder that cannot be written
    target = RentedTarget.model_validate(
        {"kind": "aws", "name": "g4", "instance": "g4dn.xlarge", "regions": [REGION], "ssh_from": "203.0.113.7/32"}
    )
    nodes = StudyNodes(target, "s", tmp_path, tmp_path, lambda _: None, lambda: None)
    rental(nodes._folder, int(time.time()) + 60)
    cloud.there = [resource("instance", nodes.name)]
    nodes.target = target.model_copy(update={"lease_hours": 0.0001})
    monkeypatch.setattr(nodes, "_next_end", lambda: int(time.time()) + 60)
    nodes._keeper = threading.Thread(target=nodes._keep, daemon=True)
    nodes._keeper.start()
    assert begun.wait(600)
    nodes.give_back()
    assert cloud.there == [] and read_entries(nodes._folder / "ledger.jsonl")[-1]["event"] == "given_back"


@pytest.mark.parametrize(("left", "asleep"), [(3600, 1801), (600, 0), (12 * 3600, 1801)])
def test_a_lease_is_extended_when_half_of_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, asleep: float
) -> None:
    """Also where this machine slept meanwhile, and where renting took most of it; to no earlier end than a person's."""
    extended, clock, ends = threading.Event(), [0.0], list[int]()

    def extend(provider: Any, lease: Any, folder: Path, expires_at: int) -> None:
        ends.append(expires_at)
        extended.set()

    monkeypatch.setattr(study_nodes, "provider_named", lambda _: Cloud())
    monkeypatch.setattr(study_nodes, "extend_run", extend)
    monkeypatch.setattr(study_nodes, "_MARK_SECONDS", 0.01)
    monkeypatch.setattr(study_nodes, "_asleep_too", lambda: clock[0])
    target = RentedTarget.model_validate({"kind": "aws", "instance": "g4dn.xlarge", "regions": [REGION]})
    nodes = StudyNodes(target, "s", tmp_path, tmp_path, lambda _: None, lambda: None)
    rental(nodes._folder, int(time.time()) + left)
    nodes._keeper = threading.Thread(target=nodes._keep, daemon=True)
    nodes._keeper.start()
    assert not asleep or not extended.wait(0.2)
    clock[0] = asleep
    assert extended.wait(600)
    nodes._end_extending()
    assert ends[0] == pytest.approx(time.time() + max(left, 3600), abs=60)


@pytest.mark.parametrize(
    ("kind", "market", "cost"),
    [
        ("aws", "on_demand", "for at most 2.00 USD: `rankwise"),
        ("aws", "spot", "for about 2.00 USD: `rankwise"),
        ("azure", "on_demand", "for 2.00 USD and are billed until they are given back: `"),
    ],
)
def test_what_kept_nodes_cost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, market: str, cost: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(study_nodes, "provider_named", lambda _: Cloud())
    monkeypatch.setattr(study_nodes, "extend_run", lambda *_: None)
    wanted = {"kind": kind, "instance": "x", "regions": [REGION], "keep": "1h", "nodes": 2}
    nodes = StudyNodes(RentedTarget.model_validate(wanted), "s", tmp_path, tmp_path, said.append, lambda: None)
    rental(nodes._folder, int(time.time()) + 3600)
    with open_ledger(nodes._folder) as ledger:
        ledger.write("create", region=REGION, market=market, usd_per_hour=1.0)
    assert nodes.keep()
    assert cost in said[0] and time.strftime("until %Y-") in said[0]


def test_machines_that_are_billed_when_off_cost_money_until_they_are_given_back() -> None:
    entries = [
        {"event": "opened", "epoch": 0, "expires_at": 3600},
        {"event": "create", "region": "r", "market": "spot", "usd_per_hour": 2.0, "epoch": 0},
        {"event": "created", "epoch": 0},
    ]
    given_back = [*entries, {"event": "given_back", "epoch": 7200}]
    assert [attempts_of(given_back, 9000, off)[0].seconds for off in (False, True)] == [3600, 7200]
    assert [attempts_of(entries, 9000, off)[0].seconds for off in (False, True)] == [3600, 9000]


def test_a_placement_group_is_extended_by_its_id() -> None:
    calls: list[Any] = []
    groups = [{"GroupName": "rankwise-r", "GroupId": "pg-1"}, {"GroupName": "other", "GroupId": "pg-2"}]
    ec2 = SimpleNamespace(
        describe_placement_groups=lambda Filters: {"PlacementGroups": groups},
        create_tags=lambda Resources, Tags: calls.append((Resources, Tags[0]["Value"])),
    )
    aws = Aws()
    aws._clients[REGION] = ec2
    aws.extend(resource("placement").model_copy(update={"id": "rankwise-r"}), 77)
    assert calls == [(["pg-1"], "77")]


def test_clients_of_many_regions_are_made_one_at_a_time() -> None:
    """`reap` asks eight regions at once, and a session of boto3 may not be used by two threads."""
    making, met = threading.Lock(), list[str]()

    def client(name: str, **_: Any) -> object:
        assert making.acquire(blocking=False), "two at once"
        time.sleep(0.02)
        met.append(name)
        making.release()
        return object()

    aws = Aws()
    aws._session = SimpleNamespace(client=client)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(aws._ec2, ["a", "b", "c", "d", "a"]))
    assert met == ["ec2"] * 4


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nosuch")
    with pytest.raises(ValueError, match=r"aws: .*nosuch.*AWS_PROFILE"):
        provider_named("aws")


def test_an_answer_in_another_encoding_is_shown(tmp_path: Path) -> None:
    done = connections._run(["printf", r"caf\351"])
    assert done is not None and done.stdout == "caf�"


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


def machine(id: str, region: str) -> Resource:
    return resource("instance").model_copy(update={"id": id, "region": region})


@pytest.fixture
def late_cloud(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Any]], LateCloud]:
    def made(problems: Sequence[Any]) -> LateCloud:
        cloud = LateCloud(problems)
        stand_in = SimpleNamespace(time=lambda: cloud.now, monotonic=lambda: cloud.now)
        for module in (renting, waiting, leases, giving_back):
            monkeypatch.setattr(module, "time", stand_in)
        for name in ("make_keys", "remove_keys"):
            monkeypatch.setattr(renting, name, lambda folder: None)
        monkeypatch.setattr(renting, "user_data", lambda folder, lives_seconds: "")
        monkeypatch.setattr(waiting, "write_known_hosts", lambda folder, addresses: None)
        monkeypatch.setattr(waiting, "probe", lambda folder, user, address: "ready")
        return cloud

    return made


def rented(cloud: LateCloud, folder: Path, rungs: list[Rung]) -> list[Node]:
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(cloud.now) + 3600, request=REQUEST)
    limits = Limits(sleep=cloud.sleep, teardown=Teardown(sleep=cloud.sleep))
    return rent(cast(Provider, cloud), lease, RentalOffer(rungs, []), folder, lambda _: None, limits)


@pytest.mark.parametrize("problems", [("transient",) * 3, ("transient", "capacity")])
def test_a_machine_of_the_last_unanswered_try_is_waited_for_and_given_back(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud], problems: tuple[Any, ...]
) -> None:
    """A try takes half a minute to fail, and takes effect half a minute later, whatever the next one is told."""
    cloud = late_cloud(problems)
    with pytest.raises(RentalFailed):
        rented(cloud, tmp_path / "r", [Rung(region=REGION)])
    assert cloud.problems == [] and cloud.there == []


@pytest.mark.parametrize(
    ("problems", "other"),
    [
        (("transient",) * 3, Rung(region="us-west-2")),
        (("transient", "capacity"), Rung(region=REGION, zone="us-east-1b")),
        (("transient", "quota"), Rung(region="us-west-2")),
    ],
)
def test_a_machine_that_appears_late_is_removed_where_nodes_are_found_at_another_place(
    tmp_path: Path,
    late_cloud: Callable[[Sequence[Any]], LateCloud],
    problems: tuple[Any, ...],
    other: Rung,
) -> None:
    """Nobody would look for it before the lease is over."""
    cloud = late_cloud(problems)
    nodes = rented(cloud, tmp_path / "r", [Rung(region=REGION), other])
    cloud.sleep(300)
    left = cloud.tagged([REGION, other.region])
    assert [(each.id, each.region) for each in left] == [(node.id, other.region) for node in nodes]


def test_nodes_end_with_their_lease_however_long_other_places_took(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lived, and cost money, for so much longer than was said and than their tags say."""
    cloud, ends, lives = late_cloud(("transient",) * 3), list[float](), list[int]()

    def planted(folder: Path, lives_seconds: int) -> str:
        lives.append(lives_seconds)
        ends.append(cloud.now + lives_seconds)
        return ""

    monkeypatch.setattr(renting, "user_data", planted)
    rented(cloud, tmp_path / "r", [Rung(region="us-west-2"), Rung(region=REGION)])
    assert ends == [leases.read_lease(tmp_path / "r").expires_at] * 2 and lives[0] - lives[1] >= 90


def test_nodes_of_another_machine_outlive_a_run_of_their_name_that_has_ended_here(tmp_path: Path) -> None:
    rental(tmp_path / "r", int(time.time()) + 60)
    with open_ledger(tmp_path / "r") as ledger:
        ledger.write("given_back", removed=[])
    theirs = resource("instance").model_copy(update={"owner": "ada-laptop"})
    cloud = Cloud(theirs)
    assert why_doomed(theirs, tmp_path, False, time.time()) is None
    assert reap(cloud, tmp_path).removed == [] and cloud.there == [theirs]
    cloud.there = [resource("disk").model_copy(update={"owner": "o"})]  # appeared after its run had given back
    assert [each.id for each in reap(cloud, tmp_path).removed] == ["disk-r"]


@pytest.mark.parametrize("swept", [False, True])
def test_nodes_of_another_machine_that_have_the_same_name_are_left_alone(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud], swept: bool
) -> None:
    """Whether this machine has reaped a run of that name before or not."""
    cloud = late_cloud(("invalid",))  # what EC2 says of a token that was used with other user data
    theirs = resource("instance").model_copy(update={"id": "theirs", "owner": "ada-laptop"})
    cloud.there = [theirs]
    if swept:
        with open_ledger(tmp_path / "r") as ledger:
            ledger.write("given_back", removed=[])
    with pytest.raises(RentalFailed, match=r"^r: ada-laptop has rented under this name, from another machine"):
        rented(cloud, tmp_path / "r", [Rung(region="us-west-2"), Rung(region=REGION)])
    assert cloud.there == [theirs] and cloud.problems == ["invalid"]
    assert not is_dead(tmp_path / "r") and not (tmp_path / "r" / "lease.json").exists()


def test_a_name_that_was_given_back_elsewhere_is_free_again(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud]
) -> None:
    """EC2 remembers a token for a day after its nodes are gone, and refuses it with another rental's user data."""
    tokens: list[str] = []
    for machine_folder in ("one", "other"):
        cloud = late_cloud(())
        cloud.now += 7200 * len(tokens)
        rented(cloud, tmp_path / machine_folder / "r", [Rung(region=REGION)])
        entries = read_entries(tmp_path / machine_folder / "r" / "ledger.jsonl")
        tokens += [entry["token"] for entry in entries if entry["event"] == "create"]
    assert len(tokens) == len(set(tokens)) == 2


def test_a_name_is_free_again_when_its_nodes_have_ended_with_their_lease(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud]
) -> None:
    """They were said to be up already; what is left of them goes before others are rented."""
    cloud = late_cloud(())
    rented(cloud, tmp_path / "r", [Rung(region=REGION)])
    cloud.there.append(resource("security_group"))
    cloud.now += 3500
    with pytest.raises(ValueError, match=r"^r: its nodes are up already$"):
        rented(cloud, tmp_path / "r", [Rung(region=REGION)])
    cloud.now += 200
    assert len(rented(cloud, tmp_path / "r", [Rung(region=REGION)])) == 2
    assert [each.id for each in cloud.there] == ["i-0", "i-1"]
    events = [entry["event"] for entry in read_entries(tmp_path / "r" / "ledger.jsonl")]
    assert events.count("given_back") == 1 and events[-1] == "ready"


def test_nothing_is_rented_where_it_could_not_be_listed_to_be_given_back(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role that may create and end machines, but not list one of the kinds: they ran on until their lease ended."""
    cloud = late_cloud(())

    def tagged(regions: Sequence[str], run: str | None = None) -> list[Resource]:
        raise ProviderError("auth", "UnauthorizedOperation", "not authorized to perform: ec2:DescribeKeyPairs")

    monkeypatch.setattr(cloud, "tagged", tagged)
    with pytest.raises(
        ValueError, match=r"^aws us-east-1: UnauthorizedOperation: .*DescribeKeyPairs\nNothing is rented"
    ):
        rented(cloud, tmp_path / "r", [Rung(region=REGION)])
    assert cloud.there == [] and read_entries(tmp_path / "r" / "ledger.jsonl") == []


def test_a_region_that_does_not_answer_keeps_nobody_from_renting(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = late_cloud(())
    listed = cloud.tagged
    problems = [ProviderError("transient", "", "no answer")]

    def tagged(regions: Sequence[str], run: str | None = None) -> list[Resource]:
        if problems:
            raise problems.pop()
        return listed(regions, run)

    monkeypatch.setattr(cloud, "tagged", tagged)
    assert len(rented(cloud, tmp_path / "r", [Rung(region=REGION)])) == 2 and problems == []


class Google(Cloud):
    name = "gcp"


def clouds(monkeypatch: pytest.MonkeyPatch, *those: Cloud) -> None:
    by_name = {each.name: each for each in those}
    for module in (renting, study_nodes):
        monkeypatch.setattr(module, "provider_named", lambda name: by_name[name])


def test_nodes_of_a_killed_run_are_given_back_by_their_own_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study names another cloud by now: asked for the regions of the first one, it has nothing to give back."""
    amazon, google = Cloud(), Google()
    clouds(monkeypatch, amazon, google)
    wanted = {"kind": "gcp", "instance": "g2-standard-4", "regions": ["us-central1"], "ssh_from": REQUEST.ssh_from}
    for end in ("_taken_over", "give_back"):
        target = RentedTarget.model_validate({**wanted, "name": end.strip("_")})
        nodes = StudyNodes(target, "s", tmp_path, tmp_path, lambda _: None, lambda: None)
        rental(nodes._folder, int(time.time()) + 3600)
        amazon.there = [resource("instance", nodes.name)]
        assert not (nodes._taken_over(None) if end == "_taken_over" else nodes.give_back())
        assert amazon.there == [] and read_entries(nodes._folder / "ledger.jsonl")[-1]["event"] == "given_back"


def test_what_was_begun_at_another_cloud_is_given_back_there_before_nodes_are_rented(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither cloud is asked for the regions of the other."""
    google, amazon = late_cloud(()), Cloud(resource("instance"))
    monkeypatch.setattr(google, "name", "gcp", raising=False)
    clouds(monkeypatch, amazon, google)
    folder = tmp_path / "r"
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(google.now) + 3600, request=REQUEST)
    with open_ledger(folder) as ledger:
        ledger.write("opened", attempt=1, expires_at=lease.expires_at)
        ledger.write("prepare", provider="aws", region=REGION)
        ledger.write("created", region=REGION, ids=["instance-r"])
    write_atomically(folder / "lease.json", lease.model_dump_json())
    request = REQUEST.model_copy(update={"provider": "gcp", "regions": ("us-central1",)})
    lease = lease.model_copy(update={"request": request})
    limits = Limits(sleep=google.sleep, teardown=Teardown(sleep=google.sleep))
    offer = RentalOffer([Rung(region="us-central1")], [])
    rent(cast(Provider, google), lease, offer, folder, lambda _: None, limits)
    assert amazon.there == [] and len(google.there) == 2
    with open_ledger(folder) as ledger:
        assert [giving_back.regions_of(ledger, name) for name in ("aws", "gcp")] == [[REGION], ["us-central1"]]


def test_a_cloud_that_cannot_be_asked_any_more_is_not_said_to_have_nothing_left(
    tmp_path: Path, late_cloud: Callable[[Sequence[Any]], LateCloud], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose clients are not installed here."""

    def missing(name: str) -> Provider:
        raise ValueError(f"{name}: its clients are missing")

    cloud = late_cloud(())
    monkeypatch.setattr(renting, "provider_named", missing)
    request = REQUEST.model_copy(update={"provider": "azure"})
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(cloud.now) + 3600, request=request)
    folder = tmp_path / "r"
    with open_ledger(folder) as ledger:
        ledger.write("prepare", provider="azure", region="eastus")
    write_atomically(folder / "lease.json", lease.model_dump_json())
    with pytest.raises(ValueError, match="azure: its clients are missing"):
        rented(cloud, folder, [Rung(region=REGION)])
    assert [entry["event"] for entry in read_entries(folder / "ledger.jsonl")] == ["prepare"] and cloud.there == []


@pytest.mark.parametrize(
    ("cap", "refusal", "again"),
    [
        (None, None, True),
        (4.0, None, True),
        (3.9, None, False),  # lowered since
        (None, "Google deletes it at 12:00:00 UTC; rent anew for longer", False),  # the run ended with this error
        (None, "i-1 did not take the new end", False),  # and with this one
        (None, "i-1 (198.51.100.1) shows 0 of 1 GPU: GPU is lost", False),  # it would be measured on its cores
    ],
)
def test_nodes_of_an_earlier_run_are_used_again_within_their_limits_or_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: float | None, refusal: str | None, again: bool
) -> None:
    class Limited(Cloud):
        def nodes(self, run: str, region: str) -> list[Node]:
            return NODES

        def extend(self, resource: Resource, expires_at: int) -> None:
            if refusal is not None and "Google" in refusal:
                raise ProviderError("invalid", "", refusal)

    cloud, said = Limited(), list[str]()
    clouds(monkeypatch, cloud)
    missed = [NODES[1].public_address] if refusal is not None and "new end" in refusal else []
    lost = {"198.51.100.1": "shows 0 of 1 GPU: GPU is lost"} if refusal is not None and "GPU" in refusal else {}
    monkeypatch.setattr(study_nodes, "lacking_gpus", lambda *_: lost)
    monkeypatch.setattr(renting, "prolong", lambda folder, user, address, seconds: address not in missed)
    monkeypatch.setattr(study_nodes, "probe", lambda *_: "ready")
    wanted = {
        "kind": "aws",
        "instance": REQUEST.instance,
        "nodes": 2,
        "regions": [REGION],
        "ssh_from": REQUEST.ssh_from,
    }
    target = RentedTarget.model_validate(wanted | {"max_usd_per_hour": cap})
    nodes = StudyNodes(target, "s", tmp_path, tmp_path, said.append, lambda: None)
    rental(nodes._folder, int(time.time()) + 3600)
    with open_ledger(nodes._folder) as ledger:
        ledger.write("create", token="t", provider="aws", region=REGION, market="on_demand", usd_per_hour=2.0)
        ledger.write("created", token="t", region=REGION, ids=[f"instance-{nodes.name}"])
    cloud.there = [resource("instance", nodes.name)]
    assert nodes._taken_over(None) == (NODES if again else [])
    assert bool(cloud.there) == again
    assert refusal is None or refusal in said[0]


def test_nodes_are_extended_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that does not answer takes 20 s: sixteen of them kept the lease busy for longer than giving back waits."""
    together = threading.Barrier(len(NODES))

    def silent(*_: Any) -> bool:
        together.wait(10)
        return False

    monkeypatch.setattr(renting, "prolong", silent)
    lease = rental(tmp_path / "r", int(time.time()) + 60)
    with pytest.raises(ValueError, match="r: i-0, i-1 did not take the new end"):
        extend_run(cast(Provider, Cloud()), lease, tmp_path / "r", int(time.time()) + 600)


@pytest.mark.parametrize("ended_by", ["the next run", "reap", "nodes down"])
def test_what_a_killed_run_left_up_was_unused_until_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """It was killed an hour before, and its lease ended a minute ago: the report called all of it used."""
    cloud, now = Cloud(), time.time()
    clouds(monkeypatch, cloud)
    wanted = {"kind": "aws", "instance": "g5.xlarge", "regions": [REGION], "ssh_from": REQUEST.ssh_from}
    nodes = StudyNodes(RentedTarget.model_validate(wanted), "s", tmp_path, tmp_path, lambda _: None, lambda: None)
    lease, folder = rental(nodes._folder, int(now - 60)), nodes._folder
    asked = {"event": "create", "token": "t", "region": REGION, "market": "spot", "usd_per_hour": 1.0}
    entries = [
        {"event": "opened", "epoch": now - 7200, "expires_at": int(now - 60)},
        {**asked, "epoch": now - 7200},
        {"event": "created", "epoch": now - 7100, "token": "t", "region": REGION, "ids": ["i-0", "i-1"]},
        {"event": "ready", "epoch": now - 7000, "nodes": [node.model_dump() for node in NODES]},
    ]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with study_nodes.in_use(folder):
        os.utime(folder / "in_use.lock", (now - 3600, now - 3600))
    cloud.there = [resource("instance", nodes.name, left=-60)]
    if ended_by == "the next run":
        assert nodes._taken_over(leases.last_used(folder)) == []
    elif ended_by == "reap":
        assert reap(cloud, tmp_path).problems == []
    else:
        monkeypatch.setattr(command, "_rental", lambda run: (cloud, lease, folder))
        done = CliRunner().invoke(app, ["nodes", "down", nodes.name])
        assert done.exit_code == 0, done.output
    (attempt,) = attempts_of(read_entries(folder / "ledger.jsonl"), time.time())
    assert cloud.there == [] and attempt.seconds == pytest.approx(7040, abs=2)
    assert attempt.unused_seconds == pytest.approx(3540, abs=2)


@pytest.mark.parametrize(("later", "everything", "doomed"), [(600, False, False), (600, True, True), (-5, False, True)])
def test_nodes_whose_tags_keep_an_old_end_live_until_the_one_that_they_were_told(
    tmp_path: Path, later: int, everything: bool, doomed: bool
) -> None:
    """`reap` removed the nodes of a run that was measuring on them, where the cloud had not taken their new end."""
    now = time.time()
    folder = tmp_path / "r"
    rental(folder, int(now + later))
    with open_ledger(folder) as ledger:
        ledger.write("opened", attempt=1, expires_at=int(now - 60))
        ledger.write("ready", nodes=[])
        ledger.write("extended", expires_at=int(now + later))
    tagged = resource("instance").model_copy(update={"expires_at": int(now - 60), "owner": "o"})
    with study_nodes.in_use(folder):
        assert (why_doomed(tagged, tmp_path, everything, now) is not None) is doomed
    theirs = tagged.model_copy(update={"owner": "ada-laptop"})
    assert why_doomed(theirs, tmp_path, everything, now) is not None, "of another machine's run the tags are all"
