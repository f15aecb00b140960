"""Record calls of C functions and replay them in one call, because Python dominates the decode time of small models.

    with Recording() as recording:
        y = step(x)                       # over tensors that stay: an input buffer, weights, a cache
    if not recording.refusals:
        program = recording.program()
        x.copy_(other)
        program.run()                     # y now equals step(x)

Every function of a library from `load_library` is recorded with its arguments when it is called as an attribute of that
library, with declared `argtypes`. Calls through a saved function object are not recorded. The program keeps the memory
that the step allocates, so that addresses stay valid; released memory is reused within the step and stays in the
processor's caches. Values that change between steps must be read by the C functions from memory at a fixed address;
arguments are replayed unchanged.

A step of any number of rows is recorded twice, with its largest number and another one (`ScaledProgram`): all that
differs between both is a size or an address inside the step's memory, and grows with the rows.

    with Recording() as large:
        y = step(x)                       # 128 rows
    with Recording(large) as small:
        step(x[:2])                       # in the memory of the first
    program = ScaledProgram(large, small, (128, 2))
    program.scale(77)
    program.run()                         # the first 77 rows of y

Operations that would be lost are rejected: every operator of torch except allocations and views. Other work, such as
numpy's, is not detected; the caller must check with `poison()` and a comparison.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.kernels.build import load_library, loaded_libraries

_SOURCE = Path(__file__).with_name("program.c")
_MOST_INTEGERS, _MOST_REALS = 24, 4
_INTEGERS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t)
_LINE_BYTES = 64
_ROOM = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")

_recording = threading.Lock()


class _Call(ctypes.Structure):
    """`struct call` of program.c."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("integers", ctypes.c_int64 * _MOST_INTEGERS),
        ("reals", ctypes.c_float * _MOST_REALS),
        ("integer_count", ctypes.c_int64),
        ("checked", ctypes.c_int64),
    ]


_CALL_WORDS = ctypes.sizeof(_Call) // 8
_INTEGER_WORDS = np.arange(_MOST_INTEGERS) + _Call.integers.offset // 8


class KernelProgram:
    """Recorded calls in order, and their memory. `names` are those of the functions."""

    def __init__(self, calls: list[_Call], names: list[str], room: "_Room") -> None:
        library = _library()
        assert library is not None
        self.names = names
        self._calls = (_Call * len(calls))(*calls)
        self._code = ctypes.c_int64()
        self._room = room
        self._run: Callable[..., int] = library.program_run
        self._arguments = ctypes.addressof(self._calls), len(calls), ctypes.addressof(self._code)

    @property
    def nbytes(self) -> int:
        """Bytes of the program's memory, without memory that existed before."""
        return sum(block.nbytes for block in self._room.blocks)

    def run(self) -> tuple[str, int] | None:
        """Run the calls. Return name and code of the first that failed, after which none runs; None on success."""
        failed = self._run(*self._arguments)
        return None if failed < 0 else (self.names[failed], self._code.value)

    def poison(self) -> None:
        """Fill the program's memory with NaN, so that a missing call shows in the result."""
        for block in self._room.blocks:
            block.fill(0xFF)


