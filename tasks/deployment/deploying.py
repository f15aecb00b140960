"""Deploy a bundle to a target, and take it down: every step has its line in a ledger before it is made.

deployment, timing = Deploying(store, wanted, say, judge).deploy()      # or nothing is left
take_down(store, "tiny-local", say)
"""

import secrets
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from configs.common.base import write_atomically
from configs.common.files.reading import parse_model, read_text
from configs.serving.deployment import Deployment, FrontConfig, PlacedServer, RoutedServer, ServingBundle
from configs.serving.settings import ServerRendezvous
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget, SshTarget
from slurm.ssh.connection import HostAway, HostError, HostRefused
from slurm.ssh.loop import wait_for
from slurm.ssh.staging import stage_hosts
from tasks.deployment.bundles import Judge, WantedBundle, bundle_name, make_bundle, resolved_model, save_bundle
from tasks.deployment.first_answers import Timing, first_answers, timed_answers
from tasks.deployment.fronts import DeploymentFront, open_tunnel
from tasks.deployment.places import LocalPlace, Place, PlaceError, SshPlace, stop
from tasks.deployment.servers import (
    READY_SECONDS,
    ServerNotReady,
    ServerSpec,
    place_server,
    wait_for_port,
    wait_until_ready,
)
from tasks.deployment.store import Store
from tasks.deployment.targets import ParsedTarget
from tasks.providers.attempts import attempts_of
from tasks.providers.clouds import provider_named
from tasks.providers.giving_back import Say, Teardown
from tasks.providers.labels import label, owner
from tasks.providers.leases import RentalLedger, open_ledger, read_entries, read_lease
from tasks.providers.rental import RentalLease
from tasks.providers.renting import Limits, give_back_run, plan_rental, rent
from tasks.providers.study_nodes import hosts_of_nodes, request_of

_TIMED_SECONDS = 2.0
_KEY_BYTES = 32
_FIRST_PORT, _PORTS = 20_000, 10_000
"""Where the ranks of a server on several nodes meet: below the ports that Linux gives out by itself."""


@dataclass(frozen=True)
class WantedDeployment:
    """What a user asks for. rented: the instance to rent; ssh: the hosts; neither: this machine.

    agreed: a person has seen the price. settled_seconds: of giving back, for tests.
    """

    name: str
    target: ParsedTarget
    bundle: WantedBundle
    hours: float = 8.0
    port: int = 0
    replicas: int = 1
    rented: RentedTarget | None = None
    ssh: SshTarget | None = None
    ready_seconds: float = READY_SECONDS
    max_usd_per_hour: float | None = None
    sharded: bool = False


class FirstAnswerWrong(ValueError):
    """A server answers otherwise than the bundle says; it gets no traffic."""


