"""What `deploy` refuses, and what it leaves where it fails."""

import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from configs.common.execution import Layout
from configs.serving.deployment import (
    Deployment,
    PlacedServer,
    ServingBundle,
)
from configs.targets.ssh_host import SshHost
from configs.targets.target import SlurmTarget, SshTarget
from slurm.staging.packages import run_root
from tasks.deployment import deploying, placing, taking_down
from tasks.deployment.bundles import WantedBundle
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.places import PlaceError
from tasks.deployment.servers import ServerNotReady
from tasks.deployment.slurm_places import SlurmPartition, SlurmPlace
from tasks.deployment.store import Store
from tasks.deployment.taking_down import take_down
from tasks.deployment.targets import parse_target
from tasks.providers.giving_back import LeftBehind
from tasks.providers.leases import open_ledger, read_entries
from tasks.providers.rental import ProviderError, RentalRequest
from tests.support.servers.stand_in_deployments import Placer, RemoteHost, WorkingFront, deployed


def test_a_name_that_was_left_half_deployed_is_refused(store: Store) -> None:
    half = store.folder("half")
    half.mkdir(parents=True)
    with open_ledger(half) as ledger:
        ledger.write("placing")
    wanted = WantedDeployment(name="half", target=parse_target("local:cpu"), bundle=WantedBundle(model="./nothing"))
    with pytest.raises(ValueError, match=r"rankwise undeploy half"):
        Deploying(store, wanted, print, None).deploy()
    assert read_entries(half / "ledger.jsonl")[-1]["event"] == "placing"


