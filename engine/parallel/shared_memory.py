"""Collectives through shared memory among ranks of one host: an all-reduce takes microseconds, over gloo milliseconds.

    descriptor = create_segment(2, token)                    # on one rank; the others open_segment(...)
    group = SharedMemory(descriptor, 2, index, timeout_seconds, is_gone)
    group.all_reduce(tensor)                                 # CPU tensors, contiguous

The segment is an anonymous file (memfd_create(2)) that the other ranks open through /proc while its creator lives. It
has no name, so nothing is left behind, however a rank ends. `shared_memory.c` describes the synchronisation. Ranks
that wait spin before they sleep, so each needs a core.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from engine.kernels.build import load_library

_SOURCE = Path(__file__).with_suffix(".c")
_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.int32: 2,
    torch.int64: 3,
    torch.bfloat16: 4,
    torch.float16: 5,
}  # as in the C source
_MISMATCH = 1 << 20
TOKEN_BYTES = 16

_IsGone = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_found_gone: set[int] = set()
"""Indices of ranks that this process has found gone, in whatever group."""


class WaitError(Exception):
    """A rank, by its index in the group, that did not arrive: `silent` if its process still exists."""

    def __init__(self, index: int, silent: bool) -> None:
        super().__init__(index)
        self.index = index
        self.silent = silent


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled operations; None if they cannot be built."""
    found = load_library(_SOURCE)
    if found is None:
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    arguments = {
        "all_reduce": (pointer, pointer, size, number),
        "all_gather": (pointer, pointer, pointer, size),
        "reduce_scatter": (pointer, pointer, pointer, size, number),
        "broadcast": (pointer, pointer, size, number),
        "barrier": (pointer,),
        "send_message": (pointer, pointer, size, number),
        "receive_message": (pointer, pointer, size, number),
    }
    for name, types in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, number
    found.segment_bytes.argtypes, found.segment_bytes.restype = (number,), size
    found.open_group.argtypes = (number, number, number, ctypes.c_int64, _IsGone)
    found.open_group.restype = pointer
    found.close_group.argtypes, found.close_group.restype = (pointer,), None
    return found


def create_segment(size: int, token: bytes) -> int:
    """Create an empty segment for this many ranks; return its file descriptor. Raises OSError."""
    compiled = library()
    assert compiled is not None and len(token) == TOKEN_BYTES
    descriptor = os.memfd_create("rankwise")
    try:
        os.ftruncate(descriptor, compiled.segment_bytes(size))
        os.pwrite(descriptor, token, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_segment(pid: int, descriptor: int, token: bytes) -> int | None:
    """Return a descriptor for the segment of another process; None if it cannot be reached from here."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(opened, TOKEN_BYTES, 0) == token:
            return opened
    except OSError:
        pass
    os.close(opened)  # the number belongs to another process here
    return None


class SharedMemory:
    """One rank's end of a segment.

    Every function raises WaitError if a rank exceeds the time limit or its process is gone (`is_gone`, polled during a
    long wait), and RuntimeError if the ranks call different operations.
    """

    def __init__(
        self, descriptor: int, size: int, index: int, timeout_seconds: float, is_gone: Callable[[int], bool]
    ) -> None:
        compiled = library()
        assert compiled is not None
        self._library = compiled

        def look(peer: int) -> int:
            gone = is_gone(peer)
            if gone:
                _found_gone.add(peer)
            return int(gone)

        self._callback = _IsGone(look)  # kept alive: C calls it
        nanoseconds = int(timeout_seconds * 1e9)
        self._group: int | None = compiled.open_group(descriptor, size, index, nanoseconds, self._callback)
        if self._group is None:
            raise OSError("the shared memory of this host's ranks could not be mapped")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        code = self._library.all_reduce(self._group, tensor.data_ptr(), tensor.numel(), dtype_code(tensor))
        if code:
            raise_for(code)

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Gather every rank's part into `whole` [size, *part.shape]."""
        code = self._library.all_gather(self._group, part.data_ptr(), whole.data_ptr(), part.nbytes)
        if code:
            raise_for(code)

    def reduce_scatter(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Sum `whole` over the ranks and write whole[index] into `part`."""
        count, dtype = part.numel(), dtype_code(part)
        code = self._library.reduce_scatter(self._group, whole.data_ptr(), part.data_ptr(), count, dtype)
        if code:
            raise_for(code)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Broadcast the source's values, in place."""
        code = self._library.broadcast(self._group, tensor.data_ptr(), tensor.nbytes, source)
        if code:
            raise_for(code)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Put a message into a rank's mailbox; blocks only while that is full."""
        code = self._library.send_message(self._group, tensor.data_ptr(), tensor.nbytes, to)
        if code:
            raise_for(code)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Receive the next message from a rank; its size in bytes must match."""
        code = self._library.receive_message(self._group, tensor.data_ptr(), tensor.nbytes, source)
        if code:
            raise_for(code)

    def barrier(self) -> None:
        """Return when all ranks have arrived."""
        code = self._library.barrier(self._group)
        if code:
            raise_for(code)

    def close(self) -> None:
        """Release the memory; the last rank's release frees it."""
        if self._group is not None:
            self._library.close_group(self._group)
            self._group = None


def raise_for(code: int) -> None:
    """Raise the exception for a function's non-zero code: see `SharedMemory`.

    Handlers of signals run while C asks whether a rank is gone. What they raise does not pass through C, which is left
    with any answer: KeyboardInterrupt instead of a rank that nobody has found gone.
    """
    if code < 0 and -1 - code not in _found_gone:
        raise KeyboardInterrupt
    if code >= _MISMATCH:
        raise RuntimeError(
            f"the ranks do not take part in the same operation with the same number of bytes: "
            f"index {code - _MISMATCH} of the group does something else"
        )
    raise WaitError(code - 1, silent=True) if code > 0 else WaitError(-1 - code, silent=False)


def dtype_code(tensor: torch.Tensor) -> int:
    """Return the C code of a type. Raises ValueError for a type without a sum here."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ValueError(f"{tensor.dtype} cannot be summed over ranks through shared memory; use one of: {known}")
    return code
