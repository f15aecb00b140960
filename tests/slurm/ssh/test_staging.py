"""What is carried to hosts, by stand-ins that do here what a host is asked for. On real ones: test_ssh_hosts."""

import asyncio
import compileall
import shutil
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.common.base import sha256_of_file
from configs.common.files import abandoned
from configs.common.files.abandoned import ABANDONED_SECONDS
from configs.common.files.project_files import ROOT
from configs.plans.model_manifest import ModelManifest
from configs.targets.target import SshTarget
from slurm.ssh import node_files, staging
from slurm.ssh.connection import Facts, Host, HostError
from slurm.ssh.transfer import Member
from tasks.models.sources import resolve_model


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds and is on no list."""
    monkeypatch.setattr(compileall, "compile_dir", lambda *_, **__: True)


class HostHere:
    """A host whose folders are here. Others cannot reach it, so that each gets its files from this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first: asyncio.Event | None = None
        """What it waits for before it unpacks anything."""
        self.named = asyncio.Event()
        self.limits: dict[str, float | None] = {}
        """How long the answer to each operation was waited for."""

    async def ask(
        self, operation: str, body: bytes = b"", limit_seconds: float | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], bytes]:
        self.limits[operation] = limit_seconds
        if operation == "offer":
            raise HostError(None, f"{self.name}: nobody can connect")
        if operation == "unpack" and self.first is not None:
            await self.first.wait()
        given = {**arguments, **({"body": body} if operation == "put" else {})}
        try:
            said = getattr(node_files, operation)(**given) or {}
        except OSError as error:
            raise HostError(error.errno, f"{self.name}: {error}") from error
        if operation == "rename":
            self.named.set()
        return said, said.pop("body", b"")


def member(name: str, folder: Path) -> Member:
    told = {"folder": str(folder), "executable": sys.executable, "python": [3, 11, 7], "platform": ["x86_64"]}
    return Member(cast(Host, HostHere(name)), Facts(told, 0.0), "127.0.0.1")


def staged(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["code/configs/__init__.py", "code/slurm/launch.py", "files.txt"])
def test_code_that_a_host_has_cleared_in_part_is_brought_again(tmp_path: Path, gone: str) -> None:
    said: list[str] = []
    for expected in (1, 2, 2):
        staged(staging._stage_code([member("a", tmp_path)], said.append))
        assert len(said) == expected
        [folder] = (tmp_path / "rankwise" / "code").iterdir()
        assert (folder / gone).exists()
        if expected == 1:
            (folder / gone).unlink()


def test_libraries_that_a_host_has_cleared_in_part_are_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(command: list[str], limit_seconds: float) -> None:
        if command[1:3] == ["-m", "venv"]:
            for name in ("bin/python", "torch.py"):
                (Path(command[-1]) / name).parent.mkdir(exist_ok=True)
                (Path(command[-1]) / name).touch()

    monkeypatch.setattr(node_files, "_call", call)
    target, said = SshTarget.model_validate({"hosts": ["a"]}), list[str]()
    for expected in (1, 2, 2):
        staged(staging._stage_interpreters(target, [member("a", tmp_path)], said.append))
        assert said == ["libraries: installing on a (once, takes minutes)"] * expected
        [folder] = (each for each in (tmp_path / "rankwise" / "libraries").iterdir() if each.is_dir())
        assert (folder / "torch.py").exists()
        if expected == 1:
            (folder / "torch.py").unlink()


