"""Deploy a bundle to a target: every step has its line in a ledger before it is made.

deployment, timing = Deploying(store, wanted, say, judge).deploy()      # or nothing is left
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from configs.common.base import write_atomically
from configs.common.secrets import excerpt
from configs.common.system.ports import check_port
from configs.families.checkpoint import WORKLOADS_OF
from configs.hardware.prices import listed_offers
from configs.serving.deployment import Deployment, FrontConfig, PlacedServer
from configs.serving.settings import GROUP_TIMEOUT_SECONDS
from configs.targets.rented import RentedTarget
from configs.targets.target import LocalTarget, SshTarget
from tasks.deployment.bundles import (
    Judge,
    WantedBundle,
    bundle_name,
    make_bundle,
    resolved_model,
    save_bundle,
    served_length,
)
from tasks.deployment.first_answers import Timing, timed_answers
from tasks.deployment.fronts import DeploymentFront
from tasks.deployment.level_checks import LEAST_LENGTH
from tasks.deployment.places import LocalPlace, Place, PlaceError, SshPlace
from tasks.deployment.placing import Placer, stage_on_hosts
from tasks.deployment.servers import (
    READY_SECONDS,
    ServerNotReady,
    device_groups,
    on_free_gpus,
    wait_until_ready,
)
from tasks.deployment.slurm_places import SlurmPartition, SlurmPlace, forget_measuring, stage_in_partition
from tasks.deployment.store import Store
from tasks.deployment.taking_down import remove_everything
from tasks.deployment.targets import ParsedTarget
from tasks.models.judgement import judge_model
from tasks.planning.study_models import model_spec
from tasks.providers.attempts import attempts_of
from tasks.providers.clouds import provider_named
from tasks.providers.giving_back import LeftBehind, Say
from tasks.providers.labels import label, owner
from tasks.providers.leases import RentalLedger, open_ledger, read_entries
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import ProviderError, RentalLease
from tasks.providers.renting import plan_rental, rent
from tasks.providers.study_nodes import hosts_of_nodes, request_of
from tasks.serving.settings import only_of_decoders

if TYPE_CHECKING:
    from engine.planner.architecture import Architecture

_TIMED_SECONDS = 2.0
_LOOK_SECONDS = 0.5
_KEY_BYTES = 32


@dataclass(frozen=True)
class WantedDeployment:
    """What a user asks for. rented: the instance to rent; ssh: the hosts; partition: of Slurm; none: this machine.

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
    partition: SlurmPartition | None = None
    ready_seconds: float = READY_SECONDS
    max_usd_per_hour: float | None = None
    sharded: bool = False


