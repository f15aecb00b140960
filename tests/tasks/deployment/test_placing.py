"""When a tunnel to a server that starts is given up, and which servers share a machine."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.serving.deployment import PlacedServer, ServiceState, ServingBundle
from configs.targets.target import SshTarget
from tasks.deployment import placing
from tasks.deployment.places import LocalPlace, Place, PlaceError
from tasks.deployment.placing import Placer, TunnelWatch
from tasks.deployment.servers import AWAY_SECONDS, ServerNotReady, ServerSpec
from tasks.deployment.slurm_places import SlurmPartition
from tasks.deployment.store import Store

NOBODY = "exit code 255: ssh: connect to host 10.0.0.1 port 22: Connection refused"


class Clock:
    """Replaces the module `time` there."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


def test_a_machine_that_is_away_is_waited_for_and_a_refusal_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = Clock(), ServiceState(supervisor_pid=1)
    monkeypatch.setattr(placing, "time", clock)
    monkeypatch.setattr(placing, "state", lambda place, folder: told)
    watch = TunnelWatch(LocalPlace(tmp_path, tmp_path), "tunnel")

    def becomes(seconds: float, **changes: object) -> None:
        nonlocal told
        clock.now += seconds
        told = told.model_copy(update={"since": clock.now, **changes})

    for starts in range(1, 9):  # away for 3 s and more, as the first starts follow fast
        becomes(0.6, starts=starts, state="waiting", reason=NOBODY)
        watch.check()
    becomes(1, starts=9, state="running")
    clock.now += 16
    watch.check()  # it stands
    becomes(300, starts=10, state="waiting")
    watch.check()  # lost again, a while later: waited for anew
    becomes(AWAY_SECONDS - 1, starts=14)
    watch.check()
    becomes(2, starts=14)
    with pytest.raises(ServerNotReady, match=r"no SSH tunnel to the server's machine: exit code 255: .* refused"):
        watch.check()
    refused = TunnelWatch(LocalPlace(tmp_path, tmp_path), "tunnel")
    becomes(1, starts=4, reason="exit code 255: Permission denied (publickey).")
    refused.check()
    becomes(1, starts=5)
    with pytest.raises(ServerNotReady, match="Permission denied"):
        refused.check()


BUNDLE = ServingBundle(id="b", model="m", identity="i", manifest="m", kind="decoder", files={})


@pytest.mark.parametrize(
    ("hosts", "slurm", "together", "share"),
    [
        (0, False, (1, 2), 2),  # this machine has both
        (2, False, (1, 2), 1),  # each has a node
        (2, False, (1, 2, 3), 2),
        (2, False, (1, 3), 2),  # numbers that were used before lie between them
        (0, True, (1, 2), 1),  # jobs, with a node each
    ],
)
def test_servers_share_their_own_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int, slurm: bool, together: Collection[int], share: int
) -> None:
    """Of two nodes with a server each, both servers took half of the cores and of the memory."""
    placed: list[ServerSpec] = []

    def place_server(place: Any, bundle: Any, spec: ServerSpec, local: bool) -> None:
        placed.append(spec)
        raise ServerNotReady(None, "enough")

    monkeypatch.setattr(placing, "place_server", place_server)
    monkeypatch.setattr(placing, "stop", lambda *_: None)
    there = SimpleNamespace(name="there", root="/there")
    monkeypatch.setattr(placing, "SshPlace", lambda *_: there)
    monkeypatch.setattr(placing, "SlurmPlace", lambda *_: there)
    target = SshTarget.model_validate({"kind": "ssh", "hosts": ["a", "b"][:hosts]}) if hosts else None
    store = Store(data=tmp_path, rented=tmp_path, cache=tmp_path)
    partition = cast(SlurmPartition, object()) if slurm else None
    placer = Placer(store, "d", target, None, "key", 4e9, lambda _: None, partition=partition)
    with pytest.raises(ServerNotReady, match="enough"):
        placer.place(BUNDLE, 1, together, 1.0, lambda: None)
    assert [spec.share for spec in placed] == [share]


@pytest.mark.parametrize("numbered", [False, True], ids=["noted", "by its number"])
def test_a_host_that_is_away_keeps_neither_peers_nor_tunnel(
    numbered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first host of a sharded server away, the ranks of the others and the tunnel ran until they expired."""
    tried: list[tuple[str, str]] = []

    def end_there(place: Place, folder: str) -> None:
        tried.append((place.name, folder))
        if place.name in ("host0", "host2"):
            raise PlaceError(None, f"{place.name}: not reached")

    def host_of(target: Any, node: int, folder: str) -> SimpleNamespace:
        return SimpleNamespace(name=f"host{node}", root=f"/{node}")

    monkeypatch.setattr(placing, "stop", end_there)
    monkeypatch.setattr(placing, "SshPlace", host_of)
    target = SshTarget.model_validate({"kind": "ssh", "hosts": ["a", "b", "c"]})
    store = Store(data=tmp_path, rented=tmp_path, cache=tmp_path)
    placer = Placer(store, "d", target, None, "key", 4e9, lambda _: None, sharded=True)
    tunnel = f"{placer.here.root}/tunnels/7"
    peers = ("/1/servers/7", "/2/servers/7")
    server = PlacedServer(
        generation=7, bundle="b", node=0, folder="/0/servers/7", port=1, tunnel=tunnel, local_port=1, peers=peers
    )
    with pytest.raises(PlaceError, match="host0: not reached; host2: not reached"):
        placer.end_numbered(7) if numbered else placer.end(server)
    hosts = [(f"host{node}", f"/{node}/servers/7") for node in range(3)]
    assert tried == [*hosts, ("local", tunnel)]


def test_sharded_servers_of_deployments_of_one_name_meet_at_ports_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two people who deployed one model over the same hosts the second's ranks met those of the first."""
    monkeypatch.setattr(placing.Placer, "_address", lambda placer, node: "10.0.0.1")
    target = SshTarget.model_validate({"kind": "ssh", "hosts": ["a", "b"]})
    ports = []
    for folder in ("deployments/d-1a2b3c4d", "deployments/d-5e6f7a8b", "deployments/d-1a2b3c4d"):
        placer = Placer(
            Store(data=tmp_path, rented=tmp_path, cache=tmp_path), "d", target, None, "key", 4e9, lambda _: None,
            sharded=True, hosts_folder=folder,
        )  # fmt: skip
        meetings = placer._meetings(2, 1)
        assert meetings[0] is not None and meetings[1] is not None and meetings[0].port == meetings[1].port
        ports.append(meetings[0].port)
    assert ports[0] == ports[2] != ports[1]
