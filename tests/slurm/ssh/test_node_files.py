"""Files that come in piece by piece: hashed on the way, named only if they are what they should be."""

import contextlib
import hashlib
import json
import os
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from slurm.ssh import node_files
from slurm.ssh.node_files import put

PIECES = (b"first ", b"second ", b"third")
WHOLE = hashlib.sha256(b"".join(PIECES)).hexdigest()


def put_all(path: Path, pieces: tuple[bytes, ...], sha256: str) -> None:
    offset = 0
    for number, piece in enumerate(pieces, 1):
        put(str(path), offset, number == len(pieces), sha256, body=piece)
        offset += len(piece)


def test_a_file_gets_its_name_with_its_last_piece(tmp_path: Path) -> None:
    path = tmp_path / "new" / "weights"
    put_all(path, PIECES, WHOLE)
    assert path.read_bytes() == b"".join(PIECES) and [each.name for each in path.parent.iterdir()] == ["weights"]


def test_another_file_gets_no_name(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with pytest.raises(OSError, match="SHA-256"):
        put_all(path, (*PIECES[:2], b"other"), WHOLE)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_begun_anew_is_hashed_anew(tmp_path: Path) -> None:
    """The connection broke after two pieces; the next one begins at the first byte again."""
    path = tmp_path / "weights"
    for offset, piece in ((0, PIECES[0]), (len(PIECES[0]), b"broken")):
        put(str(path), offset, False, WHOLE, body=piece)
    put_all(path, PIECES, WHOLE)
    assert path.read_bytes() == b"".join(PIECES)


def test_a_piece_that_another_process_took_is_read_again(tmp_path: Path) -> None:
    """A host's program that was started anew has no hash of what the one before it took."""
    path = tmp_path / "weights"
    path.with_name("weights.part").write_bytes(PIECES[0])
    put(str(path), len(PIECES[0]), False, WHOLE, body=PIECES[1])
    put(str(path), len(PIECES[0] + PIECES[1]), True, WHOLE, body=PIECES[2])
    assert path.read_bytes() == b"".join(PIECES)


def test_a_secret_is_readable_by_its_owner_alone_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    name = node_files._name

    def noted(part: Path, *rest: Any) -> None:
        modes.append(part.stat().st_mode & 0o777)
        name(part, *rest)

    monkeypatch.setattr(node_files, "_name", noted)
    before = os.umask(0o022)
    try:
        put(str(tmp_path / "key"), 0, True, mode=0o600, body=b"secret")
        put(str(tmp_path / "code"), 0, True, mode=0o755, body=b"public")
    finally:
        os.umask(before)
    assert modes == [0o600, 0o600]
    assert [(tmp_path / each).stat().st_mode & 0o777 for each in ("key", "code")] == [0o600, 0o755]


@pytest.mark.parametrize(("pip", "own"), [("23.2.1", False), ("22.3", False), ("20.3.4", True), (None, True)])
def test_libraries_are_installed_by_a_pip_that_is_there_or_by_one_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: str | None, own: bool
) -> None:
    def version(_: str) -> str:
        if pip is None:
            raise metadata.PackageNotFoundError
        return pip

    called: list[list[str]] = []
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(node_files, "_call", lambda command, _: called.append(command))
    node_files.install(str(tmp_path / "libraries"), "constraints.txt", ["torch"], 1.0)
    made, (python, *installed) = called
    assert ("--without-pip" in made) is not own and (python == f"{made[-1]}/bin/python") is own
    assert own or installed[2:4] == ["--python", f"{made[-1]}/bin/python"]
    assert installed[-3:] == ["--constraint", "constraints.txt", "torch"]
    assert (tmp_path / "libraries").is_dir()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_strangers_are_turned_away_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tracebacks of a port scanner's requests filled the connection to the host, which then did not answer any more."""
    path = tmp_path / "weights"
    path.write_bytes(b"whole")
    offer = node_files.Neighbours().offer([str(path)], "127.0.0.1")

    def answered(request: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", offer["port"]), timeout=600) as asked:
            asked.sendall(request + b"\n")
            with contextlib.suppress(ConnectionResetError):
                return b"".join(iter(lambda: asked.recv(1 << 16), b""))
            return b""

    own = {"token": offer["token"], "path": str(path), "size": 5}
    foreign: list[Any] = [[1], own | {"token": "\xe9"}, own | {"token": "\ud800"}, own | {"path": []}]
    foreign += [own | {"size": None}, {"token": offer["token"]}, own | {"path": "/etc/passwd"}]
    for request in (*(json.dumps(each).encode() for each in foreign), b"[" * 60_000, b"GET / HTTP/1.1"):
        assert answered(request) == b""
    assert answered(json.dumps(own).encode()) == b"whole"
    assert capfd.readouterr().err == ""
