"""Servers of one deployment on their machines: placed, tested with first requests, reached by tunnels, ended.

placer = Placer(store, name, hosts, device, key, expires_at, say)
server = placer.place(bundle, 1, [1], ready_seconds, check)
placer.backend(server), url_of(server), placer.end(server)
"""

import re
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx

from configs.common.files.reading import parse_model, read_text
from configs.common.printable import printable
from configs.serving.deployment import Deployment, PlacedServer, RoutedServer, ServingBundle
from configs.serving.settings import ServerRendezvous
from configs.targets.ssh_host import SshHost
from configs.targets.target import SshTarget
from slurm.ssh.connection import HostAway, HostError, HostRefused
from slurm.ssh.loop import wait_for
from slurm.ssh.staging import stage_hosts
from tasks.deployment.bundles import bundle_name
from tasks.deployment.first_answers import first_answers
from tasks.deployment.fronts import open_tunnel
from tasks.deployment.places import LocalPlace, Place, PlaceError, SshPlace, state, stop
from tasks.deployment.servers import (
    AWAY_SECONDS,
    ServerNotReady,
    ServerSpec,
    place_server,
    wait_for_port,
    wait_until_ready,
)
from tasks.deployment.slurm_places import SlurmPartition, SlurmPlace
from tasks.deployment.store import Store
from tasks.providers.giving_back import Say

_FAILED_TUNNELS = 4
_CONNECT_SECONDS = 15.0
"""A tunnel that has run for so long is connected: ssh gives up after 10 s."""
_NOBODY = re.compile("refused|reset|closed|timed out|unreachable|no route|broken pipe|temporary failure", re.IGNORECASE)
"""What ssh says of a machine, or a way to it, that is away and may come back."""
_FIRST_PORT, _PORTS = 20_000, 10_000
"""Where the ranks of a server on several nodes meet: below the ports that Linux gives out by itself."""
_SERVER = "server-"


class FirstAnswerWrong(ValueError):
    """A server answers otherwise than the bundle says; it gets no traffic."""


def stage_on_hosts(hosts: SshTarget, manifests: list[Path], say: Say) -> None:
    """Bring code, libraries and models to hosts. Raises PlaceError."""
    try:
        wait_for(stage_hosts(hosts, manifests, say))
    except (HostAway, HostError) as error:
        raise PlaceError(error.errno, error.strerror or str(error)) from error
    except HostRefused as error:
        raise PlaceError(None, str(error)) from error


class TunnelWatch:
    """Looks whether a tunnel comes up while its server starts.

    One that is refused is given up after a few starts. One that finds nobody is tried for as long as a connection may
    be lost meanwhile, however often that is: the first starts follow within three seconds.
    """

    def __init__(self, place: Place, folder: str) -> None:
        self._place, self._folder = place, folder
        self._lost: float | None = None

    def check(self) -> None:
        """Raise ServerNotReady where it does not."""
        told = state(self._place, self._folder)
        if told is None or told.starts <= _FAILED_TUNNELS:
            return
        if told.state == "running" and time.time() - told.since > _CONNECT_SECONDS:
            self._lost = None  # it stands
            return
        now = time.monotonic()
        self._lost = now if self._lost is None else self._lost
        if now - self._lost > AWAY_SECONDS or not _NOBODY.search(told.reason):
            raise ServerNotReady(None, f"no SSH tunnel to the server's machine: {printable(told.reason, 300)}")


def _check(tunnel: TunnelWatch | None, check: Callable[[], None]) -> None:
    check()
    if tunnel is not None:
        tunnel.check()