class Deploying:
    """One deployment on its way. A plain class: state lives over the steps."""

    def __init__(
        self, store: Store, wanted: WantedDeployment, say: Say, judge: Judge | None, limits: Limits | None = None
    ) -> None:
        self.store, self.wanted, self.say, self._judge = store, wanted, say, judge
        self._limits = limits or Limits()
        self._folder = store.folder(wanted.name)
        self._key = secrets.token_urlsafe(_KEY_BYTES)
        self._placer: Placer | None = None
        self._servers: list[PlacedServer] = []

    def deploy(self) -> tuple[Deployment, Timing]:
        """Deploy, or leave nothing. Raises ValueError, PlaceError, ServerNotReady, LeftBehind, RentalFailed."""
        wanted = self.wanted
        if (self._folder / "deployment.json").exists():
            raise ValueError(f"--name: {wanted.name} exists. `rankwise undeploy {wanted.name}` takes it down")
        if wanted.name in self.store.unfinished():
            raise ValueError(
                f"--name: deploying {wanted.name} was interrupted before. `rankwise undeploy {wanted.name}` removes "
                "what it left"
            )
        model = resolved_model(wanted.bundle.model, self.store.cache, Path.cwd())
        fit_text = self._fit(model.manifest)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open_ledger(self._folder) as ledger:
            ledger.write("deploying", target=wanted.target.text)
            try:
                return self._deploy(model, fit_text, ledger)
            except BaseException as error:
                ledger.write("failed", problem=str(error)[:500] or type(error).__name__)
                self._take_down(ledger)
                self.store.forget(wanted.name)
                raise

    def _fit(self, manifest_path: str) -> str:
        """Refuse what does not fit before anything is rented."""
        from engine.planner.families import read_architecture
        from tasks.deployment.fit import check_fit, memory_of_rank
        from tasks.models.sources import load_manifest

        manifest, wanted = load_manifest(Path(manifest_path)), self.wanted
        architecture = read_architecture(manifest.config, manifest.identity)
        layout, length = wanted.bundle.layout, wanted.bundle.max_length or 512
        ranks = layout.dp * layout.tp * layout.pp
        provider = name = None
        if wanted.rented is not None:
            name = f"{wanted.rented.kind}/{wanted.rented.instance}"
            provider = wanted.rented.kind
            available = memory_of_rank(name, -(-ranks // wanted.rented.nodes))
        elif wanted.ssh is not None:
            available = SshPlace(wanted.ssh, 0, "").memory_bytes() * len(wanted.ssh.hosts) // ranks
        else:
            available = LocalPlace(self._folder, self.store.cache).memory_bytes() // ranks
        where = wanted.target.text
        return check_fit(
            architecture, layout, wanted.bundle.dtype, length, available, where, self.store.cache, provider, name
        )

    def _deploy(self, model: Any, fit_text: str, ledger: RentalLedger) -> tuple[Deployment, Timing]:
        wanted, began = self.wanted, time.time()
        expires_at = began + 3600 * wanted.hours
        hosts, rental, price = self._hosts(ledger, expires_at)
        local = LocalTarget(device="cpu" if wanted.target.device == "cpu" else None)
        if hosts is not None:
            stage_on_hosts(hosts, [Path(model.manifest)], self.say)
        bundle = make_bundle(
            wanted.bundle, model, hosts or local, self._folder / "measuring", self.store.cache, self._judge, fit_text,
            self.say, nodes=len(hosts.hosts) if hosts is not None and wanted.sharded else 1,
        )  # fmt: skip
        save_bundle(bundle, self.store.bundles)
        write_atomically(self._folder / "key", self._key + "\n", mode=0o600)
        placer = Placer(self.store, wanted.name, hosts, wanted.target.device, self._key, expires_at, self.say, price,
                        sharded=wanted.sharded and hosts is not None and len(hosts.hosts) > 1)  # fmt: skip
        self._placer, servers = placer, self._servers
        for number in range(wanted.replicas):
            ledger.write("placing", generation=1, number=number, bundle=bundle_name(bundle))
            servers.append(placer.place(bundle, 1 + number, wanted.replicas, wanted.ready_seconds, _nothing))
        front = DeploymentFront(placer.here, str(self._folder / "front"))
        ledger.write("front", port=wanted.port)
        config = FrontConfig(key=self._key, backends=tuple(placer.backend(server) for server in servers))
        port = front.begin(config, wanted.port, expires_at)
        deployment = Deployment(
            name=wanted.name,
            target=wanted.target.text,
            kind=wanted.target.kind,
            nodes=len(hosts.hosts) if hosts else 1,
            url=f"http://127.0.0.1:{port}",
            front=front.folder,
            key_file=str(self._folder / "key"),
            bundle=bundle_name(bundle),
            servers=tuple(servers),
            rental=rental,
            hosts=None if hosts is None else hosts.model_dump_json(),
            usd_per_hour=price,
            began_at=began,
            expires_at=expires_at,
        )
        place = placer.place_of(0)
        wait_until_ready(place, servers[0].folder, deployment.url, self._key, 30.0, _nothing)
        self.store.save(deployment)
        timing = timed_answers(deployment.url, self._key, bundle, _TIMED_SECONDS)
        ledger.write("deployed", url=deployment.url, bundle=bundle_name(bundle))
        return deployment, timing

    def _hosts(self, ledger: RentalLedger, expires_at: float) -> tuple[SshTarget | None, str | None, float | None]:
        """Rent what is to be rented; returns hosts, the rental's name and the price an hour of all nodes."""
        wanted = self.wanted
        if wanted.rented is None:
            return wanted.ssh, None, wanted.ssh.price_usd_per_hour if wanted.ssh else None
        provider = provider_named(wanted.rented.kind)
        request = request_of(wanted.rented).model_copy(update={"hours": wanted.hours})
        offer = plan_rental(provider, request, wanted.max_usd_per_hour)
        run = f"{label(wanted.name)[:40]}-{secrets.token_hex(4)}"
        lease = RentalLease(
            study=label(f"deploy-{wanted.name}")[:60], run=run, owner=owner(), expires_at=int(expires_at),
            request=request,
        )  # fmt: skip
        ledger.write("renting", rental=run, provider=wanted.rented.kind)
        folder = self.store.rented / run
        nodes = rent(provider, lease, offer, folder, self.say, self._limits)
        attempt = attempts_of(read_entries(folder / "ledger.jsonl"), time.time())[-1]
        price = None if attempt.usd_per_hour is None else attempt.usd_per_hour * len(nodes)
        return hosts_of_nodes(wanted.rented, nodes, folder, provider.default_user), run, price

    def _take_down(self, ledger: RentalLedger) -> None:
        """End what was placed on hosts that are not rented, and everything else. Raises LeftBehind, PlaceError."""
        if self._placer is not None and self.wanted.ssh is not None:
            for server in self._servers:
                with suppress(OSError):
                    self._placer.end(server)
            for node in range(len(self.wanted.ssh.hosts)):
                with suppress(OSError):
                    place = self._placer.place_of(node)
                    place.ask("remove", paths=[place.root])
        remove_everything(self.store, self.wanted.name, ledger, self.say, self._limits.teardown)


def _nothing() -> None:
    """Wait on: nobody has cancelled."""


def stage_on_hosts(hosts: SshTarget, manifests: list[Path], say: Say) -> None:
    """Bring code, libraries and models to hosts. Raises PlaceError."""
    try:
        wait_for(stage_hosts(hosts, manifests, say))
    except (HostAway, HostError) as error:
        raise PlaceError(error.errno, error.strerror or str(error)) from error
    except HostRefused as error:
        raise PlaceError(None, str(error)) from error


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
    ) -> None:
        self.hosts, self._device, self._key, self._expires_at, self._say = hosts, device, key, expires_at, say
        self._price, self._name, self.sharded = price, name, sharded
        self.here = LocalPlace(store.folder(name), store.cache)
        self._places: dict[int, Place] = {}

    def place_of(self, node: int) -> Place:
        """Return a node as a place."""
        if self.hosts is None:
            return self.here
        if node not in self._places:
            self._places[node] = SshPlace(self.hosts, node, f"deployments/{self._name}")
        return self._places[node]

    def place(
        self, bundle: ServingBundle, generation: int, share: int, ready_seconds: float, check: Callable[[], None]
    ) -> PlacedServer:
        """Start a server, wait for it and test its first answers.

        Raises PlaceError, ServerNotReady, FirstAnswerWrong; what was started is ended then.
        """
        count = len(self.hosts.hosts) if self.hosts else 1
        nodes = count if self.sharded else 1
        node = 0 if self.sharded else (generation - 1) % count
        place = self.place_of(node)
        folder = f"{place.root}/servers/{generation}"
        meetings = self._meetings(nodes, generation)
        peers = tuple(f"{self.place_of(other).root}/servers/{generation}" for other in range(1, nodes))
        tunnel = f"{self.here.root}/tunnels/{generation}" if self.hosts else None
        spec = ServerSpec(
            folder, self._key, self._expires_at, device=self._device, share=share, rendezvous=meetings[0],
            own_address=self._address(0) if peers else None,
        )  # fmt: skip
        self._say(f"placing server {generation} on {place.name}: {_described(bundle)}")
        try:
            place_server(place, bundle, spec, local=self.hosts is None)
            for other, path in enumerate(peers, 1):
                own = self._address(other)
                there = replace(spec, folder=path, rendezvous=meetings[other], own_address=own)
                place_server(self.place_of(other), bundle, there, local=False)
            port = local_port = wait_for_port(place, folder)
            if self.hosts is not None and tunnel is not None:
                host = self.hosts.hosts[node]
                local_port = open_tunnel(self.here, tunnel, self.hosts, host, port, self._expires_at)
            server = PlacedServer(
                generation=generation, bundle=bundle_name(bundle), node=node, folder=folder, port=port, tunnel=tunnel,
                local_port=local_port, peers=peers,
            )  # fmt: skip
            wait_until_ready(place, folder, url_of(server), self._key, ready_seconds, check)
            self._test(server, bundle)
        except BaseException:
            others = [(self.place_of(other), path) for other, path in enumerate(peers, 1)]
            for where, started in ((place, folder), *others, (self.here, tunnel)):
                if started is not None:
                    with suppress(OSError):
                        stop(where, started)
            raise
        return server

    def _meetings(self, nodes: int, generation: int) -> list[ServerRendezvous | None]:
        """Return where the ranks of each node meet; None: all are on one."""
        if nodes == 1:
            return [None]
        address = self._address(0)
        port = _FIRST_PORT + (zlib.crc32(self._name.encode()) + generation) % _PORTS
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
            raise ServerNotReady(None, f"the first request failed: {error or type(error).__name__}") from error
        if problem is not None:
            raise FirstAnswerWrong(f"the first answer is not the bundle's, so it gets no traffic: {problem}")

    def backend(self, server: PlacedServer, draining: bool = False) -> RoutedServer:
        """Return a server as the front knows it."""
        name = f"server-{server.generation}"
        return RoutedServer(name=name, url=url_of(server), key=self._key, usd_per_hour=self._price, draining=draining)

    def end(self, server: PlacedServer) -> None:
        """End a server and its tunnel. Raises PlaceError."""
        stop(self.place_of(server.node), server.folder)
        for other, path in enumerate(server.peers, 1):
            stop(self.place_of(other), path)
        if server.tunnel is not None:
            stop(self.here, server.tunnel)


def url_of(server: PlacedServer) -> str:
    """Return where this machine reaches a server."""
    return f"http://127.0.0.1:{server.local_port}"


def _described(bundle: ServingBundle) -> str:
    passes = "+".join(bundle.compression) or "unchanged weights"
    return f"{bundle.model}, {bundle.level} ({passes}), {bundle.dtype}"


def placer_of(store: Store, deployment: Deployment, say: Say) -> Placer:
    """Return what places servers of a deployment that exists."""
    hosts = None if deployment.hosts is None else parse_model(deployment.hosts.encode(), SshTarget, deployment.name)
    device = "cpu" if deployment.target == "local:cpu" else None
    key = read_text(Path(deployment.key_file), 4096).strip()
    return Placer(store, deployment.name, hosts, device, key, deployment.expires_at, say, deployment.usd_per_hour,
                  sharded=any(server.peers for server in deployment.servers))  # fmt: skip


def take_down(store: Store, name: str, say: Say, patience: Teardown | None = None) -> float | None:
    """Take a deployment down; returns what it cost, None: unknown. Raises ValueError, LeftBehind, PlaceError."""
    folder = store.folder(name)
    if not (folder / "ledger.jsonl").exists():
        store.read(name)  # says which there are
    with open_ledger(folder) as ledger:
        ledger.write("undeploying")
        cost = remove_everything(store, name, ledger, say, patience or Teardown())
        ledger.write("undeployed")
    store.forget(name)
    return cost


def remove_everything(store: Store, name: str, ledger: RentalLedger, say: Say, patience: Teardown) -> float | None:
    """End the front, tunnels and servers, and give rented nodes back. Returns the rental's cost in USD.

    What runs here is found by the folders; on hosts by the deployment's record. A host that cannot be reached does not
    keep the rest: it is named at the end. Raises LeftBehind, PlaceError.
    """
    here = LocalPlace(store.folder(name), store.cache)
    problems: list[str] = []
    for folder in [*Path(here.root).glob("tunnels/*"), *Path(here.root).glob("servers/*"), Path(here.root) / "front"]:
        if folder.is_dir():
            try:
                stop(here, str(folder))
            except OSError as error:
                problems.append(str(error.strerror or error))
    rentals = [entry["rental"] for entry in ledger.entries if entry["event"] == "renting"]
    cost: float | None = 0.0
    for rental in rentals:
        folder = store.rented / rental
        if not (folder / "lease.json").exists():
            continue
        lease = read_lease(folder)
        entries = read_entries(folder / "ledger.jsonl")
        if not entries or entries[-1]["event"] != "given_back":
            give_back_run(provider_named(lease.request.provider), lease, folder, say, patience)
        costs = [
            attempt.usd(lease.request.nodes)
            for attempt in attempts_of(read_entries(folder / "ledger.jsonl"), time.time())
        ]
        cost = None if cost is None or None in costs else cost + sum(one for one in costs if one is not None)
    if not rentals and (store.folder(name) / "deployment.json").exists():
        problems += _clear_hosts(store, store.read(name))
    if problems:
        raise PlaceError(None, "; ".join(problems))
    return cost


def _clear_hosts(store: Store, deployment: Deployment) -> list[str]:
    """End servers on hosts that are not rented, and remove their folders; returns what went wrong."""
    if deployment.hosts is None:
        return []
    problems = []
    placer = placer_of(store, deployment, lambda _: None)
    for node in range(deployment.nodes):
        try:
            place = placer.place_of(node)
            for server in deployment.servers:
                mine = server.folder if server.node == node else server.peers[node - 1] if server.peers else None
                if mine is not None:
                    stop(place, mine)
            place.ask("remove", paths=[place.root])
        except OSError as error:
            problems.append(str(error.strerror or error))
    return problems
