"""What the folders of deployments say: names that are no paths, deployments that were interrupted."""

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

from configs.common.execution import Layout
from configs.common.files.reading import read_model
from configs.serving.deployment import (
    Deployment,
    FrontConfig,
    LevelCheck,
    OptimizationLevel,
    PlacedServer,
    RoutedServer,
    ServingBundle,
)
from configs.targets.ssh_host import SshHost
from configs.targets.target import SlurmTarget, SshTarget
from slurm.staging.packages import run_root
from tasks.deployment import bundles, deploying, fronts, placing, rollouts, taking_down
from tasks.deployment.bundles import WantedBundle, bundle_name, read_bundle
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.places import LocalPlace, PlaceError
from tasks.deployment.servers import ServerNotReady
from tasks.deployment.slurm_places import SlurmPartition, SlurmPlace
from tasks.deployment.store import Store
from tasks.deployment.taking_down import take_down
from tasks.deployment.targets import parse_target
from tasks.providers.giving_back import LeftBehind
from tasks.providers.leases import open_ledger, read_entries
from tasks.providers.rental import ProviderError, RentalLease, RentalRequest


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

    def place(self, bundle: Any, generation: int, together: Any, ready_seconds: float, check: Any) -> PlacedServer:
        return PlacedServer(generation=generation, bundle="b-2", folder=f"s{generation}", port=1, local_port=1)

    def end(self, server: PlacedServer) -> None:
        self.ended.append(server.generation)

    def backend(self, server: PlacedServer, draining: bool = False) -> Any:
        return SimpleNamespace(name=f"server-{server.generation}", draining=draining)


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


class RemoteHost:
    """A host that notes what is asked of it."""

    asked: ClassVar[list[str]] = []

    def __init__(self, target: SshTarget, number: int, folder: str) -> None:
        self.name, self.root = target.hosts[number].host, f"/home/me/{folder}"

    def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        self.asked.append(f"{self.name}: {operation} {arguments.get('folder') or arguments['paths'][0]}")
        return {"left": []}, b""


def test_servers_of_a_killed_deployment_are_ended_on_its_hosts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = SshTarget.model_validate({"kind": "ssh", "name": "lab", "hosts": ["gpu-a", "gpu-b"]})
    with open_ledger(store.folder("killed")) as ledger:
        ledger.write("deploying")
        ledger.write("hosts", hosts=hosts.model_dump_json(), folder="deployments/killed-5e1f")
        ledger.write("placing", generation=1, number=0)
    monkeypatch.setattr(RemoteHost, "asked", [])
    monkeypatch.setattr(taking_down, "SshPlace", RemoteHost)
    assert take_down(store, "killed", print) == 0.0
    root = "/home/me/deployments/killed-5e1f"
    assert RemoteHost.asked == [
        f"{host}: {what}" for host in ("gpu-a", "gpu-b") for what in (f"end_job {root}/servers/1", f"remove {root}")
    ]
    assert not store.folder("killed").exists()


def test_nodes_are_given_back_though_the_ledgers_line_is_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = deployed(store)
    store.save(made.model_copy(update={"rental": "run-1"}))
    request = RentalRequest(provider="aws", instance="g4dn.xlarge", regions=("us-east-1",), ssh_from="203.0.113.7/32")
    lease = RentalLease(study="deploy-one", run="run-1", owner="me", expires_at=4_000_000_000, request=request)
    (store.rented / "run-1").mkdir(parents=True)
    (store.rented / "run-1" / "lease.json").write_text(lease.model_dump_json())
    given_back: list[str] = []
    monkeypatch.setattr(taking_down, "provider_named", lambda _: None)
    monkeypatch.setattr(taking_down, "give_back_run", lambda provider, lease, *_: given_back.append(lease.run))
    take_down(store, "one", print)
    assert given_back == ["run-1"]


def test_what_cannot_be_given_back_keeps_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rental that was left behind kept the next one up, at its price, and the partition's jobs."""
    request = RentalRequest(provider="aws", instance="g4dn.xlarge", regions=("us-east-1",), ssh_from="203.0.113.7/32")
    with open_ledger(store.folder("two")) as ledger:
        for run in ("run-1", "run-2", "run-3"):
            lease = RentalLease(study="d", run=run, owner="me", expires_at=4_000_000_000, request=request)
            (store.rented / run).mkdir(parents=True)
            (store.rented / run / "lease.json").write_text(lease.model_dump_json())
            ledger.write("renting", rental=run)
        ledger.write("slurm", partition="gpu")
    asked: list[str] = []

    def give_back_run(provider: Any, lease: RentalLease, *_: Any) -> None:
        asked.append(lease.run)
        if lease.run == "run-1":
            raise LeftBehind(lease.run, ["aws instance i-1"], ["us-east-1: throttled"])
        if lease.run == "run-2":
            raise ProviderError("auth", "AuthFailure", "no such key")

    def clear_partition(*_: Any) -> list[str]:
        asked.append("partition")
        return ["gpu: away"]

    monkeypatch.setattr(taking_down, "provider_named", lambda _: None)
    monkeypatch.setattr(taking_down, "give_back_run", give_back_run)
    monkeypatch.setattr(taking_down, "_clear_partition", clear_partition)
    with pytest.raises(LeftBehind) as raised:
        take_down(store, "two", print)
    assert asked == ["run-1", "run-2", "run-3", "partition"]
    assert raised.value.left == ["aws instance i-1"]
    for words in ("run-1, run-2:", "aws instance i-1", "us-east-1: throttled", "AuthFailure: no such key", "gpu: away"):
        assert words in str(raised.value)
    assert store.folder("two").exists()