class Placer:
    """Places servers of one deployment, here or on its hosts, and reaches them."""

    def __init__(
        self,
        store: Store,
        name: str,
        hosts: SshTarget | None,
        device: str | None,
        key: str,
        expires_at: float,
        say: Say,
        price: float | None = None,
        sharded: bool = False,
        partition: SlurmPartition | None = None,
        hosts_folder: str | None = None,
    ) -> None:
        """hosts_folder: of the deployment on its hosts, or below the folder that a partition shares."""
        self.hosts, self._device, self._key, self._expires_at, self._say = hosts, device, key, expires_at, say
        self._price, self.sharded = price, sharded
        self.partition, self._hosts_folder = partition, hosts_folder or f"deployments/{name}"
        self.here = LocalPlace(store.folder(name), store.cache)
        self._places: dict[int, Place] = {}

    def place_of(self, node: int) -> Place:
        """Return a node as a place; a partition is one, whichever nodes its jobs are on."""
        if node not in self._places:
            if self.partition is not None:
                self._places[node] = SlurmPlace(self.partition, self._hosts_folder, self._expires_at, self._say)
            elif self.hosts is not None:
                self._places[node] = SshPlace(self.hosts, node, self._hosts_folder)
            else:
                return self.here
        return self._places[node]

    def place(
        self,
        bundle: ServingBundle,
        generation: int,
        together: Collection[int],
        ready_seconds: float,
        check: Callable[[], None],
    ) -> PlacedServer:
        """Start a server, wait for it and test its first answers.

        together: numbers of all servers that the deployment is to have, which share the machines; this one among them.
        Raises PlaceError, ServerNotReady, FirstAnswerWrong; what was started is ended then.
        """
        nodes = self._count if self.sharded else 1
        node = self._node_of(generation)
        place = self.place_of(node)
        folder = f"{place.root}/servers/{generation}"
        meetings = self._meetings(nodes, generation)
        peers = tuple(f"{self.place_of(other).root}/servers/{generation}" for other in range(1, nodes))
        local = self.hosts is None and self.partition is None
        tunnel = None if local else f"{self.here.root}/tunnels/{generation}"
        spec = ServerSpec(
            folder, self._key, self._expires_at, device=self._device, share=self._sharing(generation, together),
            rendezvous=meetings[0], own_address=self._address(0) if peers else None, beside=self._beside(generation),
        )  # fmt: skip
        self._say(f"placing server {generation} on {place.name}: {_described(bundle)}")
        try:
            place_server(place, bundle, spec, local)
            for other, path in enumerate(peers, 1):
                own = self._address(other)
                there = replace(spec, folder=path, rendezvous=meetings[other], own_address=own)
                place_server(self.place_of(other), bundle, there, local=False)
            hosts, host = self._reached(place, node, folder, ready_seconds)
            port = local_port = wait_for_port(place, folder)
            if hosts is not None and host is not None and tunnel is not None:
                local_port = open_tunnel(self.here, tunnel, hosts, host, port, self._expires_at)
            server = PlacedServer(
                generation=generation, bundle=bundle_name(bundle), node=node, folder=folder, port=port, tunnel=tunnel,
                local_port=local_port, peers=peers,
            )  # fmt: skip
            watch = None if tunnel is None else TunnelWatch(self.here, tunnel)
            wait_until_ready(place, folder, url_of(server), self._key, ready_seconds, partial(_check, watch, check))
            self._test(server, bundle)
        except BaseException:
            others = [(self.place_of(other), path) for other, path in enumerate(peers, 1)]
            for where, started in ((place, folder), *others, (self.here, tunnel)):
                if started is not None:
                    with suppress(OSError):
                        stop(where, started)
            raise
        return server

    @property
    def _count(self) -> int:
        return len(self.hosts.hosts) if self.hosts else 1

    def _node_of(self, number: int) -> int:
        """Return the node of a server; the first of its nodes, where it is on all."""
        return 0 if self.sharded else (number - 1) % self._count

    def _sharing(self, number: int, together: Collection[int]) -> int:
        """Return how many servers have a part of this one's machine: each job of Slurm has a node to itself."""
        if self.partition is not None:
            return 1
        return sum(self._node_of(other) == self._node_of(number) for other in together)

    def _beside(self, number: int) -> tuple[str, ...]:
        """Return the folders of the servers that were placed on the same machine before, those that have ended too."""
        if self.partition is not None or self.sharded:
            return ()
        node = self._node_of(number)
        return tuple(
            f"{self.place_of(node).root}/servers/{other}" for other in range(1, number) if self._node_of(other) == node
        )

    def _reached(self, place: Place, node: int, folder: str, seconds: float) -> tuple[SshTarget | None, SshHost | None]:
        """Return how a server's machine is reached by SSH; None: it is this one. Waits for a job to run."""
        if self.partition is not None:
            assert isinstance(place, SlurmPlace)
            return self.partition.node(place.node_of(folder, seconds))
        return self.hosts, self.hosts.hosts[node] if self.hosts is not None else None

    def _meetings(self, nodes: int, generation: int) -> list[ServerRendezvous | None]:
        """Return where the ranks of each node meet; None: all are on one."""
        if nodes == 1:
            return [None]
        address = self._address(0)
        # By the folder: several people with a login on the hosts may have deployments of one name.
        port = _FIRST_PORT + (zlib.crc32(self._hosts_folder.encode()) + generation) % _PORTS
        return [ServerRendezvous(nodes=nodes, node=node, address=address, port=port) for node in range(nodes)]

    def _address(self, node: int) -> str:
        """Return the address by which the other nodes reach this one."""
        place = self.place_of(node)
        assert isinstance(place, SshPlace)
        return place.address

    def _test(self, server: PlacedServer, bundle: ServingBundle) -> None:
        try:
            problem = first_answers(url_of(server), self._key, bundle)
        except httpx.HTTPError as error:
            raise ServerNotReady(None, f"the first request failed: {str(error) or type(error).__name__}") from error
        if problem is not None:
            raise FirstAnswerWrong(f"the first answer is not the bundle's, so it gets no traffic: {problem}")

    def backend(self, server: PlacedServer, draining: bool = False) -> RoutedServer:
        """Return a server as the front knows it."""
        name = f"{_SERVER}{server.generation}"
        return RoutedServer(name=name, url=url_of(server), key=self._key, usd_per_hour=self._price, draining=draining)

    def end(self, server: PlacedServer) -> None:
        """End a server and its tunnel. Raises PlaceError naming what was not ended, after all the rest is."""
        parts = [(self.place_of(server.node), server.folder)]
        parts += [(self.place_of(other), path) for other, path in enumerate(server.peers, 1)]
        parts += [] if server.tunnel is None else [(self.here, server.tunnel)]
        _stop_all(parts)

    def end_numbered(self, number: int) -> None:
        """End a server of which only the number is known; one that never began is no error. Raises as `end` does."""
        places = [self.place_of(node) for node in (range(self._count) if self.sharded else [self._node_of(number)])]
        parts = [(place, f"{place.root}/servers/{number}") for place in places]
        _stop_all([*parts, (self.here, f"{self.here.root}/tunnels/{number}")])


