"""Files to all hosts of a target: each leaves this machine once, and hosts hand it on to each other.

    await bring(members, "models/<hash>", [StagedFile(...)], finish)       # below the folder `rankwise` of each

The first host that lacks a file hands it on to the next while it comes in, and that to the next; a host that cannot
reach the one before gets it from here. Every file is checked by its SHA-256 where it arrives. Folders are made under
another name and renamed: each is there whole or not at all.
"""

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from configs.common.base import sha256_of_file
from configs.common.files.reading import open_regular
from configs.targets.target import SshTarget
from slurm.ssh.connection import Facts, Host, HostAway, HostError, host_of

_PIECE_BYTES = 1 << 20
_PIECES_UNDER_WAY = 16
_PUT_LIMIT_SECONDS = 600.0
WALK_LIMIT_SECONDS = 600.0
_PACK_LIMIT_SECONDS = 1800.0
TRANSFER_LIMIT_SECONDS = 24 * 3600.0
FinishMember = Callable[["Member", str], Awaitable[None]]
"""What is done on a host in a folder that has all its files, before it gets its name."""


@dataclass(frozen=True)
class Member:
    """A host as others are to see it: its connection, what it says of itself, and the address that they use."""

    host: Host
    facts: Facts
    address: str

    @property
    def rankwise(self) -> str:
        """Where everything lies that runs share."""
        return f"{self.facts.folder}/rankwise"


@dataclass(frozen=True)
class StagedFile:
    """A file to bring: its path below the folder that is made, and where it lies here; None: the first host has it."""

    name: str
    source: Path | None
    size: int
    sha256: str


async def members_of(target: SshTarget) -> list[Member]:
    """All hosts of a target. Raises HostAway, HostRefused and HostError."""
    hosts = [host_of(target, host) for host in target.hosts]
    facts = await asyncio.gather(*(host.facts() for host in hosts))
    return [
        Member(host, told, told.address_of(given)) for host, told, given in zip(hosts, facts, target.hosts, strict=True)
    ]


async def send(host: Host, content: bytes, path: str, mode: int = 0o644) -> None:
    """Write a small file on a host, whole or not at all. Raises HostAway and HostError."""
    digest = hashlib.sha256(content).hexdigest()
    await host.ask(
        "put", content, path=path, offset=0, last=True, sha256=digest, mode=mode, limit_seconds=_PUT_LIMIT_SECONDS
    )


async def send_file(host: Host, source: Path, path: str, part_name: str) -> None:
    """Write a file of any size on a host, whole or not at all. Raises as `_upload`.

    part_name: until it is whole, in its folder, in which others may bring the same file.
    """
    digest = await asyncio.to_thread(sha256_of_file, source)
    await _upload(host, StagedFile(source.name, source, source.stat().st_size, digest), source, path, part_name)


async def bring(members: Sequence[Member], name: str, items: Sequence[StagedFile], finish: FinishMember) -> None:
    """Bring files to hosts, finish each one's folder and give it its name."""
    async with _work_folders(members, name) as folders:
        await _along(members, folders, items)
        await _finish(members, folders, name, finish)


async def hand_on_folder(first: Member, members: Sequence[Member], name: str) -> None:
    """A folder that one host has to hosts of the same platform, packed in one file."""
    limit = _PACK_LIMIT_SECONDS

    async def unpack(member: Member, work: str) -> None:
        archive = f"{work}/{packed.name}"
        await member.host.ask("unpack_beside", limit_seconds=limit + 60, archive=archive, limit=limit)

    async with _work_folders([first, *members], name) as folders:
        archive = f"{folders[first.host]}/packed.tar"
        told, _ = await first.host.ask(
            "pack", limit_seconds=limit + 60, folder=f"{first.rankwise}/{name}", to=archive, limit=limit
        )
        packed = StagedFile("packed.tar", None, told["size"], told["sha256"])
        await _along([first, *members], folders, [packed])
        await _finish(members, folders, name, unpack)