def test_a_server_that_does_not_end_keeps_no_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(RemoteHost):
        def ask(self, operation: str, body: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
            super().ask(operation, body, **arguments)
            return {"left": [77] if str(arguments.get("folder")).endswith("servers/1") else []}, b""

    hosts = SshTarget.model_validate({"kind": "ssh", "name": "lab", "hosts": ["gpu-a"]})
    with open_ledger(store.folder("stuck")) as ledger:
        ledger.write("deploying")
        ledger.write("hosts", hosts=hosts.model_dump_json(), folder="deployments/stuck-1")
        ledger.write("numbers", first=1, last=2)
    monkeypatch.setattr(RemoteHost, "asked", [])
    monkeypatch.setattr(taking_down, "SshPlace", Stubborn)
    with pytest.raises(PlaceError, match=r"gpu-a: processes 77 of .*servers/1 could not be ended"):
        take_down(store, "stuck", print)
    # Its folder stays, in which the next `undeploy` finds it.
    assert RemoteHost.asked == [f"gpu-a: end_job /home/me/deployments/stuck-1/servers/{number}" for number in (1, 2)]


class WorkingFront:
    """A front that takes what it is given."""

    config = FrontConfig(key="k")

    def __init__(self, place: Any, folder: str) -> None:
        self.applied = list[Any]()

    def apply(self, config: Any) -> None:
        self.applied.append(config)

    def wait_until_idle(self, names: set[str], seconds: float) -> bool:
        return True


class LosingPlacer(Placer):
    """One whose machines cannot be reached when the servers with these numbers are to end."""

    def __init__(self, *lost: int) -> None:
        super().__init__()
        self.lost = lost

    def end(self, server: PlacedServer) -> None:
        super().end(server)
        if server.generation in self.lost:
            raise PlaceError(None, "gpu-a: not reached")


def test_a_rollout_is_kept_where_an_old_server_cannot_be_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new servers have the traffic: they are noted, so that they can be taken down."""
    deployed(store)
    placer, said = LosingPlacer(1), list[str]()
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    monkeypatch.setattr(rollouts, "_watch", lambda *_: None)
    rollouts.replace(store, "one", SimpleNamespace(), said.append)  # type: ignore[arg-type]
    after = store.read("one")
    assert [server.generation for server in after.servers] == [2] and after.bundle == "b-2"
    assert placer.ended == [1] and "an old server was not ended: gpu-a: not reached" in said[-1]


def test_servers_that_the_front_does_not_take_are_ended(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = deployed(store)
    placer = LosingPlacer(2)

    def switch(*_: Any) -> None:
        raise PlaceError(None, "the front does not run")

    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", switch)
    with pytest.raises(PlaceError, match="the front does not run"):
        rollouts.set_server_count(store, "one", 3, print)
    assert placer.ended == [2, 3]  # also where the first one cannot be reached
    assert store.read("one") == before


@pytest.mark.parametrize("written", [False, True])
def test_new_servers_go_on_while_the_front_sends_them_requests(
    store: Store, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """A full disk keeps it from being told of the old ones; one that is only slow to take them will."""
    deployed(store)
    placer, said = Placer(), list[str]()

    class Front(WorkingFront):
        config = FrontConfig(backends=(RoutedServer(name="server-1", url="u"),))

        def apply(self, config: Any) -> None:
            if not self.applied:  # the switch to the new server
                self.applied.append(config)
                self.config = FrontConfig(backends=(RoutedServer(name="server-2", url="u"),))
                return
            if written:
                self.config = config
            raise PlaceError(28, "No space left on device")

    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", Front)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "_switch", lambda front, *_: front.apply(None))
    monkeypatch.setattr(rollouts, "_watch", lambda *_: "server-2 failed 1 of 1 requests")
    with pytest.raises(rollouts.RolledBack, match="rolled back after" if written else "could not be rolled back after"):
        rollouts.replace(store, "one", SimpleNamespace(), said.append)  # type: ignore[arg-type]
    assert placer.ended == ([2] if written else [])
    assert ("the new servers still get its requests" in said[-1]) is not written


@pytest.mark.parametrize(
    ("events", "own", "routed", "ended"),
    [
        ([("rolling_out", {}), ("numbers", {"first": 2, "last": 3})], 1, [1], [2, 3]),  # while it placed servers
        ([("rolling_out", {}), ("numbers", {"first": 2, "last": 2})], 1, [2, 1], [2]),  # while they were watched
        ([("numbers", {"first": 2, "last": 2}), ("deployed", {})], 2, [2, 1], [1]),  # while the old ones ended
        ([("numbers", {"first": 2, "last": 2}), ("deployed", {})], 2, [2], []),  # it was not
    ],
)
@pytest.mark.parametrize("replaces", [True, False])
def test_what_a_killed_rollout_left_is_ended_by_the_next_command(
    store: Store, monkeypatch: pytest.MonkeyPatch, replaces: bool, events: Any, own: int, routed: Any, ended: Any
) -> None:
    made = deployed(store)
    store.save(made.model_copy(update={"servers": (made.servers[0].model_copy(update={"generation": own}),)}))
    with open_ledger(store.folder("one")) as ledger:
        for event, details in events:
            ledger.write(event, **details)
    left, switched = list[int](), list[Any]()

    class Front(WorkingFront):
        config = FrontConfig(
            backends=tuple(
                RoutedServer(name=f"server-{number}", url="http://x", draining=number == 1) for number in routed
            )
        )

    placer = Placer()
    monkeypatch.setattr(placer, "end_numbered", left.append, raising=False)
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", Front)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-3")
    monkeypatch.setattr(rollouts, "_watch", lambda *_: None)
    monkeypatch.setattr(
        rollouts, "_switch", lambda _, __, active, draining: switched.append([one.generation for one in active])
    )
    if replaces:
        rollouts.replace(store, "one", SimpleNamespace(), print)  # type: ignore[arg-type]
    else:
        rollouts.set_server_count(store, "one", 1, print)
    assert left == ended and (switched[0] == [own] or len(routed) == 1)
    assert placer.ended == ([own] if replaces else [])


@pytest.mark.parametrize("replaces", [True, False])
def test_a_command_works_on_what_another_has_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    """The other one ends between this one's start and its turn."""
    before = deployed(store)
    other = before.servers[0].model_copy(update={"generation": 5})

    @contextmanager
    def late(folder: Path) -> Iterator[Any]:
        store.save(before.model_copy(update={"servers": (other, other)}))
        with open_ledger(folder) as ledger:
            yield ledger

    placer = Placer()
    monkeypatch.setattr(rollouts, "open_ledger", late)
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "bundle_name", lambda _: "b-2")
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    monkeypatch.setattr(rollouts, "_watch", lambda *_: None)
    if replaces:
        rollouts.replace(store, "one", SimpleNamespace(), print)  # type: ignore[arg-type]
        assert placer.ended == [5, 5] and [one.generation for one in store.read("one").servers] == [6, 7]
    else:
        rollouts.set_server_count(store, "one", 1, print)
        assert placer.ended == [5]


