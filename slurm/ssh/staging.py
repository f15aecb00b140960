"""Code, libraries and models on hosts that are reached by SSH, laid out as in a shared folder (`slurm.staging`).

<folder>/rankwise/code/<hash>/  libraries/<hash>/  envs/<hash>/bin/python  models/<hash>/
<folder>/runs/<name>-<digest of the run folder's path>/  inputs/  cache/  jobs/<job>.<token>/

Files travel as `slurm.ssh.transfer` says. Libraries are installed by the pip of one host and handed on to those that
are like it. What was cleared of a folder is noticed by its list.
"""

import asyncio
import atexit
import functools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from configs.common.base import content_hash, sha256_of_file
from configs.common.files.reading import PLAN_BYTES, read_bytes, read_model
from configs.common.printable import some_of
from configs.plans.model_manifest import ModelManifest
from configs.targets.target import SshTarget
from slurm.ssh.connection import Facts, HostError
from slurm.ssh.transfer import (
    TRANSFER_LIMIT_SECONDS,
    WALK_LIMIT_SECONDS,
    Member,
    StagedFile,
    bring,
    hand_on_folder,
    members_of,
    send,
)
from slurm.staging.packages import HALF_MADE, WITHOUT_INDEX, Notice, interpreter_script, node_requirements
from slurm.staging.wheel import pack_wheel

_INSTALL_LIMIT_SECONDS = 3600.0


def run_folder(facts: Facts, run: str) -> str:
    """Where a host has what is of one run only; run: its name there (`slurm.staging.packages.run_name`)."""
    return f"{facts.folder}/runs/{run}"


def interpreter_name(target: SshTarget) -> str:
    """The interpreter that hosts run jobs with, below the target's folder on each."""
    made_of = {"code": _packed_code()[1], "python": target.python or content_hash(node_requirements()[1])}
    if target.python is None:
        made_of["constraints"] = sha256_of_file(node_requirements()[0])
    return f"rankwise/envs/{content_hash(made_of)}/bin/python"


@functools.cache
def _packed_code() -> tuple[Path, str]:
    """Our code as a wheel, packed once by a process, and its hash."""
    folder = tempfile.TemporaryDirectory(prefix="rankwise-")
    atexit.register(folder.cleanup)
    wheel = pack_wheel(Path(folder.name))
    return wheel, sha256_of_file(wheel)


async def stage_hosts(target: SshTarget, manifests: Iterable[Path], notice: Notice, thorough: bool = False) -> None:
    """Bring code, libraries and models to all hosts of a target; what is there is not brought again.

    thorough: hash also the models' files that are there. Raises HostAway, HostRefused, HostError, and ValueError for a
    file that is not what its manifest says.
    """
    members = await members_of(target)
    await asyncio.gather(*map(_remove_abandoned, members))
    await _stage_code(members, notice)
    await _stage_interpreters(target, members, notice)
    for manifest in manifests:
        await _stage_model(members, manifest, notice, thorough)


async def _remove_abandoned(member: Member) -> None:
    """What installations and transfers left that were killed, of gigabytes each."""
    parents = [f"{member.rankwise}/{kind}" for kind in ("code", "libraries", "models")]
    await member.host.ask("clear_abandoned", limit_seconds=WALK_LIMIT_SECONDS, parents=parents, names=HALF_MADE.pattern)


async def _stage_code(members: Sequence[Member], notice: Notice) -> None:
    wheel, digest = _packed_code()
    name = f"code/{digest[:16]}"
    lacking = await _incomplete(members, name)
    if not lacking:
        return
    notice(f"code: {wheel.name} to {_names(lacking)}")
    item = StagedFile(wheel.name, wheel, wheel.stat().st_size, digest)

    async def unpack(member: Member, work: str) -> None:
        await member.host.ask("unpack", limit_seconds=300, archive=f"{work}/{wheel.name}", to=f"{work}/code")

    await bring(lacking, name, [item], unpack)


async def _stage_interpreters(target: SshTarget, members: Sequence[Member], notice: Notice) -> None:
    """The interpreter of each host: the one that is named, else one with libraries that are installed there."""
    name, code = interpreter_name(target), f"code/{_packed_code()[1][:16]}/code"
    lacking = await _lacking(members, name.removeprefix("rankwise/"))
    if target.python is None:
        await _stage_libraries(members, notice)

    async def make(member: Member) -> None:
        python = str(member.facts.data["executable"])
        if target.python is None:
            python = f"{member.rankwise}/{libraries_name(member.facts)}/bin/python"
        script = interpreter_script(f"{member.rankwise}/{code}", python)
        await send(member.host, script.encode(), f"{member.facts.folder}/{name}", mode=0o755)

    await asyncio.gather(*(make(member) for member in lacking))


def libraries_name(facts: Facts) -> str:
    """Where a host has libraries in the versions that were tested, below `rankwise`."""
    constraints, requirements = node_requirements()
    version = ".".join(map(str, facts.data["python"]))
    made_of = {"libraries": requirements, "constraints": sha256_of_file(constraints), "python": version}
    return f"libraries/{content_hash(made_of)}"


