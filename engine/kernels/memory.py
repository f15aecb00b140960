"""Memory in huge pages where the kernel of the operating system gives them.

    packed = aligned_bytes(count)               # uint8 [count], uninitialised, from the start of a page
    store = huge_zeros(shape, dtype, device)    # as torch.zeros; elsewhere than on a CPU, it is
    into_huge_pages(packed)                     # memory that was asked for without them

With pages of 4 KiB address translation costs a tenth to a third of the reading speed.
"""

import ctypes
import functools
import math

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux; the second since 6.1


def aligned_bytes(count: int, huge_pages: bool = True) -> Tensor:
    """Allocate uint8 [count], uninitialised, aligned to a huge page if large enough, with huge pages requested."""
    page_bytes = _HUGE_PAGE_BYTES if count >= _HUGE_PAGE_BYTES else _LINE_BYTES
    room = torch.empty(count + page_bytes, dtype=torch.uint8)  # untouched pages take no memory
    aligned = room.narrow(0, -room.data_ptr() % page_bytes, count)
    if huge_pages:
        _advise(aligned, _MADV_HUGEPAGE)
    return aligned


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros as torch.zeros does, on a CPU in memory from `aligned_bytes`."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Advised before it is filled: pages are given as they are touched.
    return aligned_bytes(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(shape)


def into_huge_pages(memory: Tensor) -> None:
    """Request huge pages for memory from `aligned_bytes` that is not in them."""
    _advise(memory, _MADV_COLLAPSE)


def _advise(memory: Tensor, advice: int) -> None:
    """Advise the kernel; an older kernel ignores it."""
    if memory.nbytes >= _HUGE_PAGE_BYTES and hasattr(_libc(), "madvise"):
        _libc().madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), advice)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
