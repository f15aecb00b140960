"""The order of the ladder, what a refusal rules out, what may be asked for, and what is planted in user data."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from configs.hardware.prices import Offer, Price
from configs.targets.rented import RentedTarget
from tasks.providers import renting
from tasks.providers.boot import make_keys, remove_keys, user_data
from tasks.providers.clouds import provider_named
from tasks.providers.labels import owner
from tasks.providers.ladder import is_excluded, ladder
from tasks.providers.leases import open_ledger
from tasks.providers.readiness import waiting
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, Provider, RentalLease, RentalRequest
from tasks.providers.renting import RentalFailed, _Renting, extend_run, plan_rental
from tasks.providers.study_nodes import request_of
from tests.support.clouds.stand_in import SPOT_REQUEST, ZONES


def test_no_zone_then_zones_then_regions_then_the_other_market() -> None:
    places = [(rung.market, rung.region, rung.zone) for rung in ladder(SPOT_REQUEST, ZONES)]
    one_market = [
        ("us-east-1", None),
        ("us-east-1", "us-east-1a"),
        ("us-east-1", "us-east-1b"),
        ("us-west-2", None),
        ("us-west-2", "us-west-2a"),
    ]
    assert places == [(market, *place) for market in ("spot", "on_demand") for place in one_market]


def test_regions_are_asked_by_price_where_that_is_wanted() -> None:
    """Of those that are named; one whose price nobody knows is the last, and each market has an order of its own."""
    prices = {("eu-west-1", "on_demand"): 0.7, ("us-east-1", "on_demand"): 0.5, ("eu-west-1", "spot"): 0.2}
    prices |= {("us-east-1", "spot"): 0.3}
    listed = [
        Offer(machine="aws/g4dn.xlarge", price=Price(usd_per_hour=usd, region=region, market=market, source="a list"))
        for (region, market), usd in prices.items()
    ]
    request = SPOT_REQUEST.model_copy(
        update={"regions": ("sa-east-1", "us-east-1", "eu-west-1"), "cheapest_first": True}
    )
    asked = [(rung.market, rung.region, rung.usd_per_hour) for rung in ladder(request, {}, listed)]
    assert asked == [
        ("spot", "eu-west-1", 0.2),
        ("spot", "us-east-1", 0.3),
        ("spot", "sa-east-1", None),
        ("on_demand", "us-east-1", 0.5),
        ("on_demand", "eu-west-1", 0.7),
        ("on_demand", "sa-east-1", None),
    ]
    as_named = ladder(request.model_copy(update={"cheapest_first": False}), {}, listed)
    assert [rung.region for rung in as_named[:3]] == ["sa-east-1", "us-east-1", "eu-west-1"]
    target = RentedTarget.model_validate(
        {"kind": "aws", "instance": "g4dn.xlarge", "regions": ["us-east-1"], "ssh_from": "203.0.113.7/32"}
        | {"cheapest_first": True}
    )
    assert request_of(target).cheapest_first


def test_named_zones_are_asked_in_their_order() -> None:
    request = SPOT_REQUEST.model_copy(update={"zones": ("us-east-1b", "us-east-1a"), "fall_back": None})
    assert [rung.zone for rung in ladder(request, ZONES)] == ["us-east-1b", "us-east-1a"]


def test_zones_of_another_region_are_told() -> None:
    """`--zone` without `--region` is of the provider's home region."""
    elsewhere = SPOT_REQUEST.model_copy(update={"regions": ("us-east-1",), "zones": ("us-west-2a",)})
    cloud = cast(Provider, SimpleNamespace(zones=lambda instance, region: ZONES[region]))
    with pytest.raises(RentalFailed, match=r"us-east-1: not asked, as .* us-west-2a there, but in us-east-1a, us-east"):
        plan_rental(cloud, elsewhere, None)
    both = plan_rental(cloud, elsewhere.model_copy(update={"regions": ("us-east-1", "us-west-2")}), None)
    assert {rung.zone for rung in both.rungs} == {"us-west-2a"} and both.refused[0].startswith("us-east-1: not asked")


def test_unknown_prices_are_none() -> None:
    priced, unpriced = ladder(SPOT_REQUEST.model_copy(update={"regions": ("us-east-1", "eu-north-1")}), {})[:2]
    assert priced.usd_per_hour is not None and unpriced.usd_per_hour is None


@pytest.mark.parametrize(
    ("problem", "left"),
    [("capacity", 9), ("quota", 7), ("transient", 4)],
)
def test_a_refusal_rules_out_no_more_than_it_says(problem: str, left: int) -> None:
    rungs = ladder(SPOT_REQUEST, ZONES)
    kept = [rung for rung in rungs if not is_excluded(rung, problem, rungs[0])]  # type: ignore[arg-type]
    assert len(kept) == left


def test_everybody_may_not_connect() -> None:
    with pytest.raises(ValueError, match="everybody"):
        RentalRequest.model_validate(SPOT_REQUEST.model_dump() | {"ssh_from": "0.0.0.0/0"})


@pytest.mark.parametrize("written", ["203.0.113.7", "203.0.113.7/32", "203.0.113.7/255.255.255.255"])
def test_an_address_is_a_range_of_one(written: str) -> None:
    """EC2 refused it after the security group had been made: `CIDR block 203.0.113.7 is malformed`."""
    typed = RentalRequest.model_validate(SPOT_REQUEST.model_dump() | {"ssh_from": written})
    assert typed.ssh_from == "203.0.113.7/32"