def test_servers_get_numbers_that_none_of_the_first_ones_had(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three that `deploy` had placed were gone: the next was placed in the folder of one, and never started."""
    deployed(store)
    with open_ledger(store.folder("one")) as ledger:
        for number in range(3):
            ledger.write("placing", generation=1, number=number, bundle="b-1")
        ledger.write("deployed")
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: Placer())
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    assert [one.generation for one in rollouts.set_server_count(store, "one", 2, print).servers] == [1, 4]


def test_fewer_servers_are_noted_before_the_others_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One could not be reached: the next command counted both, and sent requests to the one that had ended."""
    made = deployed(store)
    servers = tuple(made.servers[0].model_copy(update={"generation": number}) for number in (1, 2, 3))
    store.save(made.model_copy(update={"servers": servers}))
    placer = LosingPlacer(3)
    monkeypatch.setattr(rollouts, "placer_of", lambda *_: placer)
    monkeypatch.setattr(rollouts, "DeploymentFront", WorkingFront)
    monkeypatch.setattr(rollouts, "read_bundle", lambda *_: None)
    monkeypatch.setattr(rollouts, "_switch", lambda *_: None)
    with pytest.raises(PlaceError, match="gpu-a: not reached"):
        rollouts.set_server_count(store, "one", 1, print)
    assert placer.ended == [2, 3] and [one.generation for one in store.read("one").servers] == [1]


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


def test_an_expired_deployment_is_not_changed(store: Store) -> None:
    store.save(deployed(store).model_copy(update={"expires_at": 2.0}))
    changes: tuple[Callable[[], Any], ...] = (
        lambda: rollouts.replace_bundle(store, "one", WantedBundle(model="./nothing"), print, None),
        lambda: rollouts.replace(store, "one", SimpleNamespace(), print),  # type: ignore[arg-type]
        lambda: rollouts.set_server_count(store, "one", 2, print),
    )
    for change in changes:
        with pytest.raises(ValueError, match="one: has expired"):
            change()


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


def test_an_error_without_words_is_told_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*_: Any) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(rollouts, "first_answers", no_answer)
    server = PlacedServer(generation=2, bundle="b-2", folder="x", port=1, local_port=1)
    front: Any = WorkingFront(None, "")
    told = rollouts._watch(front, Placer(), [server], SimpleNamespace(), 0.0)  # type: ignore[arg-type]
    assert told == "server-2: ReadTimeout"


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


