"""`rankwise reap`: what cannot be searched is never said to be empty, and what somebody keeps is kept."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.nodes import command as nodes
from flows.folders import rented_folder
from tasks.providers import renting
from tasks.providers.giving_back import why_doomed
from tasks.providers.leases import in_use, open_ledger
from tasks.providers.rental import Node, RentalLease, RentalRequest, Resource


@pytest.mark.parametrize(
    ("named", "code", "message"),
    [
        ("awss", 2, "--provider: got awss, expected one of: aws, gcp, azure"),
        ("gcp", 1, "gcp could not be asked: credentials are missing or refused"),
    ],
)
def test_a_provider_that_cannot_be_searched_is_no_success(
    named: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "providers_at_hand", lambda: [SimpleNamespace(name="aws")])
    done = CliRunner().invoke(app, ["reap", "--dry-run", "--provider", named])
    assert done.exit_code == code and message in done.output and "removed 0" not in done.output


@pytest.mark.parametrize(("event", "doomed"), [("kept", False), ("extended", True)])
def test_nodes_that_a_study_keeps_are_kept_when_they_are_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, doomed: bool
) -> None:
    """`reap` removed them as those of a run that has ended, hours before the end to which a person had moved them."""
    now, folder = time.time(), tmp_path / "r"
    request = RentalRequest(provider="aws", instance="x", regions=("us-east-1",), ssh_from="203.0.113.7/32")
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(now + 600), request=request)
    machine = Resource(
        provider="aws", kind="instance", id="i-1", region="us-east-1", run="r", expires_at=int(now + 600)
    )
    node = Node(id="i-1", region="us-east-1", state="running", public_address="198.51.100.7")
    with in_use(folder), open_ledger(folder) as ledger:
        ledger.write("opened", attempt=1, expires_at=lease.expires_at)
        ledger.write("ready", nodes=[node.model_dump()])
        ledger.write(event, expires_at=lease.expires_at)
    cloud = SimpleNamespace(name="aws", default_user="ubuntu", tagged=lambda *_: [machine], extend=lambda *_: None)
    monkeypatch.setattr(nodes, "_rental", lambda run: (cloud, lease, folder))
    monkeypatch.setattr(renting, "prolong", lambda *_: True)
    done = CliRunner().invoke(app, ["nodes", "extend", "r", "--hours", "3"])
    assert done.exit_code == 0 and done.stdout.startswith("r: until "), done.output
    assert (why_doomed(machine, tmp_path, False, now) is not None) == doomed


def test_what_was_searched_and_what_would_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run ended with `removed 0, kept 0`, whatever it had found, and named no place in which it had looked."""
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    now = int(time.time())
    left = Resource(provider="aws", kind="instance", id="i-1", region="b", run="r", expires_at=now - 7260)
    kept = Resource(provider="aws", kind="instance", id="i-2", region="b", run="other", expires_at=now + 5410)
    found = {"a": [], "b": [left, kept]}
    aws = SimpleNamespace(name="aws", regions=lambda: ["a", "b"], tagged=lambda regions, *_: found[regions[0]])
    gcp = SimpleNamespace(name="gcp", regions=lambda: ["europe-west4"], tagged=lambda *_: [])
    monkeypatch.setattr(nodes, "providers_at_hand", lambda: [aws, gcp])
    done = CliRunner().invoke(app, ["reap", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "would remove: aws instance i-1 in b, run r: expired 2 h ago",
        "kept: aws instance i-2 in b, run other: expires in 90 min",
        "would remove 1, kept 1; searched aws (2 regions), gcp (1 region)",
    ]


def test_providers_of_which_none_can_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that no provider could not be asked, which is that each could."""
    monkeypatch.setattr(nodes, "providers_at_hand", list)
    for command in (["reap", "--dry-run"], ["nodes", "list"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1
        assert done.stderr == "no provider could be asked: credentials are missing or refused\n"


@pytest.mark.parametrize(
    ("last", "left", "code"),
    [("ready", -60, 1), ("left", 3600, 1), ("kept", 3600, 0), ("ready", 3600, 0), ("given_back", -60, 0)],
)
def test_a_cloud_that_has_nodes_of_ours_and_cannot_be_searched_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, left: int, code: int
) -> None:
    """Credentials for Azure had expired: a schedule that looks at the exit code took its nodes for removed."""
    request = RentalRequest(provider="azure", instance="x", regions=("eastus",), ssh_from="203.0.113.7/32")
    lease = RentalLease(study="s", run="r", owner="o", expires_at=int(time.time()) + left, request=request)
    monkeypatch.setenv("RANKWISE_DATA", str(tmp_path / "data"))
    folder = rented_folder() / "r"
    with open_ledger(folder) as ledger:
        ledger.write("opened", attempt=1, expires_at=lease.expires_at)
        ledger.write(last)
    (folder / "lease.json").write_text(lease.model_dump_json())
    asked = SimpleNamespace(name="aws", regions=list)
    monkeypatch.setattr(nodes, "providers_at_hand", lambda: [asked])
    done = CliRunner().invoke(app, ["reap"])
    assert done.exit_code == code, done.output
    assert ("azure: could not be asked what is left of r\n" in done.stderr) == bool(code)