def test_an_address_that_no_node_can_be_reached_from_is_refused() -> None:
    """Nodes have IPv4 addresses: they were rented and waited for in vain where the cloud took the rule."""
    with pytest.raises(ValueError, match="2001:db8::/32, but nodes have IPv4 addresses only"):
        RentalRequest.model_validate(SPOT_REQUEST.model_dump() | {"ssh_from": "2001:db8::/32"})


@pytest.mark.parametrize("hours", [float("nan"), float("inf"), -1, 0, 721])
def test_hours_are_bounded(hours: float) -> None:
    with pytest.raises(ValueError, match="hours"):
        RentalRequest.model_validate(SPOT_REQUEST.model_dump() | {"hours": hours})


@pytest.mark.parametrize("cap", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_cap_that_holds_nothing_back_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="max_usd_per_hour"):
        plan_rental(provider_named("aws"), SPOT_REQUEST, cap)


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_machine_that_the_catalog_does_not_know_needs_an_image(cloud: str) -> None:
    """Renting one that the study prices began, and ended as an unknown instance after the network's rules were made."""
    request = RentalRequest.model_validate(SPOT_REQUEST.model_dump() | {"provider": cloud, "instance": "e2-standard-8"})
    provider = cast(Provider, SimpleNamespace(name=cloud, zones=lambda instance, region: []))
    with pytest.raises(RentalFailed, match=f"^{cloud}/e2-standard-8: not in the catalog, .* Name one by `image`$"):
        plan_rental(provider, request, None)
    offer = plan_rental(provider, request.model_copy(update={"image": "ours"}), None)
    assert {rung.usd_per_hour for rung in offer.rungs} == {None} and offer.max_usd_per_hour is None


@pytest.mark.parametrize("seconds", [-10, 31 * 24 * 3600])
def test_an_end_in_the_past_or_far_away_is_refused(tmp_path: Path, seconds: int) -> None:
    lease = RentalLease(study="s", run="r", owner="o", expires_at=7, request=SPOT_REQUEST)
    with pytest.raises(ValueError, match="hours"):
        extend_run(provider_named("aws"), lease, tmp_path, int(time.time()) + seconds)


def test_one_limit_holds_from_the_answer_to_the_last_node_that_is_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait_minutes` was counted twice: until the nodes ran, and again until they answered."""
    now = [0.0]
    for module in (renting, waiting):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    monkeypatch.setattr(waiting, "probe", lambda *_: "pending")
    node = Node(id="i-1", region="us-east-1", zone=None, market="spot", state="pending", public_address="192.0.2.1")
    booted = node.model_copy(update={"state": "running"})
    cloud = SimpleNamespace(
        name="aws",
        default_user="ubuntu",
        prepare=lambda *_: None,
        create=lambda *_: [node],
        nodes=lambda *_: [booted if now[0] >= 400 else node],
        destroy=lambda *_: None,
        resources=lambda *_: [],
    )
    limits = Limits(ready_seconds=600, sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    lease = RentalLease(study="s", run="r", owner="me", expires_at=int(time.time()) + 7200, request=SPOT_REQUEST)
    monkeypatch.setattr(renting, "give_back", lambda *_: 0)
    with open_ledger(tmp_path / "r") as ledger, pytest.raises(RentalFailed, match="not finished after 600 s"):
        make_keys(tmp_path / "r")
        climb = _Renting(cast(Provider, cloud), lease, tmp_path / "r", ledger, lambda _: None, limits, 1)
        climb.climb(ladder(SPOT_REQUEST, {})[:1])
    assert 600 < now[0] < 620


def test_a_user_whom_no_file_names_is_told_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert owner().startswith(f"uid-{os.getuid()}-")


def test_tags_name_study_run_owner_and_expiry() -> None:
    lease = RentalLease(study="s", run="r", owner="o", expires_at=7, request=SPOT_REQUEST)
    assert sorted(lease.tags.values()) == ["7", "o", "r", "s"]


def test_user_data_plants_the_host_key_and_the_switch(tmp_path: Path) -> None:
    make_keys(tmp_path)
    assert os.stat(tmp_path / "id_ed25519").st_mode & 0o077 == 0
    boot = user_data(tmp_path, 3600)
    config = json.loads(boot.removeprefix("#cloud-config\n"))
    assert config["ssh_keys"]["ed25519_private"] == (tmp_path / "host_ed25519").read_text()
    secret = "".join((tmp_path / "id_ed25519").read_text().splitlines()[1:-1])
    # The login key stays here. Its lines do not stand together in JSON.
    assert len(secret) > 100 and secret not in boot.replace("\\n", "")
    files = {file["path"]: file["content"] for file in config["write_files"]}
    assert files["/var/lib/rankwise/remaining_seconds"] == "3600\n"
    assert len(boot) < 16384  # EC2's limit
    remove_keys(tmp_path)
    assert not (tmp_path / "id_ed25519").exists()


def test_why_no_keys_could_be_made_is_told_in_a_sentence(tmp_path: Path) -> None:
    """As `No user exists for uid 4242` in a container whose user no file names: it was a traceback."""
    with pytest.raises(ValueError, match=r"^ssh-keygen: .*No such file or directory\. Nothing was rented$"):
        make_keys(tmp_path / "missing")


def test_other_clouds_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="oracle: nodes cannot be rented there"):
        provider_named("oracle")  # type: ignore[arg-type]
