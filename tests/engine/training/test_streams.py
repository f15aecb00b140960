"""Files of checkpoints written past the page cache: the same bytes, checksums, what a full disk says."""

import os
import random
import zlib
from pathlib import Path

import pytest

from engine.training.checkpoints import streams
from engine.training.checkpoints.files import stored_file
from engine.training.checkpoints.streams import DirectFiles

SHARED_MEMORY = Path("/dev/shm")


def pieces(size: int) -> list[bytes]:
    """So many bytes, in the odd pieces in which a serializer writes."""
    chance = random.Random(size)
    whole, found, at = chance.randbytes(size), [], 0
    while at < size:
        step = chance.choice([1, 7, 64, 4096, 5000, 100_000, 3_000_000, 9_000_000])
        found.append(whole[at : at + step])
        at += step
    return found


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 4 << 20, (4 << 20) + 1, 20_000_001])
def test_what_is_written_is_there(tmp_path: Path, size: int) -> None:
    files, path, parts = DirectFiles(), tmp_path / "f", pieces(size)
    with files.create_stream(path, "wb") as stream:
        told = 0
        for part in parts:
            assert stream.tell() == told
            told += stream.write(part)  # type: ignore[attr-defined]
            stream.flush()
    whole = b"".join(parts)
    assert path.read_bytes() == whole
    assert files.written == {path: stored_file(path)}
    assert files.written[path].crc32 == zlib.crc32(whole)
    with files.create_stream(path, "rb") as stream:
        assert stream.read() == whole  # type: ignore[attr-defined]


def test_a_shorter_file_takes_the_place_of_a_longer_one(tmp_path: Path) -> None:
    files, path = DirectFiles(), tmp_path / "f"
    for size in (9_000_000, 5_000):
        with files.create_stream(path, "wb") as stream:
            stream.write(b"x" * size)  # type: ignore[attr-defined]
        assert path.stat().st_size == size == files.written[path].size_bytes


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no shared memory as a file system")
def test_a_file_system_without_direct_access() -> None:
    files, path = DirectFiles(), SHARED_MEMORY / f"rankwise-stream-{os.getpid()}"
    try:
        with files.create_stream(path, "wb") as stream:
            stream.write(b"y" * 10_000_001)  # type: ignore[attr-defined]
        assert path.read_bytes() == b"y" * 10_000_001
    finally:
        path.unlink()


def test_direct_access_that_is_refused_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    refused: list[int] = []

    def picky(file: int, data: bytes) -> int:
        if not refused:
            refused.append(len(data))
            raise OSError(22, "Invalid argument")
        return write(file, data)

    monkeypatch.setattr(streams.os, "write", picky)
    with DirectFiles().create_stream(tmp_path / "f", "wb") as stream:
        stream.write(b"z" * 5_000_000)  # type: ignore[attr-defined]
    assert refused and (tmp_path / "f").read_bytes() == b"z" * 5_000_000


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    files = DirectFiles()
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"), files.create_stream("/dev/full", "wb") as stream:
        stream.write(b"a" * 10_000_000)  # type: ignore[attr-defined]
    assert files.written == {} and len(os.listdir("/proc/self/fd")) == open_files
    with files.create_stream(tmp_path / "f", "wb") as stream:  # the buffer serves again
        stream.write(b"b")  # type: ignore[attr-defined]
    assert (tmp_path / "f").read_bytes() == b"b"


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), DirectFiles().create_stream(tmp_path / "none" / "f", "wb"):
        pass
