"""Stage code, libraries and model files in a folder shared by all nodes.

<shared>/rankwise/
  code/<hash>/        our wheel, and unpacked
  libraries/<hash>/   a virtual environment with what the code imports, where no interpreter was named
  envs/<hash>/bin/python   runs the one over the other
  models/<hash>/      manifest.json, files/
<shared>/runs/<name>-<digest of the run folder's path and run.id>/
  jobs/<job>/         job folders as the nodes see them
  inputs/             prompts and texts
  cache/              what ranks make once: tokens, compiled graphs

Everything below `rankwise` is named by what it is made of, is made under a temporary name and then renamed: it is
there whole or not at all, two users who bring the same do not meet, and what is there is not made again. The group
may read it (others too, where the shared folder is open to them); folders that all add to have the shared one's mode.
"""

import compileall
import hashlib
import os
import platform
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from configs.common.base import content_hash, sha256_of_file, write_atomically
from configs.common.files.abandoned import remove_abandoned
from configs.common.files.flushing import flush_file
from configs.common.files.project_files import project_file
from configs.common.files.reading import PLAN_BYTES, open_regular, read_bytes, read_model
from configs.common.printable import some_of
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import RunPaths
from slurm.staging.file_list import is_whole, write_list
from slurm.staging.wheel import pack_wheel

NODE_LIBRARIES = (
    "accelerate",
    "deepspeed",
    "fastapi",
    "httpx",
    "jinja2",
    "numpy",
    "nvidia-ml-py",
    "packaging",
    "prometheus-client",
    "psutil",
    "pydantic",
    "pyyaml",
    "safetensors",
    "scipy",
    "submitit",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
)
"""What launcher, ranks and a server's HTTP process import; Prefect and the reports stay where studies are run from."""

WHOLE_PYTHON = (
    'case $python in "~/"*) python=$HOME/${python#"~/"};; esac; '
    'case $python in python|python3*) ;; *) test -d "$python" && python=$python/bin/python;; esac'
)
"""Lines of sh: `python`, an interpreter or an environment as a node finds it, becomes the interpreter."""

WITHOUT_INDEX = (
    "If no package index is reached, set the target's `python` to an interpreter that has the libraries, or configure "
    "pip (PIP_INDEX_URL, PIP_FIND_LINKS)"
)
"""What to do where pip failed: login nodes and hosts may have no internet."""

Notice = Callable[[str], None]
HALF_MADE = re.compile(r"\.[0-9a-f]{8,64}\.\w{8}(\.\d+)?(\.cleared)?")
"""Names of folders that are being filled, on an SSH host with a number, and of those that they take the place of."""
_PIECE_BYTES, _ID_BYTES = 16 << 20, 64
_INSTALL_LIMIT_SECONDS = 3600.0  # gigabytes over a slow network


def run_digest(run_folder: Path) -> str:
    """8 hexadecimal digits that tell a run folder from others of the same name on one cluster; of links what they are.

    A run that is resumed through a link looks for its launches where they are. Its `run.id` tells it from those of
    other containers, in which paths are equal.
    """
    known_by = os.fsencode(os.path.realpath(run_folder))
    with suppress(FileNotFoundError):  # a folder without runs of its own, as that in which a deployment is measured
        known_by += b"\n" + read_bytes(RunPaths(run_folder).id, _ID_BYTES)
    return hashlib.sha256(known_by).hexdigest()[:8]


def run_name(run_folder: Path) -> str:
    """The name of a run's folder below `runs` on a shared disk or a host."""
    return f"{run_folder.name}-{run_digest(run_folder)}"


def run_root(shared: Path, run_folder: Path) -> Path:
    """Where the nodes find what is of one run only."""
    return shared / "runs" / run_name(run_folder)


def common_folder(shared: Path, *names: str) -> Path:
    """A folder below the shared one in which every user of it may make things, as in the shared folder itself.

    Raises OSError.
    """
    folder, mode = shared, _mode(shared)
    for name in names:
        folder = folder / name
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        with suppress(PermissionError):  # a file system that keeps no such modes
            folder.chmod(mode)
    return folder


