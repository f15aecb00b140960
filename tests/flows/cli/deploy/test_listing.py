"""`rankwise deployments`, `undeploy` and `logs`: one deployment that is damaged or stays keeps no other."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from configs.common.execution import Layout
from configs.serving.deployment import Deployment, PlacedServer
from flows.cli.deploy import listing
from flows.cli.main import app
from tasks.deployment.places import PlaceError
from tasks.deployment.store import Store
from tasks.providers.leases import open_ledger
from tasks.providers.rental import ProviderError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("another command is at work on it"), "a: another command is at work on it\n"),
        (ProviderError("transient", "500", "busy"), "a: 500: busy\n"),
        (PlaceError(None, "gpu-a: no route"), "a: gpu-a: no route\n"),
        (PermissionError(13, "Permission denied", "/data/a"), "a: /data/a: Permission denied\n"),  # which file?
    ],
)
def test_one_deployment_that_stays_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch, store: Store, error: Exception, said: str
) -> None:
    taken: list[str] = []

    def take_down(store: Store, name: str, *rest: Any) -> float:
        if name == "a":
            raise error
        taken.append(name)
        return 0.0

    monkeypatch.setattr(Store, "all", lambda _: [SimpleNamespace(name=name) for name in ("a", "b")])
    monkeypatch.setattr(Store, "unfinished", lambda _: [])
    monkeypatch.setattr(listing, "take_down", take_down)
    done = CliRunner().invoke(app, ["undeploy", "--all"])
    assert done.exit_code == 1 and taken == ["b"] and done.stderr == said


def test_a_damaged_file_of_one_deployment_keeps_nobody_else(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """`rankwise reap` goes on to what is rented, and the deployment itself can be taken down."""
    folder = store.folder("broken")
    with open_ledger(folder) as ledger:
        ledger.write("deploying")
        ledger.write("deployed")
    (folder / "deployment.json").write_text('{"name": 7')
    assert listing.print_deployments() == 3
    assert "deployment.json: not JSON" in capsys.readouterr().err
    [problem] = listing.reap_deployments(dry_run=False)
    assert problem.endswith("`rankwise undeploy broken` takes it down") and folder.exists()
    assert listing.run_undeploy(None, everything=True) == 0
    assert not folder.exists()


def test_an_unreadable_ledger_of_one_deployment_keeps_nobody_else(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rankwise deployments`, `reap` and `undeploy --all` ended with it, and with them what is rented stayed up."""
    (store.folder("broken") / "ledger.jsonl").mkdir(parents=True)
    with open_ledger(store.folder("half")) as ledger:
        ledger.write("deploying")
    assert listing.print_deployments() == 3
    told = capsys.readouterr().err
    assert "ledger.jsonl: is a folder, expected a file" in told and "half: deploying it was interrupted" in told
    [problem] = listing.reap_deployments(dry_run=False)
    assert "broken" in problem and not store.folder("half").exists()


@pytest.mark.parametrize("content", [b"\xff\xfe", "k\u00e9y".encode(), b"x" * 5000])
def test_a_damaged_token_of_one_deployment_keeps_nobody_else_from_the_list(
    monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "key").write_bytes(content)
    one = Deployment(
        name="one", target="local:cpu", kind="local", url="http://127.0.0.1:9", front=str(tmp_path), bundle="b",
        key_file=str(tmp_path / "key"), began_at=1.0, expires_at=4e9,
    )  # fmt: skip
    gone = one.model_copy(update={"name": "two", "key_file": str(tmp_path / "none")})
    monkeypatch.setattr(Store, "all", lambda _: [one, gone])
    done = CliRunner().invoke(app, ["deployments", "--json"])
    listed = json.loads(done.stdout)["deployments"]
    assert [each["health"] for each in listed] == ["token unreadable", "token missing"] and done.exit_code == 3


