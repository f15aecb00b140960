"""Renting and extending by a stand-in for a cloud: unanswered tries, names that are taken, other places."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from configs.common.base import write_atomically
from tasks.providers import giving_back, leases, renting
from tasks.providers.attempts import attempts_of
from tasks.providers.giving_back import Teardown
from tasks.providers.ladder import RentalOffer
from tasks.providers.leases import is_dead, open_ledger, read_entries
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Provider, ProviderError, RentalLease, Resource, Rung
from tasks.providers.renting import RentalFailed, extend_run, rent
from tests.support.clouds.stand_in import NODES, REGION, REQUEST, Cloud, LateCloud, clouds, rental, rented, resource


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