class ScaledProgram(KernelProgram):
    """A program for every number of rows from that of one recording up to that of another, made in its memory."""

    def __init__(self, large: "Recording", small: "Recording", rows: tuple[int, int], unit: int = 1) -> None:
        """rows: of both recordings, which may be equal; they and all others are multiples of `unit`.

        Raises ValueError if the recordings differ in more than numbers that grow with the units.
        """
        super().__init__(large.calls, large.names, large.room)
        most, least = rows
        if large.names != small.names or large.room.order != small.room.order:
            raise ValueError("steps of other numbers of rows call other functions or need other memory")
        words, fewer = _words_of(self._calls), _words_of((_Call * len(small.calls))(*small.calls))
        where = np.flatnonzero(words != fewer)
        if not np.isin(where % _CALL_WORDS, _INTEGER_WORDS).all():
            raise ValueError("steps of other numbers of rows differ in more than numbers")
        growth, units = words[where] - fewer[where], max(1, (most - least) // unit)
        if (growth % units).any():
            raise ValueError("steps of other numbers of rows differ by fractions of a row")
        self._words, self._where, self._unit = words, where, unit
        self._least, self._most = least, most
        self._at_most, self._each_unit = words[where], growth // units

    def scale(self, rows: int) -> None:
        """Set the number of rows of the next runs, within those of the recordings."""
        assert self._least <= rows <= self._most and rows % self._unit == 0, rows  # else it writes beyond its memory
        self._words[self._where] = self._at_most + (rows - self._most) // self._unit * self._each_unit


class Recording:
    """Record the calls made in the context by the entering thread; a second recording is refused.

    refusals: operations that a program would lose; if there are any, there is no program. within: an earlier recording
    of the same step with at least as many rows, in whose memory this one is made.
    """

    def __init__(self, within: "Recording | None" = None) -> None:
        self.refusals: set[str] = set()
        self.calls: list[_Call] = []
        self.names: list[str] = []
        self.room: _Room = _Room() if within is None else _SameRoom(within.room)
        self._replaced: list[tuple[ctypes.CDLL, str, Any]] = []
        self._watch = _Watch(self.refusals, self.room)

    def __enter__(self) -> "Recording":
        self._thread = threading.get_ident()
        self._is_first = _recording.acquire(blocking=False)
        if _library() is None:
            self.refusals.add("no compiler for program.c")
        if not self._is_first:
            self.refusals.add("another thread records")
        for library in loaded_libraries() if self._is_first else ():
            for name, function in list(vars(library).items()):
                if isinstance(function, library._FuncPtr):
                    self._replaced.append((library, name, function))
                    setattr(library, name, self._noting(name, function))
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for library, name, function in self._replaced:
            setattr(library, name, function)
        self._replaced.clear()
        if self._is_first:
            _recording.release()

    def program(self) -> KernelProgram:
        """Return the recorded program."""
        assert not self.refusals, self.refusals
        return KernelProgram(self.calls, self.names, self.room)

    def _noting(self, name: str, function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._note(name, function, arguments)
            return function(*arguments)

        return call

    def _note(self, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        kinds = function.argtypes
        if kinds is None or len(kinds) != len(arguments):
            self.refusals.add(f"{name} without declared arguments")
            return
        integers = [value for value, kind in zip(arguments, kinds, strict=True) if kind in _INTEGERS]
        reals = [value for value, kind in zip(arguments, kinds, strict=True) if kind is ctypes.c_float]
        plain = all(value is None or isinstance(value, int) for value in integers)
        fits = len(integers) <= _MOST_INTEGERS and len(reals) <= _MOST_REALS
        if not plain or not fits or len(integers) + len(reals) != len(arguments):
            self.refusals.add(f"{name} with arguments that a program cannot hold")
            return
        call = _Call(ctypes.cast(function, ctypes.c_void_p).value)
        call.integers[: len(integers)] = [_signed(value or 0) for value in integers]
        call.reals[: len(reals)] = reals
        call.integer_count, call.checked = len(integers), int(function.restype is ctypes.c_int)
        self.calls.append(call)
        self.names.append(name)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercept every operator of torch: supply memory, and record computing operators."""

    def __init__(self, refusals: set[str], room: "_Room") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refusals, self._room = refusals, room

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _ROOM:
            return self._room.like(result)
        if not func.is_view or not _storages(result) <= _storages((*args, kwargs)):
            # Some view operators copy if necessary, as `reshape` and `contiguous` do.
            self._refusals.add(name)
        return result


class _Room:
    """Blocks of memory for tensors; a block is reused when no tensor refers to it.

    order: numbers of the blocks, as they were given out.
    """

    def __init__(self) -> None:
        self.blocks: list[np.ndarray] = []
        self.order: list[int] = []

    def like(self, wanted: Tensor) -> Tensor:
        """Return a tensor of the same type, shape and strides, uninitialised."""
        count = wanted.untyped_storage().nbytes()
        uses = enumerate(_references(self.blocks))
        number = next((one for one, many in uses if many == _UNUSED and self.blocks[one].nbytes == count), None)
        if number is None:
            number = len(self.blocks)
            room = np.empty(count + _LINE_BYTES, dtype=np.uint8)
            start = -room.ctypes.data % _LINE_BYTES
            self.blocks.append(room[start : start + count])
        self.order.append(number)
        return _in_block(self.blocks[number], wanted)


class _SameRoom(_Room):
    """The blocks of another room, in the order in which that one was asked for them."""

    def __init__(self, other: _Room) -> None:
        super().__init__()
        self._other = other

    def like(self, wanted: Tensor) -> Tensor:
        place, count = len(self.order), wanted.untyped_storage().nbytes()
        if place < len(self._other.order):
            block = self._other.blocks[self._other.order[place]]
            if block.nbytes >= count:
                self.order.append(self._other.order[place])
                return _in_block(block[:count], wanted)
        self.order.append(-1)  # another step
        return wanted


def _in_block(block: np.ndarray, wanted: Tensor) -> Tensor:
    return torch.from_numpy(block).view(wanted.dtype).as_strided(wanted.shape, wanted.stride())


def _references(blocks: list[np.ndarray]) -> list[int]:
    """Return the reference count of each, including this call's; a tensor in a block refers to it."""
    return [sys.getrefcount(block) for block in blocks]


_UNUSED = _references([np.empty(0)])[0]


def _storages(values: Any) -> set[int]:
    """Return the storage addresses of the tensors among these."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}


def _words_of(calls: "ctypes.Array[_Call]") -> np.ndarray:
    """Return all words of the calls, a view."""
    return np.frombuffer(memoryview(calls).cast("B"), dtype=np.int64)


def _signed(value: int) -> int:
    """Return the same 64 bits as a signed number: an address may be above 2^63."""
    return value - (1 << 64) if value >= 1 << 63 else value


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        library.program_run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        library.program_run.restype = ctypes.c_int64
    return library
