"""Inspect the page cache for files, evict them or load them into it.

Loads from a cold and from a warm cache are different measurements, so the state is set and verified before each. Linux
only, like the measurements.

    left = evict(files)                  # 0.0: the following reads come from the device
    seconds = raw_read_seconds(files)    # the reference for a load
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

PageCacheState = Literal["cold", "partly", "warm"]
_BLOCK_BYTES = 4 << 20
# Other processes (a metadata scan) may touch some pages between eviction and load.
_COLD_SHARE, _WARM_SHARE = 0.01, 0.99
# Pages per call of mincore: 256 MB of file.
_PAGES_A_CALL = 1 << 16
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def cached_share(files: Iterable[Path]) -> float | None:
    """Return the share of the files' pages that are in memory, from mincore(2); 1.0 for no pages at all.

    None if unknown: for files neither owned nor writable, the kernel reports all pages as resident.
    """
    pages = resident = 0
    for path in files:
        if os.stat(path).st_uid != os.geteuid() and not os.access(path, os.W_OK):
            return None
        with path.open("rb") as file:
            found = _resident_pages(file.fileno())
        resident += found[0]
        pages += found[1]
    return resident / pages if pages else 1.0


def state_of(share: float | None) -> PageCacheState | None:
    """Return the name of the state for a cached share."""
    if share is None:
        return None
    if share <= _COLD_SHARE:
        return "cold"
    return "warm" if share >= _WARM_SHARE else "partly"


def evict(files: Iterable[Path]) -> float | None:
    """Drop the files from the page cache; return the remaining share, as `cached_share`.

    Pages mapped or locked by a process stay, and so does all of a tmpfs.
    """
    files = list(files)
    for path in files:
        with path.open("rb") as file:
            with suppress(OSError):  # dirty pages cannot be dropped; squashfs has none, and refuses the call
                os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_share(files)


def warm(files: Iterable[Path]) -> float | None:
    """Read the files into the page cache; return the share in it afterwards."""
    files = list(files)
    raw_read_seconds(files)
    return cached_share(files)


def raw_read_seconds(files: Iterable[Path]) -> float:
    """Return the seconds of one plain sequential read of the files, in blocks of 4 MiB, without processing."""
    block = memoryview(bytearray(_BLOCK_BYTES))
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - began


def _resident_pages(descriptor: int) -> tuple[int, int]:
    """Return the pages of the file in memory, and all its pages."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    resident = 0
    # A private mapping is writable, so that ctypes can return its address; nothing is written.
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:
        here = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(here)
        for first in range(0, pages, _PAGES_A_CALL):
            count = min(_PAGES_A_CALL, pages - first)
            states = np.empty(count, np.uint8)
            length = min(size - first * mmap.PAGESIZE, count * mmap.PAGESIZE)
            if _LIBC.mincore(address + first * mmap.PAGESIZE, length, states.ctypes.data):
                raise OSError(ctypes.get_errno(), "mincore failed")
            # Only the lowest bit is defined.
            resident += int(np.count_nonzero(states & 1))
        del here
    return resident, pages
