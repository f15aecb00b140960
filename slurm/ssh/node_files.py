"""Files on a host: taken, told, named, handed on to other hosts. Python's standard library only.

A part of the program that `slurm.ssh.node_program` is, on the host.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from configs.common.files.abandoned import remove_abandoned
from slurm.staging.file_list import is_whole, write_list

PIECE_BYTES = 1 << 20
_GROWTH_SECONDS = 60.0
"""So long a neighbour waits for the next bytes of a file that is still coming in."""
_ACCEPT_SECONDS = 0.1
_STRANGERS = (OSError, ValueError, LookupError, TypeError, RecursionError)
"""What reading a stranger's request may raise. A traceback of each would fill what answers come through too."""
_PIP_WITH_PYTHON = (22, 3)
"""The first pip that has `--python`."""
children: "set[subprocess.Popen[str]]" = set()
"""What is being run for a request."""
_incoming: "dict[Path, tuple[hashlib._Hash, int]]" = {}
"""Hash of each file that is coming in, and of how many of its bytes: it is not read again at its end."""


def put(
    path: str,
    offset: int,
    last: bool,
    sha256: str | None = None,
    mode: int = 0o644,
    part_name: str | None = None,
    body: bytes = b"",
) -> None:
    """Take the next bytes of a file; with the last ones it gets its name, if it is what it should be.

    part_name: until then, of a large file that several may bring into one folder.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two runs may bring the same small file; larger ones go into folders of their own, unless they have a part's name.
    whole = last and offset == 0
    given = target.name + ".part" if part_name is None else part_name
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}" if whole else given)
    # From its first moment nobody else may read what is a secret; the rest of `mode` comes with the name.
    flags = os.O_RDWR | (0 if offset else os.O_CREAT | os.O_TRUNC) | os.O_CLOEXEC
    with os.fdopen(os.open(part, flags, 0o600), "r+b") as file:
        file.seek(offset)
        file.truncate()
        file.write(body)
        if last:
            file.flush()
            os.fsync(file.fileno())
    digest, hashed = _incoming.pop(part, (hashlib.sha256(), 0))
    if offset == 0:
        digest, hashed = hashlib.sha256(), 0
    if offset == hashed:
        digest.update(body)
        _incoming[part] = digest, hashed + len(body)
    if last:
        told = _incoming.pop(part, None)
        _name(part, target, sha256, mode, None if told is None else told[0].hexdigest())


def _name(part: Path, target: Path, sha256: str | None, mode: int, found: str | None) -> None:
    """Give a file its name. found: the hash of what was written; None: of what is there."""
    if sha256 is not None:
        if found is None:
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            part.unlink()
            raise OSError(f"{target}: SHA-256 {found[:16]}..., expected {sha256[:16]}...")
    part.chmod(mode)
    part.replace(target)


def get(path: str, offset: int, size: int) -> dict[str, Any]:
    """Bytes of a file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return {"body": file.read(min(size, PIECE_BYTES))}


def sizes(paths: list[str]) -> dict[str, Any]:
    """Size of each file; of a folder 0; None where there is nothing."""
    found: list[int | None] = []
    for path in map(Path, paths):
        found.append((path.stat().st_size if path.is_file() else 0) if path.exists() else None)
    return {"sizes": found}


def hashes(paths: list[str]) -> dict[str, Any]:
    """SHA-256 of each file; None where there is none."""
    found: list[str | None] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError:
            found.append(None)
    return {"hashes": found}


def rename(path: str, to: str) -> None:
    """Give a folder that is complete its name, unless another was faster; one that has lost files makes room."""
    write_list(path)
    if os.path.isdir(to) and not is_whole(to):
        with contextlib.suppress(FileNotFoundError):  # of another who does the same
            os.rename(to, f"{path}.cleared")
    try:
        os.rename(path, to)
    except OSError:
        if not os.path.isdir(to):
            raise
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(f"{path}.cleared", ignore_errors=True)


def whole(paths: list[str]) -> dict[str, Any]:
    """Of each folder that `rename` named, whether it has all its files yet."""
    return {"whole": [is_whole(path) for path in paths]}


def make(paths: list[str]) -> None:
    """Make folders where they are not there."""
    for path in paths:
        os.makedirs(path, exist_ok=True)


