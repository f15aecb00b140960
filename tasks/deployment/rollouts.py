"""Replace the bundle of a running deployment without a failed request, and roll back by itself; more or fewer servers.

    replace_bundle(store, "tiny-local", wanted, say, judge)       # RolledBack: the old bundle goes on
    set_server_count(store, "tiny-local", 3, say)

New servers are placed beside the old ones and tested with the bundle's first requests. Only then the front sends them
requests, and the old ones get none. The new ones are watched for a while; where they fail, the front goes back.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from configs.common.printable import plural
from configs.common.secrets import excerpt
from configs.serving.deployment import Deployment, FrontConfig, PlacedServer, ServingBundle
from configs.targets.target import LocalTarget, SlurmTarget, SshTarget
from tasks.deployment.bundles import (
    Judge,
    WantedBundle,
    bundle_name,
    can_be_cut,
    make_bundle,
    read_bundle,
    resolved_model,
    save_bundle,
)
from tasks.deployment.first_answers import first_answers
from tasks.deployment.fit import check_fit_beside
from tasks.deployment.fronts import DeploymentFront
from tasks.deployment.places import PlaceError
from tasks.deployment.placing import FirstAnswerWrong, Placer, number_of, placer_of, stage_on_hosts, url_of
from tasks.deployment.servers import READY_SECONDS, ServerNotReady, is_ready, on_free_gpus
from tasks.deployment.slurm_places import forget_measuring, stage_in_partition
from tasks.deployment.store import Store
from tasks.models.model_cache import load_manifest
from tasks.providers.giving_back import Say
from tasks.providers.leases import RentalLedger, open_ledger

DRAIN_SECONDS, WATCH_SECONDS = 60.0, 5.0
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 30.0
"""A busy server may answer late: it is not taken back for that. Meanwhile the front sends it nothing."""


class RolledBack(ValueError):
    """The new bundle was not kept; the old one serves as before."""


def replace_bundle(
    store: Store,
    name: str,
    wanted: WantedBundle,
    say: Say,
    judge: Judge | None,
    watch_seconds: float = WATCH_SECONDS,
    ready_seconds: float = READY_SECONDS,
) -> Deployment:
    """Make a bundle for the deployment's target and put it in the place of the one that runs. Raises RolledBack."""
    deployment = _running(store, name)
    placer = placer_of(store, deployment, say)
    model = resolved_model(wanted.model, store.cache, Path.cwd())
    nodes = len(placer.hosts.hosts) if placer.sharded and placer.hosts is not None else 1
    if not can_be_cut(wanted.layout, nodes):
        raise ValueError(
            f"{name}: is one replica with equally many ranks on each of {plural(nodes, 'node')}, got {wanted.layout}"
        )
    manifest = load_manifest(Path(model.manifest))
    fit_text = check_fit_beside(manifest, wanted, placer.place_of(0), deployment, store.cache)
    if placer.hosts is not None:
        stage_on_hosts(placer.hosts, [Path(model.manifest)], say)
    local = LocalTarget(device="cpu" if deployment.target == "local:cpu" else None)
    folder = store.measuring_folder(name)
    if placer.partition is not None:
        placer.partition = stage_in_partition(placer.partition, model, say)
    target: LocalTarget | SshTarget | SlurmTarget
    if placer.partition is not None:
        target = placer.partition.target
    else:
        target = on_free_gpus(placer.hosts or local, placer.place_of(0), wanted.layout.ranks)
    bundle = make_bundle(wanted, model, target, folder, store.cache, judge, fit_text, say, nodes=nodes)
    if placer.partition is not None:
        forget_measuring(placer.partition, folder)
    save_bundle(bundle, store.bundles, False)
    deployment = replace(store, name, bundle, say, watch_seconds, ready_seconds)
    save_bundle(bundle, store.bundles)
    return deployment


