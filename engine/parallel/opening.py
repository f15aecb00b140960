"""Choose and open the transport of each group of ranks.

    ways, blame = connect(groups, rank, device, backend, timeout_seconds, "auto")
    ways[(0, 1)]                                    # the transport of that group, if this rank is in it

Every rank calls it with the same groups in the same order, when the default process group exists. GPUs use their own
backend. CPU ranks of one host share memory, unless there are too few cores for spin-waiting ranks, no C compiler, or an
unreachable process (another container). Then, and between hosts, they use gloo.
"""

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.parallel.peers import Blame, Identity, identify, too_many_for_cores
from engine.parallel.shared_memory import TOKEN_BYTES, create_segment, library, open_segment
from engine.parallel.transports import GroupTransport, SharedTransport, Transport, TwoLevelTransport

Ranks = tuple[int, ...]
TRANSPORTS = ("auto", "shared memory", "gloo", "nccl", "mpi")
_opened = itertools.count()


@dataclass
class _Host:
    """Ranks of one group on one host, two or more. `memory` is this rank's end, if it has one."""

    group: Ranks
    members: Ranks
    memory: SharedTransport | None = None


@dataclass
class _Surroundings:
    """Data needed to open any transport."""

    rank: int
    device: torch.device
    backend: str
    identities: dict[int, Identity]
    blame: Blame
    wait_seconds: float
    hosts: list[_Host] = field(default_factory=list)


def connect(
    groups: Sequence[Ranks], rank: int, device: torch.device, backend: str, timeout_seconds: float, transport: str
) -> tuple[dict[Ranks, Transport], Blame]:
    """Open the transports of this rank's groups. `groups` are distinct and of two ranks or more.

    Raises ValueError if these ranks do not support `transport`.
    """
    check_transport(transport, device, backend)
    try_memory = device.type == "cpu" and transport in ("auto", "shared memory")
    told = _exchange((identify(rank), not try_memory or library() is not None))
    identities = {identity.rank: identity for identity, _ in told}
    store = dist.PrefixStore(f"opening-{next(_opened)}", _default_store())  # type: ignore[attr-defined]  # not in __all__
    blame = Blame(identities, store, rank, timeout_seconds)
    wait_seconds = timeout_seconds - blame.patience_seconds
    here = _Surroundings(rank, device, backend, identities, blame, wait_seconds)
    joined: set[Ranks] = set()
    if try_memory:
        obstacle = _obstacle(list(identities.values()), all(built for _, built in told), transport)
        if obstacle is None:
            joined = _share_memory(here, groups)
        if transport == "shared memory":
            _refuse_unless_shared(here, groups, joined, obstacle)
    memory = {host.group: host.memory for host in here.hosts if rank in host.members}
    ways: dict[Ranks, Transport] = {}
    for group in groups:  # every rank creates every group, in this order: new_group is a collective of all ranks
        way = _connect_group(here, group, group in joined, memory.get(group))
        if way is not None:
            ways[group] = way
    return ways, blame


def check_transport(transport: str, device: torch.device, backend: str) -> None:
    """Raise ValueError unless ranks on this device with this backend support the transport."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: {transport!r} is not one of {', '.join(TRANSPORTS)}")
    possible = ("auto", "shared memory", backend) if device.type == "cpu" else ("auto", backend)
    if transport not in possible:
        raise ValueError(
            f"transport: {transport} is not to be had by ranks on {device.type} with the backend {backend}; "
            f"use one of: {', '.join(possible)}"
        )


def _obstacle(identities: list[Identity], built: bool, transport: str) -> str | None:
    """Return why memory is not shared, or None. An explicit request overrides too few cores."""
    if not built:
        return "its operations cannot be compiled on every host"
    if transport == "auto" and too_many_for_cores(identities):
        return "the ranks of a host outnumber its cores"
    return None


def _refuse_unless_shared(
    here: _Surroundings, groups: Sequence[Ranks], joined: set[Ranks], obstacle: str | None
) -> None:
    for group in groups:
        if obstacle is None and len(_by_host(here, group)) > 1:
            obstacle = f"ranks {', '.join(map(str, group))} are on several hosts"
        if obstacle is None and group not in joined:
            obstacle = f"ranks {', '.join(map(str, group))} cannot reach each other's memory"
    if obstacle is not None:
        raise ValueError(f"transport: shared memory is not possible, {obstacle}; use auto or gloo")


def _exchange(own: Any) -> list[Any]:
    """Return every rank's value, in the order of ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _by_host(here: _Surroundings, group: Ranks) -> list[Ranks]:
    """Return the group's ranks on each host, in order of first occurrence."""
    hosts: dict[str, list[int]] = {}
    for rank in group:
        hosts.setdefault(here.identities[rank].host_key, []).append(rank)
    return [tuple(members) for members in hosts.values()]


def _share_memory(here: _Surroundings, groups: Sequence[Ranks]) -> set[Ranks]:
    """Create and join the segments of all hosts' ranks. Returns the groups in which every rank succeeded."""
    here.hosts = [_Host(group, members) for group in groups for members in _by_host(here, group) if len(members) > 1]
    made: dict[int, tuple[int, int, bytes]] = {}
    for place, host in enumerate(here.hosts):
        if host.members[0] == here.rank:
            token = os.urandom(TOKEN_BYTES)
            with suppress(OSError):
                made[place] = (os.getpid(), create_segment(len(host.members), token), token)
    offered = {place: offer for told in _exchange(made) for place, offer in told.items()}
    mine = [place for place, host in enumerate(here.hosts) if here.rank in host.members]
    failed = [place for place in mine if not _join(here, here.hosts[place], offered.get(place))]
    failed_anywhere = {place for told in _exchange(failed) for place in told}
    for _, descriptor, _ in made.values():
        os.close(descriptor)  # all have mapped it
    unable = {here.hosts[place].group for place in failed_anywhere}
    for host in here.hosts:
        if host.group in unable and host.memory is not None:
            host.memory.close()
    return {host.group for host in here.hosts} - unable


def _join(here: _Surroundings, host: _Host, offer: tuple[int, int, bytes] | None) -> bool:
    descriptor = None if offer is None else open_segment(*offer)
    if descriptor is None:
        return False
    members, blame = host.members, here.blame
    try:
        host.memory = SharedTransport(
            descriptor,
            len(members),
            members.index(here.rank),
            here.wait_seconds,
            lambda peer: blame.is_gone(members[peer]),
        )
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _connect_group(here: _Surroundings, group: Ranks, shared: bool, local: SharedTransport | None) -> Transport | None:
    """Return this rank's end of a group; None if it is not a member, but must take part in the creation.

    local: this rank's end of the memory that its host shares.
    """
    hosts = _by_host(here, group)
    if shared and len(hosts) == 1:
        return local
    whole = _new_group(here, group)
    if not shared:
        return whole
    between = _new_group(here, tuple(members[0] for members in hosts))
    if whole is None:
        return None
    places = [[group.index(rank) for rank in members] for members in hosts]
    return TwoLevelTransport(group.index(here.rank), places, local, between, whole)


def _new_group(here: _Surroundings, ranks: Ranks) -> GroupTransport | None:
    made = dist.new_group(list(ranks), timeout=timedelta(seconds=here.wait_seconds), backend=here.backend)
    return GroupTransport(made, ranks, here.device) if here.rank in ranks else None
