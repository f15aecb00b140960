"""Servers of a bundle on a place: written, started, waited for, tested with the first requests, ended.

place_server(place, bundle, spec, local)         # a service under a supervisor
port = wait_for_port(place, folder)
wait_until_ready(place, folder, url, key, seconds, check)     # ServerNotReady: with the end of its log
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TypeVar

import httpx

from configs.common.files.reading import parse_model
from configs.common.printable import printable
from configs.serving.deployment import ServiceState, ServingBundle, SupervisedProcess
from configs.serving.settings import BLOCK_POSITIONS, ServerRendezvous, ServingSettings
from configs.targets.target import LocalTarget, SshTarget
from engine.planner.families import read_architecture
from engine.planner.local import estimated_machine, this_fingerprint
from engine.planner.serving import block_bytes, cache_room, cacheless_bytes
from tasks.deployment.places import Place, PlaceAway, is_supervised, read, start_supervisor, state, write
from tasks.models.model_cache import load_manifest

T = TypeVar("T")
READY_SECONDS = 600.0
_LOOK_SECONDS, _START_SECONDS = 0.2, 30.0
AWAY_SECONDS = 60.0
"""As long as a connection may be lost while a server starts."""
_CACHE_SHARE = 0.5
_FAILED_STARTS = 3
_GIB = 1 << 30
_MUCH_BYTES = 4 * _GIB
"""GPUs whose free memory differs by less are alike."""
_STEP_TOKENS = {"cpu": 128, "gpu": 2048}
_LOG_BYTES, _SETTINGS_BYTES = 4000, 1 << 20


class ServerNotReady(OSError):
    """A server that was placed does not answer; the message has the reason that its log gives."""


@dataclass(frozen=True)
class ServerSpec:
    """Where one server is placed. folder: on the place. port: 0: a free one. device: cpu, or whatever is there.

    rendezvous: of a server whose ranks are on several nodes; None: all are on this one. own_address: this node's, as
    the others reach it. share: how many servers have a part of the place. beside: folders of those that may be there.
    """

    folder: str
    key: str
    expires_at: float
    port: int = 0
    device: str | None = None
    rendezvous: ServerRendezvous | None = None
    share: int = 1
    own_address: str | None = None
    beside: tuple[str, ...] = ()


def manifest_at(place: Place, bundle: ServingBundle, local: bool) -> str:
    """Return the path of a bundle's manifest there."""
    return bundle.manifest if local else f"{place.models}/{Path(bundle.manifest).parent.name}/manifest.json"


def place_server(place: Place, bundle: ServingBundle, spec: ServerSpec, local: bool) -> None:
    """Write the files of a server and start its supervisor. Raises PlaceError."""
    settings = settings_of(place, bundle, spec, manifest_at(place, bundle, local))
    module = "engine.serving.http.main" if bundle.kind == "decoder" else "engine.answering.main"
    first = spec.rendezvous is None or spec.rendezvous.node == 0
    if not first:
        module = "engine.serving.remote_ranks"
    service = SupervisedProcess(
        argv=(place.python, "-m", module, f"{spec.folder}/settings.json"),
        key_file="key" if first else None,
        settings="settings.json" if first else None,
        port=spec.port,
        expires_at=spec.expires_at + place.clock_seconds,  # its supervisor looks at the clock there
        own_address=spec.own_address,
        add_pid=True,
    )
    place.ask("make", paths=[spec.folder])
    write(place, f"{spec.folder}/settings.json", settings.model_dump_json())
    if first:  # the other nodes' ranks answer nobody
        write(place, f"{spec.folder}/key", spec.key + "\n")
    write(place, f"{spec.folder}/service.json", service.model_dump_json())
    start_supervisor(place, spec.folder)