def replace(
    store: Store, name: str, bundle: ServingBundle, say: Say, watch_seconds: float = WATCH_SECONDS,
    ready_seconds: float = READY_SECONDS,
) -> Deployment:  # fmt: skip
    """Put a bundle in the place of the one that runs. Raises RolledBack, PlaceError."""
    _running(store, name)
    with open_ledger(store.folder(name)) as ledger:
        deployment = store.read(name)  # as another command that had it meanwhile left it
        placer, old = placer_of(store, deployment, say), deployment.servers
        front = DeploymentFront(placer.here, deployment.front)
        _end_leftovers(front, placer, deployment, ledger, say)
        ledger.write("rolling_out", bundle=bundle_name(bundle))
        try:
            new = _place_all(placer, bundle, _next(deployment, ledger, len(old)), len(old), ready_seconds)
        except BaseException as error:
            ledger.write("deployed", rolled_back=excerpt(str(error) or type(error).__name__, 500))
            if isinstance(error, ServerNotReady | FirstAnswerWrong):
                raise RolledBack(f"{name}: rolled back before any traffic: {_text(error)}") from error
            raise
        before = front.config
        try:
            _switch(front, placer, new, old)
            problem = _watch(front, placer, new, bundle, watch_seconds)
        except BaseException as error:
            _go_back(front, placer, before, new, say)
            ledger.write("deployed", rolled_back=excerpt(str(error) or type(error).__name__, 500))
            raise
        if problem is not None:
            how = "rolled back" if _go_back(front, placer, before, new, say) else "could not be rolled back"
            ledger.write("deployed", rolled_back=excerpt(problem, 500))
            raise RolledBack(f"{name}: {how} after {watch_seconds:g} s of traffic at most: {problem}")
        previous = (*deployment.previous, deployment.bundle)
        told = {"servers": tuple(new), "bundle": bundle_name(bundle), "previous": previous}
        deployment = deployment.model_copy(update=told)
        store.save(deployment)  # the new ones have the traffic, whatever becomes of the old ones
        ledger.write("deployed", bundle=bundle_name(bundle))
        try:
            _end_all(front, placer, old, say)
        except OSError as error:
            say(f"an old server was not ended: {_text(error)}. It ends when the deployment does")
        _switch(front, placer, new, ())
    return deployment


def _running(store: Store, name: str) -> Deployment:
    """Return a deployment. Raises WrongArgument where there is none, ValueError where its time is over."""
    deployment = store.read(name)
    if time.time() >= deployment.expires_at:
        raise ValueError(f"{name}: has expired. `rankwise undeploy {name}` removes what is left of it")
    return deployment


def _go_back(
    front: DeploymentFront, placer: Placer, before: FrontConfig, new: Sequence[PlacedServer], say: Say
) -> bool:
    """Send requests to the old servers again and end the new ones; what cannot be done is named, and expires.

    New servers to which the front still sends requests, as on a full disk, are left to the next command: False.
    """
    try:
        front.apply(before)
    except OSError as error:
        say(f"the front did not go back: {_text(error)}")
        asked = {backend.name for backend in front.config.backends if not backend.draining}
        if asked & {placer.backend(server).name for server in new}:
            say("the new servers still get its requests and go on; the next rollout, scale or undeploy ends them")
            return False
    try:
        _end_all(front, placer, new, say)
    except OSError as error:
        say(f"a new server was not ended: {_text(error)}")
    return True


def set_server_count(
    store: Store, name: str, replicas: int, say: Say, ready_seconds: float = READY_SECONDS
) -> Deployment:
    """Have as many servers; those that go finish what they have begun.

    Raises ValueError, PlaceError, ServerNotReady.
    """
    if not 1 <= replicas <= 64:
        raise ValueError(f"--replicas: got {replicas}, expected 1 to 64")
    _running(store, name)
    with open_ledger(store.folder(name)) as ledger:
        deployment = store.read(name)  # as another command that had it meanwhile left it
        placer, servers = placer_of(store, deployment, say), list(deployment.servers)
        bundle = read_bundle(store.bundles, deployment.bundle)
        front = DeploymentFront(placer.here, deployment.front)
        _end_leftovers(front, placer, deployment, ledger, say)
        ledger.write("scaling", replicas=replicas)
        try:
            if replicas > len(servers):
                missing = replicas - len(servers)
                first = _next(deployment, ledger, missing)
                there = [server.generation for server in servers]
                placed = _place_all(placer, bundle, first, missing, ready_seconds, there)
                before = front.config
                try:
                    _switch(front, placer, [*servers, *placed], ())
                except BaseException:
                    _go_back(front, placer, before, placed, say)
                    raise
                servers += placed
            else:
                servers, gone = servers[:replicas], servers[replicas:]
                _switch(front, placer, servers, gone)
                # Before they end: one that had ended would be counted, and sent requests, by the next command.
                store.save(deployment.model_copy(update={"servers": tuple(servers)}))
                _end_all(front, placer, gone, say)
                _switch(front, placer, servers, ())
        finally:
            ledger.write("deployed", replicas=len(servers))
        deployment = deployment.model_copy(update={"servers": tuple(servers)})
        store.save(deployment)
    return deployment