def _stop_all(parts: Sequence[tuple[Place, str]]) -> None:
    """End services by place and folder. A machine that is away keeps no other; it is named by the PlaceError."""
    problems = []
    for place, folder in parts:
        try:
            stop(place, folder)
        except OSError as error:
            problems.append(error.strerror or str(error))
    if problems:
        raise PlaceError(None, "; ".join(problems))


def url_of(server: PlacedServer) -> str:
    """Return where this machine reaches a server."""
    return f"http://127.0.0.1:{server.local_port}"


def number_of(backend: RoutedServer) -> int:
    """Return the number of the server that the front knows by this name."""
    return int(backend.name.removeprefix(_SERVER))


def _described(bundle: ServingBundle) -> str:
    passes = "+".join(bundle.compression) or "unchanged weights"
    return f"{bundle.model}, {bundle.level} ({passes}), {bundle.dtype}"


def placer_of(store: Store, deployment: Deployment, say: Say) -> Placer:
    """Return what places servers of a deployment that exists."""
    hosts = None if deployment.hosts is None else parse_model(deployment.hosts.encode(), SshTarget, deployment.name)
    named = deployment.partition
    partition = None if named is None else parse_model(named.encode(), SlurmPartition, deployment.name)
    device = "cpu" if deployment.target == "local:cpu" else None
    key = read_text(Path(deployment.key_file), 4096).strip()
    return Placer(store, deployment.name, hosts, device, key, deployment.expires_at, say, deployment.usd_per_hour,
                  sharded=any(server.peers for server in deployment.servers), partition=partition,
                  hosts_folder=deployment.hosts_folder)  # fmt: skip
