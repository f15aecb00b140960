"""Write files with direct I/O and checksums, for torch.distributed.checkpoint.

    files = DirectFiles()                                     # kept for all checkpoints of a run
    writer = FileSystemWriter(folder, sync_files=False); writer.fs = files
    files.written[path]                                       # StoredFile of each complete file on disk

A new checkpoint is not read soon. Writing through the page cache copies each byte on a core that should compute, into
pages that must be allocated first (a virtual machine gets them from the host: 24 MB took 10 to 90 ms), and evicts
useful data. Without direct I/O in the file system, the cache is used.
"""

import fcntl
import io
import mmap
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from engine.training.checkpoints.files import StoredFile

_BUFFER_BYTES = 4 << 20
_BLOCK_BYTES = 4096
"""Direct I/O needs addresses, offsets and lengths in whole blocks; no common file system has larger ones."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class DirectStream(io.RawIOBase):
    """A new file; on disk when `close` has returned. `flush` keeps a partial block in memory."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        super().__init__()
        self._file = -1  # while none is open: `close` is called even if opening fails
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | _DIRECT, 0o666)
        except OSError:
            self._file = os.open(path, flags, 0o666)
        self._buffer, self._filled, self._size, self._crc = memoryview(buffer), 0, 0, 0

    @property
    def written(self) -> StoredFile:
        """Size and checksum of the complete file, after it is closed."""
        return StoredFile(size_bytes=self._size, crc32=self._crc)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any, /) -> int:
        """Write an object with a buffer completely; return its bytes."""
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        while rest:
            piece = rest[: _BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + piece.nbytes] = piece
            self._filled += piece.nbytes
            rest = rest[piece.nbytes :]
            if self._filled == _BUFFER_BYTES:
                self._drain(_BUFFER_BYTES)
        self._size += size
        return size

    def _drain(self, size: int) -> None:
        self._crc = zlib.crc32(self._buffer[:size], self._crc)
        done = 0
        while done < size:
            try:
                done += os.write(self._file, self._buffer[done:size])
            except OSError:
                if not self._cached():
                    raise
        self._filled -= size

    def _cached(self) -> bool:
        """Switch to the page cache; False if it was in use already."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)

    def close(self) -> None:
        """Write the rest and wait for the disk. Raises OSError on a full disk."""
        if self.closed or self._file < 0:
            return
        try:
            blocks = self._filled - self._filled % _BLOCK_BYTES
            tail = bytes(self._buffer[blocks : self._filled])
            self._filled = blocks
            self._drain(blocks)
            self._buffer[: len(tail)] = tail
            self._filled = len(tail)
            self._cached()
            self._drain(len(tail))
            os.fsync(self._file)
        finally:
            self._buffer.release()
            os.close(self._file)
            super().close()


class DirectFiles(FileSystem):
    """One file at a time. `written`: closed files, by path."""

    def __init__(self) -> None:
        self.written: dict[Path, StoredFile] = {}
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Create a file. Raises OSError; a failed one is left incomplete."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        direct = DirectStream(Path(path), self._buffer)
        try:
            yield cast(io.IOBase, direct)
        finally:
            direct.close()
        self.written[Path(path)] = direct.written