@asynccontextmanager
async def _work_folders(members: Sequence[Member], name: str) -> AsyncIterator[dict[Host, str]]:
    """Names of folders in which something comes to be, by host; what is left of them in the end is removed."""
    work = f"{name.rpartition('/')[0]}/.{name.rpartition('/')[2]}.{secrets.token_hex(4)}"
    # Hosts may share a home folder without anybody's saying so.
    folders = {member.host: f"{member.rankwise}/{work}.{place}" for place, member in enumerate(members)}

    async def clear(member: Member) -> None:
        with suppress(HostAway, HostError):
            await member.host.ask("remove", limit_seconds=WALK_LIMIT_SECONDS, paths=[folders[member.host]])

    try:
        yield folders
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    finally:
        await asyncio.gather(*map(clear, members))


async def _finish(members: Sequence[Member], folders: dict[Host, str], name: str, finish: FinishMember) -> None:
    async def end(member: Member) -> None:
        await finish(member, folders[member.host])
        to = f"{member.rankwise}/{name}"
        await member.host.ask("rename", limit_seconds=WALK_LIMIT_SECONDS, path=folders[member.host], to=to)

    await asyncio.gather(*map(end, members))


async def _along(members: Sequence[Member], folders: dict[Host, str], items: Sequence[StagedFile]) -> None:
    """Files from here to the first host, and from each to the next, all at the same time.

    A host asks for a file when the one before it has begun to take it, and takes its files one after the other: its
    link is busy with one file or the next all the time.
    """
    begun = {(member.host, item.name): asyncio.Event() for member in members for item in items}

    async def first(member: Member) -> None:
        for item in items:
            begun[member.host, item.name].set()
            if item.source is not None:
                await _upload(member.host, item, item.source, f"{folders[member.host]}/{item.name}")

    async def onward(before: Member, member: Member) -> None:
        for item in items:
            await begun[before.host, item.name].wait()
            begun[member.host, item.name].set()
            await _hand_on(before, member, folders, item)

    async with asyncio.TaskGroup() as under_way:
        under_way.create_task(first(members[0]))
        for before, member in itertools.pairwise(members):
            under_way.create_task(onward(before, member))


async def _hand_on(before: Member, member: Member, folders: dict[Host, str], item: StagedFile) -> None:
    """One file from a host to the next; from here where that cannot be."""
    try:
        path = f"{folders[before.host]}/{item.name}"
        offer, _ = await before.host.ask("offer", paths=[path], address=before.address)
        source = {"address": before.address, "port": offer["port"], "token": offer["token"], "path": path}
        await member.host.ask(
            "fetch", limit_seconds=TRANSFER_LIMIT_SECONDS, source=source, size=item.size, sha256=item.sha256,
            path=f"{folders[member.host]}/{item.name}",
        )  # fmt: skip
    except HostError:
        if item.source is None:
            raise
        await _upload(member.host, item, item.source, f"{folders[member.host]}/{item.name}")


async def _upload(host: Host, item: StagedFile, source: Path, path: str, part_name: str | None = None) -> None:
    """A file from here. Raises ValueError where it is not what it should be, and as `Host.ask`."""
    try:
        await _upload_pieces(host, item, source, path, part_name)
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


async def _upload_pieces(host: Host, item: StagedFile, source: Path, path: str, part_name: str | None) -> None:
    """Some pieces are under way at a time."""
    room = asyncio.Semaphore(_PIECES_UNDER_WAY)

    async def piece(content: bytes, offset: int, last: bool) -> None:
        try:
            await host.ask(
                "put", content, path=path, offset=offset, last=last, sha256=item.sha256, part_name=part_name,
                limit_seconds=_PUT_LIMIT_SECONDS,
            )  # fmt: skip
        finally:
            room.release()

    async with asyncio.TaskGroup() as under_way:
        digest, offset = hashlib.sha256(), 0
        with open_regular(source) as file:
            while True:
                await room.acquire()
                content = file.read(_PIECE_BYTES)
                digest.update(content)
                last = offset + len(content) >= item.size or not content
                if last and digest.hexdigest() != item.sha256:
                    raise ValueError(
                        f"{source}: content changed since the study began. Run again, or fetch the file again"
                    )
                under_way.create_task(piece(content, offset, last))
                offset += len(content)
                if last:
                    return
