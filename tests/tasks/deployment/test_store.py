"""What the folders of deployments say: names that are no paths, deployments that were interrupted."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.serving.deployment import Deployment, FrontConfig, PlacedServer
from tasks.deployment import rollouts
from tasks.deployment.bundles import WantedBundle
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.places import PlaceError
from tasks.deployment.store import Store
from tasks.deployment.targets import parse_target
from tasks.providers.leases import open_ledger, read_entries


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(data=tmp_path / "data", rented=tmp_path / "data" / "rented", cache=tmp_path / "cache")


def deployed(store: Store, *events: str) -> Deployment:
    """A deployment of one server, and a ledger that ends with these events."""
    folder = store.folder("one")
    folder.mkdir(parents=True)
    (folder / "key").write_text("secret\n")
    server = PlacedServer(generation=1, bundle="b-1", folder="x", port=1, local_port=1)
    made = Deployment(
        name="one", target="local:cpu", kind="local", url="http://127.0.0.1:9", front=str(folder / "front"),
        key_file=str(folder / "key"), bundle="b-1", servers=(server,),
        began_at=1.0, expires_at=4e9,
    )  # fmt: skip
    store.save(made)
    with open_ledger(folder) as ledger:
        for event in ("deploying", "deployed", *events):
            ledger.write(event)
    return made


@pytest.mark.parametrize("name", ["..", ".", "", "../x", "a/b", "/x", "a\n", "-rf", "x" * 65])
def test_a_name_is_no_path(store: Store, name: str) -> None:
    """A failed deployment removes its folder: the name must not lead anywhere else."""
    (store.data / "deployments" / "other").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"letters, digits"):
        store.folder(name)
    wanted = WantedDeployment(name=name, target=parse_target("local:cpu"), bundle=WantedBundle(model="./nothing"))
    with pytest.raises(ValueError, match=r"letters, digits"):
        Deploying(store, wanted, print, None)
    assert (store.data / "deployments" / "other").is_dir()


@pytest.mark.parametrize("events", [("rolling_out",), ("rolling_out", "numbers"), ("scaling", "numbers")])
def test_a_service_whose_rollout_was_killed_is_not_taken_down(store: Store, events: Sequence[str]) -> None:
    """`rankwise reap` removes what is unfinished; the old servers go on serving."""
    deployed(store, *events)
    assert store.unfinished() == []


def test_what_was_never_deployed_or_half_taken_down_is_unfinished(store: Store) -> None:
    deployed(store, "undeploying")
    half = store.folder("half")
    half.mkdir()
    with open_ledger(half) as ledger:
        ledger.write("deploying")
        ledger.write("placing")
    assert store.unfinished() == ["half", "one"]


def test_a_name_that_was_left_half_deployed_is_refused(store: Store) -> None:
    half = store.folder("half")
    half.mkdir(parents=True)
    with open_ledger(half) as ledger:
        ledger.write("placing")
    wanted = WantedDeployment(name="half", target=parse_target("local:cpu"), bundle=WantedBundle(model="./nothing"))
    with pytest.raises(ValueError, match=r"rankwise undeploy half"):
        Deploying(store, wanted, print, None).deploy()
    assert read_entries(half / "ledger.jsonl")[-1]["event"] == "placing"


class Placer:
    """Places nothing, and notes what it ends."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.here = None

    def place(self, bundle: Any, generation: int, share: int, ready_seconds: float, check: Any) -> PlacedServer:
        return PlacedServer(generation=generation, bundle="b-2", folder=f"s{generation}", port=1, local_port=1)

    def end(self, server: PlacedServer) -> None:
        self.ended.append(server.generation)

    def backend(self, server: PlacedServer, draining: bool = False) -> Any:
        return SimpleNamespace(name=f"server-{server.generation}", draining=draining)


@pytest.mark.parametrize("error", [PlaceError(None, "the front does not run"), KeyboardInterrupt()])
def test_a_rollout_that_breaks_off_ends_its_own_servers_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = deployed(store)
    placer, applied = Placer(), list[Any]()

    class Front:
        config = FrontConfig(key="k")

        def __init__(self, place: Any, folder: str) -> None:
            return

        def apply(self, config: Any) -> None:
            applied.append(config)

        def wait_until_idle(self, names: set[str], seconds: float) -> bool:
            return names == {"server-2"}

    def switch(front: Any, *rest: Any) -> None:
        raise error

    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", Front)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "_switch", switch)
    with pytest.raises(type(error)):
        rollouts.replace(store, "one", SimpleNamespace(), print)  # type: ignore[arg-type]
    assert placer.ended == [2] and applied == [Front.config]
    assert store.read("one") == before and store.unfinished() == []
    assert read_entries(store.folder("one") / "ledger.jsonl")[-1]["event"] == "deployed"
