"""Read bytes of a file by pread or through a mapping, depending on its file system.

Rows are contiguous: one pread. Columns are many short ranges. On a local file system and on tmpfs they are copied out
of a mapping: on a 2-core AVX-512 machine, 47 MB in 24,576 ranges take 14 ms that way, 28 ms by a pread each from C and
37 ms from Python. On a network file system a page fault fetches only a few pages and waits, so whole rows are read in
large blocks and the columns cut out.

Files in the page cache need no copy: `lend` returns the pages themselves.
"""

import ctypes
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from configs.common.files.reading import check_regular
from engine.loading.pieces import FileRanges

_BLOCK_BYTES = 8 << 20
# f_type of statfs(2), from linux/magic.h and the file systems' own sources.
_NETWORK = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x5346414F: "afs",
}
_LIBC = ctypes.CDLL(None, use_errno=True)
_STATFS_BYTES = 512  # more than struct statfs has
_MADV_POPULATE_READ = 22  # of Linux, since 5.14
# Linux flag; in Python since 3.13. Without it, a writable mapping of a file larger than memory is refused.
_MAP_NORESERVE = 0x4000


def network_file_system(path: Path) -> str | None:
    """Return the name of the file's network file system; None for local or unknown ones."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _LIBC.statfs(os.fsencode(path), answer):
        return None
    # The type is the first field, a machine word; the constants have 32 bits.
    return _NETWORK.get(ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF)


class OpenFile:
    """One checkpoint file, open for reading pieces; `mapped` None: depending on the file system."""

    def __init__(self, path: Path, mapped: bool | None = None) -> None:
        self.path = path
        self._by_blocks = network_file_system(path) is not None if mapped is None else not mapped
        check_regular(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        self._mapping: mmap.mmap | None = None

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        self._mapping = None

    def read(self, place: FileRanges, into: np.ndarray) -> int:
        """Read the piece's bytes into `into` (uint8, of the same size).

        Returns the number of bytes requested from the file.

        Raises ValueError if the file has been truncated.
        """
        if place.count == 1:
            return self._read_range(place.offset, into)
        columns = into.reshape(place.count, place.width)
        if self._by_blocks:
            return self._cut_from_blocks(place, columns)
        np.copyto(columns, self._mapped(place))
        return place.nbytes

    def lend(self, place: FileRanges) -> np.ndarray:
        """Return the piece in the page cache, uint8 [count, width] with `stride` bytes between the rows.

        All of its pages are mapped when it returns. Writing to it does not change the file. If the file is truncated
        while this is in use, the process is killed. Raises ValueError if it is already truncated.
        """
        memory_mapped = self._mapped(place)
        begin, end = place.extent
        first = begin - begin % mmap.PAGESIZE
        assert self._mapping is not None
        try:
            self._mapping.madvise(_MADV_POPULATE_READ, first, end - first)
        except OSError:  # an older kernel: touch one byte of each page of each row
            memory_mapped[:, :: mmap.PAGESIZE].sum()
        return memory_mapped

    def _mapped(self, place: FileRanges) -> np.ndarray:
        begin, end = place.extent
        # Touching a mapping beyond the file's end would kill the process.
        if os.fstat(self._descriptor).st_size < end:
            raise self._shorter()
        if self._mapping is None:
            flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._mapping = mmap.mmap(self._descriptor, 0, flags=flags, prot=protection)
        span = np.frombuffer(self._mapping, np.uint8, end - begin, begin)
        return np.lib.stride_tricks.as_strided(span, (place.count, place.width), (place.stride, 1))

    def _read_range(self, offset: int, into: np.ndarray) -> int:
        rest = into.data
        while rest:
            count = os.preadv(self._descriptor, [rest], offset)
            if count == 0:
                raise self._shorter()
            rest = rest[count:]
            offset += count
        return len(into)

    def _cut_from_blocks(self, place: FileRanges, columns: np.ndarray) -> int:
        rows = max(1, _BLOCK_BYTES // place.stride)
        block = np.empty(min(rows, place.count) * place.stride, np.uint8)
        asked = 0
        for first in range(0, place.count, rows):
            last = min(first + rows, place.count)
            used = block[: (last - first - 1) * place.stride + place.width]
            asked += self._read_range(place.offset + first * place.stride, used)
            cut = np.lib.stride_tricks.as_strided(used, (last - first, place.width), (place.stride, 1))
            np.copyto(columns[first:last], cut)
        return asked

    def _shorter(self) -> ValueError:
        return ValueError(f"{self.path}: became shorter while it was read; fetch the model again")