def remove(paths: list[str]) -> None:
    """Remove folders, whatever is left of them."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def clear_abandoned(parents: list[str], names: str) -> None:
    """Remove half-made folders of these names, a regular expression, in which nothing was changed for a day."""
    for parent in parents:
        remove_abandoned(Path(parent), re.compile(names))


def unpack(archive: str, to: str) -> None:
    """Unpack a wheel, and compile what is in it."""
    import compileall

    with zipfile.ZipFile(archive) as opened:
        opened.extractall(to)
    compileall.compile_dir(to, quiet=2)


def install(folder: str, constraints: str, requirements: list[str], limit: float) -> None:
    """Make a virtual environment with libraries, by this host's pip and as it is configured here. limit: in seconds."""
    work = tempfile.mkdtemp(dir=os.path.dirname(folder), prefix=f".{os.path.basename(folder)}.")
    python, own = f"{work}/bin/python", _has_pip()
    try:
        # To install pip into the environment takes longer than small libraries do.
        _call([sys.executable, "-m", "venv", *["--without-pip"] * own, work], 300)
        pip = [sys.executable, "-m", "pip", "--python", python] if own else [python, "-m", "pip"]
        options = ["--quiet", "--disable-pip-version-check", "--constraint", constraints]
        _call([*pip, "install", *options, *requirements], limit)
        rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _has_pip() -> bool:
    """Whether this Python has a pip that installs into another environment."""
    try:
        major, minor = metadata.version("pip").split(".")[:2]
        return (int(major), int(minor)) >= _PIP_WITH_PYTHON
    except (metadata.PackageNotFoundError, ValueError):
        return False


def pack(folder: str, to: str, limit: float) -> dict[str, Any]:
    """A folder as one file for hosts like this one; its size and SHA-256. limit: in seconds."""
    os.makedirs(os.path.dirname(to), exist_ok=True)
    _call(["tar", "-C", folder, "-cf", to, "."], limit)
    with open(to, "rb") as file:
        return {"size": os.path.getsize(to), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def unpack_beside(archive: str, limit: float) -> None:
    """What `pack` made, into the folder in which it lies, in its place. Times are kept: compiled files stay valid."""
    _call(["tar", "-C", os.path.dirname(archive), "--no-same-owner", "-xf", archive], limit)
    os.unlink(archive)


def _call(command: list[str], limit_seconds: float) -> None:
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    children.add(child)
    try:
        said = child.communicate(timeout=limit_seconds)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        raise OSError(f"{' '.join(command[:6])} ...: time-out after {limit_seconds / 60:g} minutes") from None
    finally:
        children.discard(child)
    if child.returncode != 0:
        lines = "\n".join(said.strip().splitlines()[-5:])
        raise OSError(f"{' '.join(command[:6])} ...: exit code {child.returncode}\n{lines}")


class Neighbours:
    """Gives files to the other hosts, while they are still coming in too; only those that were named, by a token."""

    def __init__(self) -> None:
        self._offered: set[str] = set()
        self._token = secrets.token_hex(32)
        self._listener: socket.socket | None = None

    def offer(self, paths: list[str], address: str) -> dict[str, Any]:
        """Offer files to whoever has the token."""
        self._offered |= set(paths)
        if self._listener is None:
            family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
            try:
                self._listener = socket.create_server((address, 0), family=family)
            except OSError:  # an address that others see and this host does not have
                self._listener = socket.create_server(("", 0))
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return {"port": self._listener.getsockname()[1], "token": self._token}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # such as too many open files: it passes
                time.sleep(_ACCEPT_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(*_STRANGERS):
            connection.settimeout(_GROWTH_SECONDS)
            with connection.makefile("rb") as asked:
                wanted = json.loads(asked.readline(65536))
            is_known = hmac.compare_digest(str(wanted["token"]).encode(), self._token.encode())
            if not is_known or wanted["path"] not in self._offered:
                return
            for piece in _growing(Path(wanted["path"]), int(wanted["size"])):
                connection.sendall(piece)


def _growing(path: Path, size: int) -> Iterator[bytes]:
    """The bytes of a file that may still be coming in. Raises OSError where no more come."""
    sent, deadline = 0, time.monotonic() + _GROWTH_SECONDS
    file: BinaryIO | None = None
    try:
        while sent < size:
            if file is None:
                with contextlib.suppress(FileNotFoundError):
                    file = (path if path.exists() else path.with_name(path.name + ".part")).open("rb")
            piece = file.read(PIECE_BYTES) if file is not None else b""
            if piece:
                sent, deadline = sent + len(piece), time.monotonic() + _GROWTH_SECONDS
                yield piece
            elif time.monotonic() > deadline:
                raise OSError(f"{path}: no more bytes")
            else:
                time.sleep(0.05)
    finally:
        if file is not None:
            file.close()


def fetch(source: dict[str, Any], path: str, size: int, sha256: str) -> None:
    """Take a file from another host. Raises OSError where that cannot be reached or gives something else."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with socket.create_connection((source["address"], source["port"]), timeout=10) as connection:
        connection.settimeout(_GROWTH_SECONDS)
        asked = {"token": source["token"], "path": source["path"], "size": size}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        taken, digest = 0, hashlib.sha256()
        with part.open("wb") as file:
            while taken < size:
                piece = connection.recv(PIECE_BYTES)
                if not piece:
                    raise OSError(f"{source['address']} ended the transfer of {path} at {taken} of {size} bytes")
                file.write(piece)
                file.flush()
                digest.update(piece)
                taken += len(piece)
            os.fsync(file.fileno())
    _name(part, target, sha256, 0o644, digest.hexdigest())
