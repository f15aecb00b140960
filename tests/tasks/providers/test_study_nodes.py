"""The nodes of a study: kept up, extended, taken over by its next run, given back."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.targets.rented import RentedTarget
from flows.cli.main import app
from flows.cli.nodes import command
from slurm.staging.packages import run_digest
from tasks.providers import leases, renting, study_nodes
from tasks.providers.attempts import attempts_of
from tasks.providers.labels import label
from tasks.providers.leases import open_ledger, read_entries
from tasks.providers.rental import Node, ProviderError, RentalRequest, Resource
from tasks.providers.study_nodes import StudyNodes, rental_name, request_of
from tests.support.clouds.stand_in import NODES, REGION, REQUEST, Cloud, Google, clouds, reap, rental, resource


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


def test_private_nodes_are_not_rented_for_a_machine_that_they_do_not_admit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They see its private address; a rule for its public one, the default, let nobody in."""
    monkeypatch.setattr(study_nodes, "callers_address", lambda _: "203.0.113.7/32")
    target = RentedTarget(kind="gcp", name="g", instance="g2-standard-4", regions=["us-central1"], public_address=False)
    with pytest.raises(ValueError, match=r"^target g: ssh_from: is needed with public_address: false, because"):
        request_of(target)
    assert request_of(target.model_copy(update={"ssh_from": "10.0.0.5/32"})).ssh_from == "10.0.0.5/32"
    assert request_of(target.model_copy(update={"kind": "azure"})).ssh_from == "203.0.113.7/32"
    assert request_of(target.model_copy(update={"public_address": True})).ssh_from == "203.0.113.7/32"


def test_the_address_that_nobody_tells_is_asked_for_where_the_user_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study was told to set `--ssh-from`, which `rankwise run` has not."""

    def refused(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("tasks.providers.callers_address.urlopen", refused)
    target = RentedTarget(kind="aws", name="g", instance="g5.xlarge", regions=["us-east-1"])
    with pytest.raises(ValueError, match=r"^target g: ssh_from: .*\(no network\). Set it, such as 203.0.113.7/32$"):
        request_of(target)


@pytest.mark.parametrize("written", ["East US", "EastUS", "eastus"])
def test_a_region_is_found_again_however_it_was_written(written: str) -> None:
    """Azure takes all three, and lists what is there as of eastus."""
    fields = {"kind": "azure", "instance": "Standard_NC4as_T4_v3", "ssh_from": REQUEST.ssh_from}
    target = RentedTarget.model_validate(fields | {"regions": [written]})
    assert target.machine == "azure/Standard_NC4as_T4_v3/eastus" and request_of(target).regions == ("eastus",)
    typed = RentalRequest(provider="azure", instance="x", regions=(written,), ssh_from=REQUEST.ssh_from)
    assert typed.regions == ("eastus",)


def test_a_rental_is_named_after_run_and_target() -> None:
    names = {rental_name("My study", Path(run), target) for run in ("/a", "/b") for target in ("x", "y")}
    assert len(names) == 4 and rental_name("My study", Path("/a"), "x") in names
    assert all(label(name) == name for name in names)


def test_a_target_may_be_named_without_a_letter_that_tags_take() -> None:
    """The study's own check takes such names, and renting for them ended with `name: got ...`."""
    names = {rental_name("study", Path("/a"), target) for target in ("模型", "узел", "--")}
    assert len(names) == 3 and all(label(name) == name and name.startswith("study-") for name in names)


def test_a_run_folder_that_is_reached_through_a_link_has_the_same_rental(tmp_path: Path) -> None:
    """Nodes that `keep` had left up stayed unused, and others were rented beside them."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to("disk")
    assert rental_name("s", tmp_path / "home" / "s", "x") == rental_name("s", tmp_path / "disk" / "s", "x")
    assert run_digest(tmp_path / "home" / "s") == run_digest(tmp_path / "disk" / "s") != run_digest(tmp_path / "s")