def test_a_name_that_was_taken_while_the_model_came_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another command has deployed meanwhile goes on."""
    made: list[Deployment] = []

    def resolved(*_: Any) -> Any:
        made.append(deployed(store))
        return SimpleNamespace(manifest="")

    monkeypatch.setattr(deploying, "resolved_model", resolved)
    monkeypatch.setattr(Deploying, "_fit", lambda *_: "")
    wanted = WantedDeployment(name="one", target=parse_target("local:cpu"), bundle=WantedBundle(model="./nothing"))
    with pytest.raises(ValueError, match=r"one exists"):
        Deploying(store, wanted, print, None).deploy()
    assert store.read("one") == made[0]
    assert read_entries(store.folder("one") / "ledger.jsonl")[-1]["event"] == "deployed"


def test_a_request_without_an_answer_ends_a_deployment_in_words(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Front(WorkingFront):
        folder = "front"

        def begin(self, config: Any, port: int, expires_at: float) -> int:
            return 9

    def no_answer(*_: Any) -> None:
        raise httpx.ReadTimeout("")

    changed: dict[str, Any] = {
        "resolved_model": lambda *_: SimpleNamespace(manifest=""),
        "make_bundle": lambda *_, **__: None,
        "save_bundle": lambda *_: None,
        "bundle_name": lambda *_: "b-1",
        "Placer": lambda *_, **__: FrontlessPlacer(),
        "DeploymentFront": Front,
        "FrontConfig": lambda **_: None,
        "wait_until_ready": lambda *_: None,
        "timed_answers": no_answer,
    }
    for name, value in changed.items():
        monkeypatch.setattr(deploying, name, value)
    monkeypatch.setattr(Deploying, "_fit", lambda *_: "")
    wanted = WantedDeployment(name="slow", target=parse_target("local:cpu"), bundle=WantedBundle(model="./nothing"))
    with pytest.raises(ServerNotReady, match="a request was not answered: ReadTimeout"):
        Deploying(store, wanted, print, None).deploy()
    assert not store.folder("slow").exists()


def test_a_taken_port_is_named_before_anything_is_rented(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front begins last: nodes were rented, measured on and given back for nothing."""
    monkeypatch.setattr(deploying, "resolved_model", lambda *_: pytest.fail("it goes on"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = WantedDeployment("far", parse_target("local:cpu"), WantedBundle(model="./nothing"), port=port)
        with pytest.raises(ValueError, match=f"{port} cannot be listened on: Address already in use. Use another"):
            Deploying(store, wanted, print, None).deploy()
    assert not store.folder("far").exists()


@pytest.mark.parametrize("error", [LeftBehind("far-1", ["aws instance i-0"], []), ProviderError("auth", "", "expired")])
def test_why_nothing_was_deployed_is_told_beside_what_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise ServerNotReady(None, "aws: the server does not start: no such kernel")

    def leave(*_: Any) -> None:
        raise error

    monkeypatch.setattr(deploying, "resolved_model", lambda *_: SimpleNamespace(manifest=""))
    monkeypatch.setattr(deploying, "remove_everything", leave)
    monkeypatch.setattr(Deploying, "_fit", lambda *_: "")
    monkeypatch.setattr(Deploying, "_deploy", fail)
    wanted = WantedDeployment("far", parse_target("aws:g4dn.xlarge"), WantedBundle(model="./nothing"))
    said: list[str] = []
    with pytest.raises(type(error)):
        Deploying(store, wanted, said.append, None).deploy()
    assert said == ["not deployed: aws: the server does not start: no such kernel"]


def test_an_interrupt_ends_renting(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to the main thread alone, while each of several targets is rented in a thread of its own."""

    def rent(provider: Any, lease: Any, offer: Any, folder: Path, say: Any, limits: Any) -> Any:
        limits.sleep(0.1)
        pytest.fail("the nodes are waited for")

    def interrupted() -> None:
        raise ValueError("interrupted")

    request = RentalRequest(provider="aws", instance="g4dn.xlarge", regions=("us-east-1",), ssh_from="203.0.113.7/32")
    for name, value in {"provider_named": str, "plan_rental": lambda *_: None, "rent": rent}.items():
        monkeypatch.setattr(deploying, name, value)
    monkeypatch.setattr(deploying, "request_of", lambda _: request)
    rented: Any = SimpleNamespace(kind="aws")
    wanted = WantedDeployment(
        name="far", target=parse_target("aws:g4dn.xlarge"), bundle=WantedBundle(model="./nothing"), rented=rented
    )
    made = Deploying(store, wanted, print, None, check=interrupted)
    with open_ledger(store.folder("far")) as ledger, pytest.raises(ValueError, match="interrupted"):
        made._hosts(ledger, 4e9)


class FrontlessPlacer(Placer):
    """One that has a place for each node."""

    def place_of(self, node: int) -> None:
        return None


class AwayHost(RemoteHost):
    """A host that cannot be reached any more."""

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        raise PlaceError(None, f"{self.name}: does not answer")


class FailingPlacer(Placer):
    """One whose server does not get ready, and whose machine is not reached afterwards."""

    def place_of(self, node: int) -> None:
        raise PlaceError(None, "gpu-a: does not answer")

    def place(self, *_: Any, **__: Any) -> PlacedServer:
        raise ServerNotReady(None, "gpu-a: not ready within 1 s")


@pytest.mark.parametrize("away", [True, False])
def test_a_failed_deployment_is_remembered_while_its_host_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch, away: bool
) -> None:
    """Its server runs on there, and undeploy must find it once the host is back."""
    changed: dict[str, Any] = {
        "resolved_model": lambda *_: SimpleNamespace(manifest="m"),
        "stage_on_hosts": lambda *_: None,
        "make_bundle": lambda *_, **__: None,
        "save_bundle": lambda *_: None,
        "bundle_name": lambda *_: "b-1",
        "Placer": lambda *_, **__: FailingPlacer(),
    }
    for name, value in changed.items():
        monkeypatch.setattr(deploying, name, value)
    monkeypatch.setattr(taking_down, "SshPlace", AwayHost if away else RemoteHost)
    monkeypatch.setattr(Deploying, "_fit", lambda *_: "")
    monkeypatch.setattr(Deploying, "_measured_on", lambda _, target: target)
    monkeypatch.setattr(RemoteHost, "asked", [])
    hosts = SshTarget.model_validate({"kind": "ssh", "name": "lab", "hosts": ["gpu-a"]})
    wanted = WantedDeployment(
        name="gone", target=parse_target("ssh:gpu-a"), bundle=WantedBundle(model="./nothing"), ssh=hosts
    )
    told = r"not ready within 1 s\. Something may be left: gpu-a: does not answer\. `rankwise undeploy gone` removes it"
    with pytest.raises(PlaceError if away else ServerNotReady, match=told if away else "not ready within 1 s"):
        Deploying(store, wanted, print, None).deploy()
    assert store.folder("gone").exists() is away and store.unfinished() == (["gone"] if away else [])
    if away:
        monkeypatch.setattr(taking_down, "SshPlace", RemoteHost)
        take_down(store, "gone", print)
    root = RemoteHost.asked[-1].partition("remove ")[2]
    assert re.fullmatch("/home/me/deployments/gone-[0-9a-f]{8}", root)
    assert RemoteHost.asked == [f"gpu-a: end_job {root}/servers/1", f"gpu-a: remove {root}"]
    assert not store.folder("gone").exists()


def test_two_people_with_one_login_on_a_host_do_not_share_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a data folder. The second deployment of a name failed, and ended and removed the first."""
    bundle = ServingBundle(id="b", model="m", identity="synthetic:llama-1m@0", manifest="", kind="decoder", files={})
    changed: dict[str, Any] = {
        "resolved_model": lambda *_: SimpleNamespace(manifest="m"),
        "stage_on_hosts": lambda *_: None,
        "make_bundle": lambda *_, **__: bundle,
        "save_bundle": lambda *_: None,
    }
    for name, value in changed.items():
        monkeypatch.setattr(deploying, name, value)
    monkeypatch.setattr(Deploying, "_fit", lambda *_: "")
    monkeypatch.setattr(Deploying, "_measured_on", lambda _, target: target)
    for module in (placing, taking_down):
        monkeypatch.setattr(module, "SshPlace", RemoteHost)
    placed: list[str] = []

    def place_server(place: RemoteHost, *_: Any) -> None:
        placed.append(place.root)
        raise ServerNotReady(None, "gpu-a: not ready within 1 s")

    monkeypatch.setattr(placing, "place_server", place_server)
    hosts = SshTarget.model_validate({"kind": "ssh", "name": "lab", "hosts": ["gpu-a"]})
    wanted = WantedDeployment(
        name="tiny", target=parse_target("ssh:gpu-a"), bundle=WantedBundle(model="./nothing"), ssh=hosts
    )
    for person in ("anna", "ben"):
        store = Store(data=tmp_path / person, rented=tmp_path / person / "rented", cache=tmp_path / person / "cache")
        monkeypatch.setattr(RemoteHost, "asked", [])
        with pytest.raises(ServerNotReady):
            Deploying(store, wanted, print, None).deploy()
        assert all(placed[-1] in asked for asked in RemoteHost.asked)
    assert len(set(placed)) == 2


def test_two_containers_with_equal_paths_do_not_share_a_folder_of_a_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second deployment of a name wrote over the first's files, and its `undeploy` ended the first's jobs."""
    bundle = ServingBundle(id="b", model="m", identity="synthetic:llama-1m@0", manifest="", kind="decoder", files={})
    measured: list[Path] = []

    def make_bundle(wanted: Any, model: Any, target: Any, folder: Path, *_: Any, **__: Any) -> ServingBundle:
        run_root(shared, folder).mkdir(parents=True)
        folder.mkdir(parents=True)
        measured.append(run_root(shared, folder))
        return bundle

    changed: dict[str, Any] = {
        "resolved_model": lambda *_: SimpleNamespace(manifest="m"),
        "stage_in_partition": lambda partition, *_: partition,
        "forget_measuring": lambda *_: None,  # as where the command is killed before
        "make_bundle": make_bundle,
        "save_bundle": lambda *_: None,
    }
    for name, value in changed.items():
        monkeypatch.setattr(deploying, name, value)
    monkeypatch.setattr(Deploying, "_fit", lambda *_: "")
    placed: list[str] = []

    def place_server(place: SlurmPlace, *_: Any) -> None:
        placed.append(place.root)
        Path(place.root).mkdir(parents=True)
        raise ServerNotReady(None, "lab: not ready within 1 s")

    monkeypatch.setattr(placing, "place_server", place_server)
    monkeypatch.setattr(placing, "stop", lambda *_: None)
    shared = tmp_path / "shared"
    shared.mkdir()
    partition = SlurmPartition(target=SlurmTarget(name="lab", partition="lab", shared=str(shared)))
    wanted = WantedDeployment(
        name="tiny", target=parse_target("slurm:lab"), bundle=WantedBundle(model="./nothing"), partition=partition
    )
    for _ in ("one container", "another"):
        made = Store(data=tmp_path / "data", rented=tmp_path / "data" / "rented", cache=tmp_path / "cache")
        with pytest.raises(ServerNotReady):
            Deploying(made, wanted, print, None).deploy()
        assert not Path(placed[-1]).exists() and not measured[-1].exists() and not made.folder("tiny").exists()
    assert len(set(placed)) == len(set(measured)) == 2


@pytest.mark.parametrize(
    ("target", "ssh", "gpus", "tp"),
    [
        ("local", None, (4,), 4),
        ("local", None, (0,), 1),
        ("local:cpu", None, (4,), 1),
        ("ssh:a+b", ["a", "b"], (4, 2), 4),  # two on each host
    ],
)
def test_a_sharded_server_is_cut_over_all_gpus(
    store: Store, monkeypatch: pytest.MonkeyPatch, target: str, ssh: list[str] | None, gpus: tuple[int, ...], tp: int
) -> None:
    """One rank on each machine was all that was started, whatever it has."""
    hosts = None if ssh is None else SshTarget(name="s", hosts=[SshHost(host=each, name=each) for each in ssh])
    places = [SimpleNamespace(gpu_count=lambda count=count: count) for count in gpus]
    monkeypatch.setattr(deploying, "SshPlace", lambda target, number, folder: places[number])
    monkeypatch.setattr(deploying, "LocalPlace", lambda root, cache: places[0])
    bundle = WantedBundle(model="./nothing", layout=Layout(tp=1 if ssh is None else len(ssh)))
    wanted = WantedDeployment("one", parse_target(target), bundle, ssh=hosts, sharded=True)
    assert Deploying(store, wanted, print, None)._cut_over_devices().bundle.layout == Layout(tp=tp)