@contextmanager
def _made_whole(destination: Path, instead: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `destination` when the block ends, unless another was faster.

    instead: of a folder that is there and has lost files.
    """
    work = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    cleared = work.with_name(f"{work.name}.cleared")
    try:
        yield work
        _let_read(work, _mode(destination.parent))
        if instead:
            with suppress(FileNotFoundError):  # of another who does the same
                destination.rename(cleared)
        try:
            work.rename(destination)
        except OSError:
            if not destination.is_dir():
                raise
    finally:
        for left in (work, cleared):
            shutil.rmtree(left, ignore_errors=True)


def _let_read(folder: Path, like: int) -> None:
    """chmod -R g+rX, and o+rX where others may read the folder above, whose mode is `like`."""
    readable = stat.S_IRGRP | (like & stat.S_IROTH)
    enterable = stat.S_IXGRP | (like & stat.S_IXOTH)
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = _mode(path)
            folder_or_program = path.is_dir() or mode & stat.S_IXUSR
            path.chmod(mode | readable | (enterable if folder_or_program else 0))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def stage_interpreter(shared: Path, python: str | None, notice: Notice) -> Path:
    """The nodes' interpreter that has the code which runs here; made where it is not there yet.

    python: an interpreter of theirs (perhaps in an image) that has the libraries; None: they are installed below
    `shared` by this machine's pip, which takes minutes. Raises OSError, and ValueError with pip's words.
    """
    for kind in ("code", "libraries", "envs"):
        remove_abandoned(shared / "rankwise" / kind, HALF_MADE)
    code = _stage_code(shared, notice)
    if python is None:
        python = str(_stage_libraries(shared, notice) / "bin" / "python")
    digest = content_hash({"code": code.parent.name, "python": python})
    folder = common_folder(shared, "rankwise", "envs") / digest
    program = folder / "bin" / "python"
    script = interpreter_script(str(code), python)
    if not folder.exists():
        with _made_whole(folder) as work:
            (work / "bin").mkdir()
            write_atomically(work / "bin" / "python", script, 0o755)
    elif not program.exists():  # cleared, as code may be
        program.parent.mkdir(exist_ok=True)
        write_atomically(program, script, 0o755)
        _let_read(folder, _mode(folder.parent))
    return program


def interpreter_script(code: str, python: str) -> str:
    """A program that is an interpreter of the nodes with our code before what it has itself.

    The interpreter may be in an image or on the nodes alone: nothing can be installed into it from here.
    """
    return (
        "#!/bin/sh\n# Rankwise as it was where the study was started, before what this interpreter has.\n"
        f'PYTHONPATH={shlex.quote(code)}"${{PYTHONPATH:+:$PYTHONPATH}}"\nexport PYTHONPATH\n'
        f'python={shlex.quote(python)}\n{WHOLE_PYTHON}\nexec "$python" "$@"\n'
    )


def _stage_code(shared: Path, notice: Notice) -> Path:
    """The folder of our packages below `shared`."""
    parent = common_folder(shared, "rankwise", "code")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = pack_wheel(Path(scratch))
        folder = parent / sha256_of_file(wheel)[:16]
        with zipfile.ZipFile(wheel) as archive:
            if folder.exists():
                _bring_again(archive, folder, notice)
                return folder / "code"
            notice(f"code: {wheel.name} to {folder}")
            with _made_whole(folder) as work:
                shutil.copy(wheel, work)
                archive.extractall(work / "code")
                # Other users may not write bytecode beside it.
                compileall.compile_dir(work / "code", quiet=2, stripdir=work, prependdir=folder)
    return folder / "code"


def _bring_again(archive: zipfile.ZipFile, folder: Path, notice: Notice) -> None:
    """Unpack the files of our packages that are gone: clusters clear old files of a disk, one by one."""
    code = folder / "code"
    gone = [each for each in archive.infolist() if not (code / each.filename).exists()]
    if not gone:
        return
    notice(f"code: {len(gone)} of its files were removed from {folder}, unpacking them again")
    for each in gone:
        (code / each.filename).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(code / each.filename, archive.read(each))
    _let_read(folder, _mode(folder.parent))


def _stage_libraries(shared: Path, notice: Notice) -> Path:
    """A virtual environment below `shared` with the libraries in the versions that were tested."""
    constraints, libraries = node_requirements()
    base = Path(sys._base_executable)  # type: ignore[attr-defined]  # the interpreter below a virtual environment
    made_of = {
        "libraries": libraries,
        "constraints": sha256_of_file(constraints),
        "python": [str(base), platform.python_version(), platform.machine()],
    }
    folder = common_folder(shared, "rankwise", "libraries") / content_hash(made_of)
    if not is_whole(str(folder)):
        gone = " again, since files of it were removed" if (cleared := folder.exists()) else ""
        notice(f"libraries: installing into {folder}{gone} (once, takes minutes)")
        with _made_whole(folder, instead=cleared) as work:
            # -P: a file of the working directory, such as secrets.py, is not imported.
            _run([str(base), "-P", "-m", "venv", "--without-pip", str(work)])
            pip = [sys.executable, "-P", "-m", "pip", "--python", str(work / "bin" / "python"), "install", "--quiet"]
            try:
                _run([*pip, "--disable-pip-version-check", "--constraint", str(constraints), *libraries])
            except ValueError as error:
                raise ValueError(f"{error}\n{WITHOUT_INDEX}") from error
            shutil.copy(constraints, work)
            write_list(str(work))
    return folder


def node_requirements() -> tuple[Path, list[str]]:
    """The constraints that name the tested versions, and what nodes need, as pip takes both. Raises ValueError."""
    constraints = project_file("constraints.txt")
    if not constraints.is_file():
        raise ValueError(
            f"{constraints}: not found, so the libraries' versions are unknown. Install a wheel that has it, or "
            "set `python` to an interpreter of the nodes with the libraries"
        )
    wanted = [Requirement(line) for line in metadata.requires("rankwise") or []]
    return constraints, sorted(str(each) for each in wanted if each.name.lower() in NODE_LIBRARIES and not each.marker)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_INSTALL_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{shlex.join(command[:5])} ...: time-out after {_INSTALL_LIMIT_SECONDS / 60:g} minutes"
        ) from error
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ValueError(f"{shlex.join(command[:5])} ...: exit code {done.returncode}\n{said}")


def staged_manifest(shared: Path, name: str) -> Path:
    """Where the manifest of a staged model lies; `name` is its folder's name in the cache."""
    return shared / "rankwise" / "models" / name / "manifest.json"


def stage_model(shared: Path, manifest: ModelManifest, name: str, notice: Notice, thorough: bool = False) -> Path:
    """Bring a model's files below `shared`, checked against their hashes; returns the manifest there.

    thorough: hash also what is there already; otherwise sizes are believed. Raises OSError, and ValueError for a
    file that is not what the manifest says.
    """
    path = staged_manifest(shared, name)
    folder = path.parent
    remove_abandoned(folder.parent, HALF_MADE)
    damaged = _damaged(path, thorough) if folder.exists() else []
    if folder.exists() and not damaged:
        return path
    common_folder(shared, "rankwise", "models")
    if damaged:
        notice(f"model {manifest.identity}: damaged in {folder} ({some_of(damaged)}), copying again")
        cleared = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.cleared")  # as `_made_whole` names them
        with suppress(FileNotFoundError):  # of another who does the same
            folder.rename(cleared)
        shutil.rmtree(cleared, ignore_errors=True)
    size = sum(file.size_bytes for file in manifest.files.values())
    notice(f"model {manifest.identity}: {size / 2**20:.1f} MiB to {folder}")
    with _made_whole(folder) as work:
        for file_name, file in manifest.files.items():
            target = work / "files" / file_name
            target.parent.mkdir(parents=True, exist_ok=True)
            found = _bring(Path(manifest.folder) / file_name, target, may_link=manifest.source == "hub")
            if found != file.sha256:
                raise ValueError(
                    f"{Path(manifest.folder) / file_name}: content changed since the study began "
                    f"(SHA-256 {found[:16]}..., expected {file.sha256[:16]}...). Run again, or fetch the file again"
                )
        if manifest.source == "synthetic":
            (work / "files").mkdir()
            shutil.copy(Path(manifest.folder) / "config.json", work / "files")
        there = manifest.model_copy(update={"folder": str(folder / "files")})
        write_atomically(work / "manifest.json", there.model_dump_json(indent=1) + "\n")
    return path


def _damaged(path: Path, thorough: bool) -> list[str]:
    """Names of the files of a staged model that are not what its manifest says."""
    try:
        manifest = read_model(path, ModelManifest, PLAN_BYTES)
    except (OSError, ValueError):
        return [path.name]
    found = []
    for name, file in manifest.files.items():
        staged = Path(manifest.folder) / name
        whole = staged.is_file() and staged.stat().st_size == file.size_bytes
        if not whole or (thorough and sha256_of_file(staged) != file.sha256):
            found.append(name)
    if manifest.source == "synthetic" and not (Path(manifest.folder) / "config.json").is_file():
        found.append("config.json")
    return found


def _bring(source: Path, target: Path, may_link: bool) -> str:
    """Copy a file, or link it where both are on one disk and nobody rewrites it; returns its SHA-256.

    Files of the cache are written once; a user's own folder may be rewritten in place, so it is copied.
    """
    if may_link and source.stat().st_uid == os.geteuid():  # nobody else may set its mode
        with suppress(OSError):
            os.link(source.resolve(), target)
            return sha256_of_file(target)
    digest = hashlib.sha256()
    with open_regular(source) as read, target.open("wb") as written:
        while piece := read.read(_PIECE_BYTES):
            digest.update(piece)
            written.write(piece)
        os.fsync(written.fileno())
    return digest.hexdigest()


def stage_inputs(inputs: Path, root: Path) -> Path:
    """Copy what a run's `inputs` holds to the run's folder on the shared disk. Files are named by their hash."""
    destination = root / "inputs"
    destination.mkdir(parents=True, exist_ok=True)
    for source in whole_inputs(inputs):
        if not (destination / source.name).exists():
            _copy(source, destination / source.name)
    return destination


def whole_inputs(inputs: Path) -> list[Path]:
    """The files of a run's `inputs`, without what a run that was killed left unfinished there."""
    return sorted(path for path in inputs.glob("*") if path.is_file() and not path.name.startswith("."))


def _copy(source: Path, target: Path) -> None:
    """Copy a file of any size; it is whole, and on the disk, when it has its name."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".tmp")
    os.close(handle)
    try:
        shutil.copyfile(source, name)
        flush_file(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        # Not the file that was to be copied, nor the temporary name.
        error.filename, error.filename2 = str(target), None
        raise
    finally:
        Path(name).unlink(missing_ok=True)