def _end_leftovers(
    front: DeploymentFront, placer: Placer, deployment: Deployment, ledger: RentalLedger, say: Say
) -> None:
    """End what a rollout or a change of the number of servers left that was killed.

    Requests go to the deployment's own servers again. A server that cannot be ended is named, and expires.
    """
    own = {server.generation for server in deployment.servers}
    routed = {number_of(backend) for backend in front.config.backends} - own
    begun: set[int] = set()
    for entry in ledger.entries:
        if entry["event"] == "deployed":
            begun = set()
        elif entry["event"] == "numbers":
            begun |= set(range(int(entry["first"]), int(entry["last"]) + 1))
    left = sorted(routed | begun - own)
    if left:
        say(f"an earlier command was killed: ending what it left, server {', '.join(map(str, left))}")
    if routed:
        _switch(front, placer, deployment.servers, ())
    for number in left:
        try:
            placer.end_numbered(number)
        except OSError as error:
            say(f"server {number} was not ended: {_text(error)}")


def _next(deployment: Deployment, ledger: RentalLedger, count: int) -> int:
    """Return the first of `count` numbers that no server has had, be it one that was rolled back; notes them."""
    noted = [int(entry["last"]) for entry in ledger.entries if entry["event"] == "numbers"]
    noted += [1 + int(entry["number"]) for entry in ledger.entries if entry["event"] == "placing"]  # by `deploy`
    first = 1 + max([server.generation for server in deployment.servers] + noted)
    ledger.write("numbers", first=first, last=first + count - 1)
    return first


def _place_all(
    placer: Placer, bundle: ServingBundle, first: int, count: int, ready_seconds: float, there: Sequence[int] = ()
) -> list[PlacedServer]:
    """Place servers; all or none. there: numbers of those that stay beside them."""
    placed: list[PlacedServer] = []
    numbers = range(first, first + count)
    try:
        for number in numbers:
            placed.append(placer.place(bundle, number, [*there, *numbers], ready_seconds, lambda: None))
    except BaseException:
        for server in placed:
            with suppress(OSError):  # one that cannot be ended must not keep the others; it expires
                placer.end(server)
        raise
    return placed


def _switch(
    front: DeploymentFront, placer: Placer, active: Sequence[PlacedServer], draining: Sequence[PlacedServer]
) -> None:
    backends = [placer.backend(server) for server in active]
    backends += [placer.backend(server, draining=True) for server in draining]
    front.apply(front.config.model_copy(update={"backends": tuple(backends)}))


def _watch(
    front: DeploymentFront, placer: Placer, servers: Sequence[PlacedServer], bundle: ServingBundle, seconds: float
) -> str | None:
    """Return what is wrong with servers that have traffic; None: nothing for so long."""
    names = {placer.backend(server).name for server in servers}
    key = front.config.key
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(_LOOK_SECONDS, seconds))
        failed = [one for one in front.state.backends if one.name in names and one.failures]
        if failed:
            return f"{failed[0].name} failed {failed[0].failures} of {plural(failed[0].requests, 'request')}"
        for server in servers:
            if not is_ready(url_of(server), key, _ANSWER_SECONDS):
                return f"server-{server.generation} is no longer ready"
    for server in servers:
        try:
            if (problem := first_answers(url_of(server), key, bundle)) is not None:
                return problem
        except httpx.HTTPError as error:
            return f"server-{server.generation}: {str(error) or type(error).__name__}"
    return None


def _end_all(front: DeploymentFront, placer: Placer, servers: Sequence[PlacedServer], say: Say) -> None:
    """End servers when they have answered what they have begun."""
    names = {placer.backend(server).name for server in servers}
    if not front.wait_until_idle(names, DRAIN_SECONDS):
        say(f"{', '.join(sorted(names))}: requests are still in progress after {DRAIN_SECONDS:g} s")
    problems = []
    for server in servers:
        try:
            placer.end(server)
        except OSError as error:
            problems.append(_text(error))
    if problems:
        raise PlaceError(None, "; ".join(problems))


def _text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