async def _stage_libraries(members: Sequence[Member], notice: Notice) -> None:
    """A virtual environment on each host: installed by one of those that are alike, and handed on to the others."""
    alike: dict[tuple[object, ...], list[Member]] = {}
    for member in members:
        # An environment names its folder and its interpreter, and its libraries are compiled for a platform.
        told = member.facts.data
        kind = (member.rankwise, libraries_name(member.facts), told["executable"], *told["platform"])
        alike.setdefault(kind, []).append(member)
    await asyncio.gather(*(_stage_alike(group, notice) for group in alike.values()))


async def _stage_alike(members: Sequence[Member], notice: Notice) -> None:
    name = libraries_name(members[0].facts)
    lacking = await _incomplete(members, name)
    first = next((member for member in members if member not in lacking), None)
    if first is None:
        first, *lacking = lacking
        onward = f", and from there to {_names(lacking)}" if lacking else ""
        notice(f"libraries: installing on {first.host.name} (once, takes minutes){onward}")
        await _install(first)
        lacking = await _incomplete(lacking, name)  # a home folder that hosts share has it already
    elif lacking:
        notice(f"libraries: from {first.host.name} to {_names(lacking)}")
    if not lacking:
        return
    try:
        await hand_on_folder(first, lacking, name)
    except HostError as error:
        lacking = await _incomplete(lacking, name)
        notice(f"libraries: cannot be handed on ({error}); installing on {_names(lacking)}")
        await asyncio.gather(*map(_install, lacking))


async def _install(member: Member) -> None:
    """By the host's own pip."""
    constraints, requirements = node_requirements()
    folder = f"{member.rankwise}/{libraries_name(member.facts)}"
    await send(member.host, read_bytes(constraints), f"{folder}.constraints.txt")
    try:
        await member.host.ask(
            "install", limit_seconds=_INSTALL_LIMIT_SECONDS + 600, folder=folder, requirements=requirements,
            constraints=f"{folder}.constraints.txt", limit=_INSTALL_LIMIT_SECONDS,
        )  # fmt: skip
    except HostError as error:
        raise HostError(error.errno, f"{error.strerror}\n{WITHOUT_INDEX}") from error


async def _stage_model(members: Sequence[Member], path: Path, notice: Notice, thorough: bool) -> None:
    manifest, name = read_model(path, ModelManifest, PLAN_BYTES), f"models/{path.parent.name}"
    # All at once: to hash the files of a host takes minutes.
    there = await asyncio.gather(*(_has_model(member, manifest, name, thorough) for member in members))
    lacking = [member for member, whole in zip(members, there, strict=True) if not whole]
    if not lacking:
        return
    items = [
        StagedFile(f"files/{file}", Path(manifest.folder) / file, told.size_bytes, told.sha256)
        for file, told in manifest.files.items()
    ]
    if manifest.source == "synthetic":
        config = Path(manifest.folder) / "config.json"
        items = [StagedFile("files/config.json", config, config.stat().st_size, sha256_of_file(config))]
    size = sum(item.size for item in items)
    onward = f", and from there to {_names(lacking[1:])}" if len(lacking) > 1 else ""
    notice(f"model {manifest.identity}: {size / 2**20:.1f} MiB to {lacking[0].host.name}{onward}")

    async def name_files(member: Member, work: str) -> None:
        there = manifest.model_copy(update={"folder": "files"})
        await send(member.host, (there.model_dump_json(indent=1) + "\n").encode(), f"{work}/manifest.json")
        if not await _has_model(member, manifest, name, thorough):  # another run may have brought it meanwhile
            await member.host.ask("remove", limit_seconds=WALK_LIMIT_SECONDS, paths=[f"{member.rankwise}/{name}"])

    await bring(lacking, name, items, name_files)


async def _has_model(member: Member, manifest: ModelManifest, name: str, thorough: bool) -> bool:
    folder = f"{member.rankwise}/{name}"
    paths = [f"{folder}/files/{file}" for file in manifest.files]
    wanted: list[object] = [file.size_bytes for file in manifest.files.values()]
    made_of = [f"{folder}/manifest.json"] + [f"{folder}/files/config.json"] * (manifest.source == "synthetic")
    found = (await member.host.ask("sizes", paths=[*made_of, *paths]))[0]["sizes"]
    if not all(found[: len(made_of)]) or found[len(made_of) :] != wanted:
        return False
    if not thorough:
        return True
    hashes = (await member.host.ask("hashes", limit_seconds=TRANSFER_LIMIT_SECONDS, paths=paths))[0]["hashes"]
    return list(hashes) == [file.sha256 for file in manifest.files.values()]


async def _lacking(members: Sequence[Member], name: str) -> list[Member]:
    """Those that do not have a file or folder below `rankwise`."""
    answers = await asyncio.gather(
        *(member.host.ask("sizes", paths=[f"{member.rankwise}/{name}"]) for member in members)
    )
    return [member for member, (answer, _) in zip(members, answers, strict=True) if answer["sizes"][0] is None]


async def _incomplete(members: Sequence[Member], name: str) -> list[Member]:
    """Those that do not have a folder below `rankwise` with all its files: disks are cleared of old ones."""
    answers = await asyncio.gather(
        *(
            member.host.ask("whole", limit_seconds=WALK_LIMIT_SECONDS, paths=[f"{member.rankwise}/{name}"])
            for member in members
        )
    )
    return [member for member, (answer, _) in zip(members, answers, strict=True) if not answer["whole"][0]]


def _names(members: Sequence[Member]) -> str:
    return some_of([member.host.name for member in members])