def test_what_transfers_and_installations_left_that_were_killed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each interrupted installation stayed on the host, with some gigabytes."""
    later = time.time() + ABANDONED_SECONDS + 60
    monkeypatch.setattr(abandoned, "time", SimpleNamespace(time=lambda: later))
    installed, carried = ".0123456789abcdef.k3_x9abc", ".0123456789abcdef.89abcdef.0"
    left = {"libraries": installed, "code": carried, "models": ".m0del.cleared"}
    for kind, name in left.items():
        (tmp_path / "rankwise" / kind / name / "bin").mkdir(parents=True)
    staged(staging._remove_abandoned(member("a", tmp_path)))
    assert [list((tmp_path / "rankwise" / kind).iterdir()) for kind in ("libraries", "code")] == [[], []]
    assert (tmp_path / "rankwise" / "models" / ".m0del.cleared").exists(), "no name of ours"


def test_a_host_that_reaches_no_package_index_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(command: list[str], limit_seconds: float) -> None:
        if "pip" in command:
            raise OSError("pip: exit code 1\nERROR: No matching distribution found for torch")

    monkeypatch.setattr(node_files, "_call", call)
    with pytest.raises(HostError, match=r"(?s)a: .*No matching distribution.*set the target's `python`"):
        staged(staging._install(member("a", tmp_path)))
    assert not [each for each in (tmp_path / "rankwise" / "libraries").iterdir() if each.is_dir()]


def test_the_configuration_of_a_synthetic_model_that_was_cleared_is_brought_again(tmp_path: Path) -> None:
    manifest = resolve_model("synthetic:llama-4m@0", None, tmp_path / "cache", tmp_path)
    path = tmp_path / "m" / "manifest.json"
    path.parent.mkdir()
    path.write_text(manifest.model_dump_json())
    config = tmp_path / "host" / "rankwise" / "models" / "m" / "files" / "config.json"
    for _ in range(2):
        staged(staging._stage_model([member("a", tmp_path / "host")], path, lambda _: None, False))
        there = ModelManifest.model_validate_json((config.parents[1] / "manifest.json").read_bytes())
        assert config.exists() and there.identity == manifest.identity
        config.unlink()


def test_hosts_that_share_a_home_folder_do_not_meet(tmp_path: Path) -> None:
    """One of them begins to unpack when the other has given its folder the name."""

    async def scenario() -> None:
        first, second = member("a", tmp_path), member("b", tmp_path)
        cast(HostHere, second.host).first = cast(HostHere, first.host).named
        await staging._stage_code([first, second], lambda _: None)

    staged(scenario())
    [folder] = (tmp_path / "rankwise" / "code").iterdir()
    assert (folder / "code" / "slurm" / "launch.py").exists()


def test_walks_over_a_folder_have_the_time_that_a_slow_disk_takes(tmp_path: Path) -> None:
    """To name the libraries' folder lists its files: over NFS that took longer than an answer is waited for."""
    host = member("a", tmp_path)
    staged(staging._stage_code([host], lambda _: None))
    limits = cast(HostHere, host.host).limits
    assert limits["rename"] == limits["remove"] == limits["whole"] == staging.WALK_LIMIT_SECONDS


def test_a_model_that_another_run_has_brought_meanwhile_stays(tmp_path: Path) -> None:
    """Its files were removed and brought again while the launches of that run read them."""
    source = tmp_path / "m"
    shutil.copytree(ROOT / "configs" / "models" / "tiny-stdlib", source / "files")
    manifest = resolve_model(str(source / "files"), None, tmp_path / "cache", tmp_path)
    (source / "manifest.json").write_text(manifest.model_dump_json())
    host = member("a", tmp_path / "host")
    there = tmp_path / "host" / "rankwise" / "models" / "m" / "files"
    read, numbers = list[Path](), list[int]()

    class SlowHost(HostHere):
        """Whose first file comes when the other run's model is there whole."""

        async def ask(self, operation: str, *given: Any, **arguments: Any) -> tuple[dict[str, Any], bytes]:
            if operation == "put" and not there.exists():
                await staging._stage_model([host], source / "manifest.json", lambda _: None, False)
                read.extend(there.iterdir())
                numbers.extend(path.stat().st_ino for path in read)
            return await super().ask(operation, *given, **arguments)

    slow = Member(cast(Host, SlowHost("a")), host.facts, "127.0.0.1")
    staged(staging._stage_model([slow], source / "manifest.json", lambda _: None, False))
    assert numbers and [path.stat().st_ino for path in read] == numbers
    [folder] = there.parents[1].iterdir()
    (there / "model.safetensors").write_bytes(b"damaged")
    staged(staging._stage_model([host], source / "manifest.json", lambda _: None, False))
    assert sha256_of_file(there / "model.safetensors") == manifest.files["model.safetensors"].sha256
    assert [folder] == list(there.parents[1].iterdir())


def test_the_files_of_all_hosts_are_hashed_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rankwise push` took as long as all hosts together, each minutes for a large model."""
    under_way, most = 0, 0

    async def whole(*_: object) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return True

    monkeypatch.setattr(staging, "_has_model", whole)
    path = tmp_path / "m" / "manifest.json"
    path.parent.mkdir()
    path.write_text(resolve_model("synthetic:llama-4m@0", None, tmp_path / "cache", tmp_path).model_dump_json())
    members = [member(name, tmp_path) for name in "abcdefgh"]
    staged(staging._stage_model(members, path, lambda _: None, True))
    assert most == 8
