"""Files that come in piece by piece: hashed on the way, named only if they are what they should be."""

import hashlib
from pathlib import Path

import pytest

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