class Deploying:
    """One deployment on its way. A plain class: state lives over the steps."""

    def __init__(
        self, store: Store, wanted: WantedDeployment, say: Say, judge: Judge | None, limits: Limits | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """check: raises what ends the deployment early; asked at each step, and while nodes and servers come up."""
        self.store, self.wanted, self.say, self._judge = store, wanted, say, judge
        self._limits, self._check = limits or Limits(sleep=self._sleep), check
        self._folder = store.folder(wanted.name)
        self._key = secrets.token_urlsafe(_KEY_BYTES)

    def deploy(self) -> tuple[Deployment, Timing]:
        """Deploy, or leave nothing. Raises ValueError, PlaceError, ServerNotReady, LeftBehind, RentalFailed."""
        wanted = self.wanted
        self._refuse_taken(wanted.name in self.store.unfinished())
        if wanted.port:
            check_port(wanted.port)  # the front begins last, after all that takes time and money
        self.wanted = wanted = self._cut_over_devices()
        self._refuse_too_large()
        model = resolved_model(wanted.bundle.model, self.store.cache, Path.cwd())
        fit_text = self._fit(model.manifest)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open_ledger(self._folder) as ledger:
            # Another command may have had the name meanwhile: models can take minutes to come.
            self._refuse_taken(bool(ledger.entries) and ledger.entries[-1]["event"] != "undeployed")
            ledger.write("deploying", target=wanted.target.text)
            try:
                return self._deploy(model, fit_text, ledger)
            except BaseException as error:
                problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
                ledger.note("failed", problem=excerpt(problem, 500))
                try:
                    remove_everything(self.store, wanted.name, ledger, self.say, self._limits.teardown)
                except PlaceError as left:  # it is remembered, as a server may run on there until it expires
                    raise PlaceError(
                        None, f"{problem}. Something may be left: {left.strerror}. `rankwise undeploy {wanted.name}` "
                        "removes it"
                    ) from error  # fmt: skip
                except (LeftBehind, ProviderError):
                    if not isinstance(error, LeftBehind):  # what follows names what is left, and not why
                        self.say(f"not deployed: {excerpt(problem, 500)}")
                    raise
                self.store.forget(wanted.name)
                raise

    def _sleep(self, seconds: float) -> None:
        """Pass time while nodes are rented, unless something ends the deployment."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._check()
            time.sleep(min(_LOOK_SECONDS, left))

    def _cut_over_devices(self) -> WantedDeployment:
        """Cut a sharded server over all GPUs of this machine or of the hosts, which only they can tell."""
        wanted = self.wanted
        if not wanted.sharded or wanted.bundle.from_run is not None or wanted.target.device == "cpu":
            return wanted
        places: list[Place] = []
        if wanted.ssh is not None:
            places = [SshPlace(wanted.ssh, number, "") for number in range(len(wanted.ssh.hosts))]
        elif wanted.rented is None:
            places = [LocalPlace(self._folder, self.store.cache)]
        devices = max(1, min((place.gpu_count() for place in places), default=1))  # as many on each
        layout = wanted.bundle.layout
        cut = layout.model_copy(update={"tp": layout.tp * devices})
        return replace(wanted, bundle=replace(wanted.bundle, layout=cut))

    def _refuse_taken(self, unfinished: bool) -> None:
        """Raise ValueError for the name of a deployment that exists, or of which something may be left."""
        name = self.wanted.name
        if (self._folder / "deployment.json").exists():
            raise ValueError(f"--name: {name} exists. `rankwise undeploy {name}` takes it down")
        if unfinished:
            raise ValueError(
                f"--name: deploying {name} was interrupted before. `rankwise undeploy {name}` removes what it left"
            )

    def _refuse_too_large(self) -> None:
        """Refuse what does not fit by its configuration alone: to fetch or read a large model's weights takes long."""
        from engine.planner.families import read_architecture
        from tasks.models.sources import described_config

        spec = model_spec(self.wanted.bundle.model, Path.cwd())
        config = described_config(spec.id, spec.revision, self.store.cache, Path.cwd())
        architecture = None
        with suppress(ValueError):  # `judge_model` knows more of what is wrong
            architecture = None if config is None else read_architecture(config, spec.name)
        if architecture is not None:
            self._check_memory(architecture, served_length(architecture, self.wanted.bundle.max_length))

    def _fit(self, manifest_path: str) -> str:
        """Refuse what the server cannot load, or what does not fit, before anything is rented."""
        from engine.planner.families import read_architecture
        from tasks.models.model_cache import load_manifest

        manifest, wanted = load_manifest(Path(manifest_path)), self.wanted
        architecture = read_architecture(manifest.config, manifest.identity)
        if architecture.kind != "decoder" and wanted.bundle.group_timeout_seconds != GROUP_TIMEOUT_SECONDS:
            raise only_of_decoders("--group-timeout-seconds", wanted.bundle.model, architecture)
        judge_model(manifest, WORKLOADS_OF.get(architecture.kind, WORKLOADS_OF["decoder"])[0], wanted.bundle.model)
        length = served_length(architecture, wanted.bundle.max_length)
        if wanted.bundle.max_length is not None and length < wanted.bundle.max_length:
            raise ValueError(f"--max-length {wanted.bundle.max_length}: {wanted.bundle.model} has {length} positions")
        if length < LEAST_LENGTH:
            asked = "" if wanted.bundle.max_length is None else f"--max-length {wanted.bundle.max_length}: "
            raise ValueError(
                f"{asked}{length} tokens are too few for the requests with which a server is tested. It needs "
                f"{LEAST_LENGTH}"
            )
        return self._check_memory(architecture, length)

    def _check_memory(self, architecture: "Architecture", length: int) -> str:
        """Return how the model fits the target. length: tokens of a sequence. Raises ValueError where it does not."""
        from tasks.deployment.fit import check_fit

        wanted, layout = self.wanted, self.wanted.bundle.layout
        provider = name = None
        if wanted.rented is not None:
            provider, name = wanted.rented.kind, f"{wanted.rented.kind}/{wanted.rented.instance}"
        available, devices = self._room
        servers = _servers_of_a_machine(wanted)
        if not wanted.sharded:
            servers = ceil(servers / device_groups(devices, layout.ranks))  # others have GPUs of their own
        return check_fit(
            architecture, layout, wanted.bundle.dtype, length, available, wanted.target.text, self.store.cache,
            provider, name, servers,
        )  # fmt: skip

    @cached_property
    def _room(self) -> tuple[int | None, int]:
        """Bytes of memory of each rank (None: unknown), and GPUs of a machine; the target is asked once.

        Raises ValueError, OSError.
        """
        from tasks.deployment.fit import devices_of, free_memory_of_rank, memory_of_rank

        wanted, ranks = self.wanted, self.wanted.bundle.layout.ranks
        if wanted.rented is not None:
            name = f"{wanted.rented.kind}/{wanted.rented.instance}"
            on_one = -(-ranks // wanted.rented.nodes) if wanted.sharded else ranks
            return memory_of_rank(name, on_one), devices_of(wanted.target)
        place, device = self._place, wanted.target.device
        if wanted.partition is not None:
            return free_memory_of_rank(place, None, ranks), 0
        machines = len(wanted.ssh.hosts) if wanted.ssh is not None and wanted.sharded else 1  # of one server
        servers = _servers_of_a_machine(wanted)
        available = free_memory_of_rank(place, device, ranks, machines, servers)
        return available, 0 if device == "cpu" else place.gpu_count()

    @cached_property
    def _place(self) -> Place:
        """The first machine of a target that is not rented."""
        wanted = self.wanted
        if wanted.ssh is not None:
            return SshPlace(wanted.ssh, 0, "")
        if wanted.partition is not None:
            return SlurmPlace(wanted.partition, "deployments", 0.0, self.say)
        return LocalPlace(self._folder, self.store.cache)

    def _measured_on(self, target: LocalTarget | SshTarget) -> LocalTarget | SshTarget:
        """Return where the bundle is measured: beside other deployments, on GPUs that they leave free."""
        wanted = self.wanted
        if wanted.rented is not None:  # nobody else has anything there
            return target
        return on_free_gpus(target, self._place, wanted.bundle.layout.ranks)

    def _deploy(self, model: Any, fit_text: str, ledger: RentalLedger) -> tuple[Deployment, Timing]:
        wanted, began = self.wanted, time.time()
        self._check()
        expires_at = began + 3600 * wanted.hours
        model_bytes = 0 if wanted.rented is None else _model_bytes(Path(model.manifest))
        hosts, rental, price = self._hosts(ledger, expires_at, model_bytes)
        local = LocalTarget(device="cpu" if wanted.target.device == "cpu" else None)
        partition, measuring = wanted.partition, self.store.measuring_folder(wanted.name)
        # Neither name nor path tells it from others there: people may share a login, and containers have equal paths.
        remote = hosts is not None or partition is not None
        hosts_folder = f"deployments/{wanted.name}-{secrets.token_hex(4)}" if remote else None
        if wanted.ssh is not None:
            ledger.write("hosts", hosts=wanted.ssh.model_dump_json(), folder=hosts_folder)
        if hosts is not None:
            stage_on_hosts(hosts, [Path(model.manifest)], self.say)
        elif partition is not None:
            ledger.write("slurm", partition=partition.model_dump_json(), folder=hosts_folder)
            partition = stage_in_partition(partition, model, self.say)
        bundle = make_bundle(
            wanted.bundle, model, partition.target if partition else self._measured_on(hosts or local), measuring,
            self.store.cache,
            self._judge, fit_text, self.say, nodes=len(hosts.hosts) if hosts is not None and wanted.sharded else 1,
        )  # fmt: skip
        if partition is not None:
            forget_measuring(partition, measuring)
        save_bundle(bundle, self.store.bundles, False)
        write_atomically(self._folder / "key", self._key + "\n", mode=0o600)
        placer = Placer(self.store, wanted.name, hosts, wanted.target.device, self._key, expires_at, self.say, price,
                        sharded=wanted.sharded and hosts is not None and len(hosts.hosts) > 1,
                        partition=partition, hosts_folder=hosts_folder)  # fmt: skip
        servers: list[PlacedServer] = []
        together = range(1, 1 + wanted.replicas)
        for number in range(wanted.replicas):
            self._check()
            ledger.write("placing", generation=1, number=number, bundle=bundle_name(bundle))
            servers.append(placer.place(bundle, 1 + number, together, wanted.ready_seconds, self._check))
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
            hosts_folder=hosts_folder,
            partition=None if partition is None else partition.model_dump_json(),
            usd_per_hour=price,
            began_at=began,
            expires_at=expires_at,
        )
        place = placer.place_of(0)
        wait_until_ready(place, servers[0].folder, deployment.url, self._key, 30.0, self._check)
        self.store.save(deployment)
        try:
            timing = timed_answers(deployment.url, self._key, bundle, _TIMED_SECONDS)
        except httpx.HTTPError as error:
            raise ServerNotReady(None, f"a request was not answered: {str(error) or type(error).__name__}") from error
        save_bundle(bundle, self.store.bundles)
        ledger.write("deployed", url=deployment.url, bundle=bundle_name(bundle))
        return deployment, timing

    def _hosts(
        self, ledger: RentalLedger, expires_at: float, model_bytes: int = 0
    ) -> tuple[SshTarget | None, str | None, float | None]:
        """Rent what is to be rented; returns hosts, the rental's name and the price an hour of all nodes.

        model_bytes: for which the nodes' disks have room, too.
        """
        wanted = self.wanted
        if wanted.rented is None:
            return wanted.ssh, None, wanted.ssh.price_usd_per_hour if wanted.ssh else None
        provider = provider_named(wanted.rented.kind)
        request = request_of(wanted.rented)
        disk_gb = request.disk_gb + ceil(model_bytes / 2**30)
        request = request.model_copy(update={"hours": wanted.hours, "disk_gb": disk_gb})
        offer = plan_rental(provider, request, wanted.max_usd_per_hour, listed_offers(self.store.cache))
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


def _servers_of_a_machine(wanted: WantedDeployment) -> int:
    """Return how many servers share a machine, at most: each job of Slurm has a node to itself."""
    if wanted.partition is not None:
        return 1
    machines = wanted.rented.nodes if wanted.rented else len(wanted.ssh.hosts) if wanted.ssh else 1
    return wanted.replicas if wanted.sharded else ceil(wanted.replicas / machines)


def _model_bytes(manifest: Path) -> int:
    from tasks.models.model_cache import load_manifest

    return sum(file.size_bytes for file in load_manifest(manifest).files.values())