def settings_of(place: Place, bundle: ServingBundle, spec: ServerSpec, manifest: str) -> ServingSettings:
    """Return the settings of a server: its cache has room for all sequences, or for what the memory holds."""
    length = bundle.max_length or BLOCK_POSITIONS
    layout = bundle.layout
    nodes = spec.rendezvous.nodes if spec.rendezvous else 1
    ranks = max(1, layout.dp * layout.tp * layout.pp // nodes)
    kind = "gpu" if spec.device != "cpu" and place.gpu_count() else "cpu"
    steps = max(bundle.max_sequences, _STEP_TOKENS[kind])
    first_device = _first_device(place, spec, ranks)
    blocks = _blocks(place, bundle, spec, ranks, steps, first_device) if bundle.kind == "decoder" else 1
    return ServingSettings(
        name=bundle.model,
        manifest=manifest,
        folder=spec.folder,
        port=spec.port,
        layout=layout,
        dtype=bundle.dtype,
        compression=bundle.compression,
        device=spec.device,
        first_device=first_device,
        cores_per_rank=max(1, place.cores() // (ranks * spec.share)),
        max_length=length,
        max_sequences=bundle.max_sequences,
        max_step_tokens=steps,
        blocks=blocks,
        group_timeout_seconds=bundle.group_timeout_seconds,
        rendezvous=spec.rendezvous,
    )


def device_groups(count: int, ranks: int) -> int:
    """Return how many servers of so many ranks have GPUs of their own on a machine with `count`; at least one."""
    return max(1, count // ranks)


def _first_device(place: Place, spec: ServerSpec, ranks: int) -> int | None:
    """Return the place of a server's first GPU: of the groups of as many GPUs, one that the fewest others have.

    Of equal ones that with most free memory: other deployments have theirs. None: the ranks take the machine's first
    GPUs, because there is no choice.
    """
    groups = 1 if spec.device == "cpu" or spec.rendezvous else device_groups(place.gpu_count(), ranks)
    if groups == 1:
        return None
    taken = [_device_of(place, folder) for folder in spec.beside]
    used = [sum(one is not None and one // ranks == group for one in taken) for group in range(groups)]
    least = [group for group in range(groups) if used[group] == min(used)]
    return _freest(least, free_in_groups(place, ranks)) * ranks


def free_in_groups(place: Place, ranks: int) -> list[int | None]:
    """Return what is free on the GPU that has least of each group of `ranks` GPUs; None where it is not known."""
    groups = range(device_groups(place.gpu_count(), ranks))
    return [place.gpu_memory_bytes(group * ranks, ranks) for group in groups]


def _freest(groups: Sequence[int], free: Sequence[int | None]) -> int:
    """Return the first of the groups whose GPUs have as much free memory as any, or nearly."""
    most = max(free[group] or 0 for group in groups)
    return next(group for group in groups if (free[group] or 0) >= most - _MUCH_BYTES)


def on_free_gpus(target: LocalTarget | SshTarget, place: Place, ranks: int) -> LocalTarget | SshTarget:
    """Return a target whose ranks see the GPUs of which others have least, where there are more than they take.

    place: the target's first machine; of several they may run on any. Ranks that measure for a bundle take the first
    GPUs else, which may be another deployment's.
    """
    alone = isinstance(target, LocalTarget) or len(target.hosts) == 1
    groups = 1 if target.device == "cpu" or not alone else device_groups(place.gpu_count(), ranks)
    if groups == 1:
        return target
    best = _freest(range(groups), free_in_groups(place, ranks))
    return target.model_copy(update={"env": place.gpu_variables(best * ranks, ranks) | target.env})


def _device_of(place: Place, folder: str) -> int | None:
    """Return where a server's GPUs begin; None: no server lives in that folder."""
    data = read(place, f"{folder}/settings.json", _SETTINGS_BYTES)
    if data is None or not is_supervised(place, folder):
        return None
    return parse_model(data, ServingSettings, f"{place.name}: {folder}/settings.json").first_device or 0


def _blocks(
    place: Place, bundle: ServingBundle, spec: ServerSpec, ranks: int, step_tokens: int, first_device: int | None
) -> int:
    """Return the blocks of a server's cache: for all sequences, or what fits into half of a rank's memory.

    A rank has a GPU's memory to itself, where it computes on one; weights and a step's tokens need their part. Raises
    ServerNotReady where the machine has no room for them now: starting would end another server for want of memory.
    """
    manifest = load_manifest(Path(bundle.manifest))
    architecture = read_architecture(manifest.config, manifest.identity)
    if first_device is None:
        gpu = None if spec.device == "cpu" else place.gpu_memory_bytes()
        share = spec.share
    else:
        gpu, share = (
            place.gpu_memory_bytes(first_device, ranks),
            ceil(spec.share / device_groups(place.gpu_count(), ranks)),
        )
    memory = place.memory_bytes() / ranks / spec.share if gpu is None else gpu / share
    machine = estimated_machine(this_fingerprint())
    own = (architecture, machine, bundle.layout, bundle.dtype, step_tokens)
    longest = ceil((bundle.max_length or BLOCK_POSITIONS) / BLOCK_POSITIONS)
    block = block_bytes(architecture, bundle.layout, bundle.dtype)
    least = cacheless_bytes(*own, bundle.compression) + longest * block
    free = place.memory_bytes() / ranks if gpu is None else gpu  # servers are placed one by one: others have theirs
    if least > free:
        raise ServerNotReady(
            None, f"{place.name}: {free / _GIB:.2f} GiB of memory are free for each rank of the server beside what "
            f"runs there, and it needs about {least / _GIB:.2f}"
        )  # fmt: skip
    room = min(_CACHE_SHARE * memory, cache_room(*own, memory, bundle.compression))
    found = int(room / block)
    return max(longest, min(longest * bundle.max_sequences, found))


def wait_for_port(place: Place, folder: str) -> int:
    """Return the port that the supervisor has chosen. Raises ServerNotReady, PlaceError."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        told = _asked(lambda: state(place, folder), deadline)
        if told is not None and told.port:
            return told.port
        if time.monotonic() > deadline:
            raise ServerNotReady(None, f"{place.name}: the supervisor did not start: {last_lines(place, folder)}")
        time.sleep(_LOOK_SECONDS)


def wait_until_ready(place: Place, folder: str, url: str, key: str, seconds: float, check: Callable[[], None]) -> None:
    """Return when a server takes requests. Raises ServerNotReady, PlaceError, and what `check` raises."""
    deadline = time.monotonic() + seconds
    while True:
        check()
        if is_ready(url, key):
            return
        told = _asked(lambda: state(place, folder), deadline)
        if told is not None and (told.state == "ended" or told.starts > _FAILED_STARTS):
            raise ServerNotReady(None, f"{place.name}: the server does not start: {_reason(told, place, folder)}")
        if told is not None and told.starts > 1 and "cannot be listened on" in told.reason:
            raise ServerNotReady(None, f"{place.name}: {printable(told.reason, 300)}. Use another --port")
        if not _asked(lambda: is_supervised(place, folder), deadline):
            raise ServerNotReady(None, f"{place.name}: the supervisor is gone: {last_lines(place, folder)}")
        if time.monotonic() > deadline:
            raise ServerNotReady(
                None, f"{place.name}: not ready within {seconds:.0f} s: {last_lines(place, folder) or 'no message'}"
            )
        time.sleep(_LOOK_SECONDS)


def _asked(question: Callable[[], T], deadline: float) -> T:
    """Return a machine's answer. One that cannot be reached is asked again for a while. Raises PlaceError."""
    until = min(deadline, time.monotonic() + AWAY_SECONDS)
    while True:
        try:
            return question()
        except PlaceAway:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_SECONDS)


def is_ready(url: str, key: str | None, seconds: float = 3.0) -> bool:
    """Return whether a server or a front takes requests. seconds: how long its answer is waited for."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        return httpx.get(f"{url}/readyz", headers=headers, timeout=seconds, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def last_lines(place: Place, folder: str, lines: int = 3) -> str:
    """Return the end of a server's logs, in one line."""
    found: list[str] = []
    for name in ("replica-0.log", "rank.log", "server.log", "start_0.log"):
        data = read(place, f"{folder}/{name}", _LOG_BYTES)
        told = [line for line in (data or b"").decode(errors="replace").splitlines() if line.strip()]
        found += told[-lines:]
    return printable(" | ".join(found), 600)


def _reason(told: ServiceState, place: Place, folder: str) -> str:
    return f"{printable(told.reason, 300) or 'no reason'}; {last_lines(place, folder)}"