def test_deployments_are_listed_for_programs(monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-token")
    began = time.time() - 1800
    there = Deployment(
        name="one", target="aws:g4dn.xlarge", kind="aws", url="http://127.0.0.1:9", front=str(tmp_path), bundle="b",
        key_file=str(tmp_path / "key"), rental="r", usd_per_hour=2.0, began_at=began, expires_at=began + 7200,
    )  # fmt: skip
    own = there.model_copy(update={"name": "two", "kind": "local", "rental": None, "usd_per_hour": None})
    monkeypatch.setattr(Store, "all", lambda _: [there, own])
    done = CliRunner().invoke(app, ["deployments", "--json"])
    printed = json.loads(done.stdout)
    first, second = printed["deployments"]
    assert done.exit_code == 3 and "secret-token" not in done.output
    assert (first["name"], first["address"], first["health"]) == ("one", "http://127.0.0.1:9/v1", "not ready")
    assert first["usd"] == pytest.approx(1.0, rel=0.1) and first["own_machine"] is False
    assert second["usd"] is None and second["own_machine"] is True
    assert printed["unfinished"] == [] and printed["damaged"] == {}


@pytest.mark.parametrize(("kind", "usd"), [("aws", "2.00"), ("azure", "6.00")])
def test_a_deployment_costs_what_its_cloud_charges_for_nodes_that_are_off(kind: str, usd: str) -> None:
    told = SimpleNamespace(kind=kind, usd_per_hour=2.0, began_at=0.0, expires_at=3600.0)
    assert listing._usd(cast(Any, told), 3 * 3600.0) == usd


class LoggingPlace:
    """A machine with a line in each log; none: it does not answer."""

    def __init__(self, name: str, line: str | None) -> None:
        self.name, self._line = name, line

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        if self._line is None:
            raise PlaceError(None, f"{self.name}: does not answer")
        if operation == "sizes":
            return {"sizes": [100]}, b""
        return {}, f"{self._line} of {arguments['path']}".encode()


def test_logs_are_those_of_all_machines_that_answer(
    monkeypatch: pytest.MonkeyPatch, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first = PlacedServer(generation=1, bundle="b", folder="/a/1", port=1, local_port=1, tunnel="/t/1", peers=("/b/1",))
    servers = (first, first.model_copy(update={"generation": 2, "node": 2, "peers": (), "tunnel": None}))
    places = [LoggingPlace("gpu-a", "hello"), LoggingPlace("gpu-b", "there"), LoggingPlace("gpu-c", None)]
    placer = SimpleNamespace(place_of=places.__getitem__, here=LoggingPlace("local", "here"))
    monkeypatch.setattr(Store, "read", lambda *_: SimpleNamespace(servers=servers, front="/front"))
    monkeypatch.setattr(Store, "bundle", lambda *_: SimpleNamespace(layout=Layout(dp=2)))
    monkeypatch.setattr(listing, "placer_of", lambda *_: placer)
    assert listing.print_deployment_logs("one") == 1
    told = capsys.readouterr()
    for line in (
        "hello of /a/1/server.log",
        "hello of /a/1/replica-1.log",
        "there of /b/1/replica-0.log",  # ranks of another node
        "here of /t/1/server.log",  # what ssh says of the tunnel
        "here of /front/server.log",  # though a machine does not answer
    ):
        assert line in told.out
    assert told.err == "server 2: gpu-c: does not answer\n"


@pytest.mark.parametrize(
    ("cost", "told"),
    [(0.0, ""), (1.25, "; it cost 1.25 USD"), (None, "; what it cost is unknown, for it has no price")],
)
def test_what_a_deployment_cost_is_told_or_called_unknown(
    monkeypatch: pytest.MonkeyPatch, store: Store, capsys: pytest.CaptureFixture[str], cost: float | None, told: str
) -> None:
    """Of a rented machine without a price nothing was said, as of an own one."""
    monkeypatch.setattr(listing, "take_down", lambda *_: cost)
    assert listing.run_undeploy("one", everything=False) == 0
    assert capsys.readouterr().out == f"one: taken down, nothing is left{told}\n"