def test_the_evidence_of_what_runs_outlives_a_rollout_that_is_rolled_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle's file had the answers and speeds of the one that failed; and it never said how a rollout fits."""
    deployed(store)
    found: dict[OptimizationLevel, LevelCheck] = {"none": LevelCheck(level="none", throughput=7.0)}
    kept: list[bool] = []

    def check_levels(model: Any, target: Any, levels: Any, dtype: Any, folder: Path, *_: Any) -> Any:
        folder.mkdir()
        return found, {"none": ()}

    monkeypatch.setattr(bundles, "check_levels", check_levels)

    def replace(_: Store, __: str, bundle: ServingBundle, *___: Any) -> None:
        kept.append(read_bundle(store.bundles, bundle_name(bundle)) == bundle)
        if len(kept) == 2:
            raise rollouts.RolledBack("one: rolled back")

    monkeypatch.setattr(rollouts, "replace", replace)
    wanted = WantedBundle(model="synthetic:llama-1m@0", dtype="float32")
    rollouts.replace_bundle(store, "one", wanted, print, None)
    [first] = store.measuring_folders("one")
    evidence = read_model(first / "bundle.json", ServingBundle)
    assert re.fullmatch(r"needs about 0\.\d\d GiB a rank, local:cpu has \d+\.\d\d GiB", evidence.fit_text)
    found["none"] = LevelCheck(level="none", throughput=1.0)
    with pytest.raises(rollouts.RolledBack):
        rollouts.replace_bundle(store, "one", wanted, print, None)
    assert read_bundle(store.bundles, bundle_name(evidence)) == evidence
    [failed] = set(store.measuring_folders("one")) - {first}
    assert read_model(failed / "bundle.json", ServingBundle).checks == (found["none"],)
    rollouts.replace_bundle(store, "one", wanted, print, None)
    assert read_bundle(store.bundles, bundle_name(evidence)).checks == (found["none"],)
    assert kept == [True, False, False]  # of a bundle that is new there is no other evidence


def test_a_rollout_that_does_not_fit_beside_what_runs_is_refused_before_it_is_measured(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was measured for minutes, and then its servers were not started."""
    deployed(store)
    monkeypatch.setattr(rollouts, "make_bundle", lambda *_, **__: pytest.fail("it is measured"))
    monkeypatch.setattr(LocalPlace, "memory_bytes", lambda _: 1 << 20)
    with pytest.raises(ValueError, match=r"one: the model does not fit where its servers run: needs about .*local"):
        rollouts.replace_bundle(store, "one", WantedBundle(model="synthetic:llama-1m@0"), print, None)


def test_a_new_server_that_answers_late_is_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine is busy, or it reads a prompt of a million characters: what it says counts, not how soon."""

    def late(url: str, timeout: float, **_: Any) -> Any:
        if timeout < 10:
            raise httpx.ReadTimeout("")
        return SimpleNamespace(status_code=200)

    monkeypatch.setattr(httpx, "get", late)
    monkeypatch.setattr(rollouts, "first_answers", lambda *_: None)
    server = PlacedServer(generation=2, bundle="b-2", folder="x", port=1, local_port=1)
    front: Any = SimpleNamespace(config=FrontConfig(key="k"), state=SimpleNamespace(backends=()))
    assert rollouts._watch(front, Placer(), [server], SimpleNamespace(), 0.01) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("alive", [True, False])
def test_a_front_that_takes_its_settings_late_is_not_said_not_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    monkeypatch.setattr(fronts, "_APPLY_SECONDS", 0.05)
    monkeypatch.setattr(fronts.DeploymentFront, "is_alive", alive)
    front = fronts.DeploymentFront(LocalPlace(tmp_path, tmp_path), str(tmp_path))
    with pytest.raises(PlaceError) as caught:
        front.apply(FrontConfig(key="k"))
    said = "did not take its settings" if alive else "does not run, and did not start"
    assert f"the front {said} within 0.05 s" in str(caught.value.strerror)


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
