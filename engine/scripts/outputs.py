"""Output of the ranks: read from pipes as it comes, kept in a log of bounded size, and handed on line by line.

    with Outputs(folder, ranks, log_of) as outputs:
        for line in outputs.read(0.05): ...         # Line(rank, stream, text, at)

A script may print gigabytes, never end a line or print bytes that are no text: a log keeps the first and the last
megabytes, a line is cut at MAX_LINE_BYTES.
"""

import os
import re
import selectors
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

HEAD_BYTES = 4 << 20
TAIL_BYTES = 1 << 20
"""Of a rank's log: so much of its beginning and of its end are kept."""
MAX_LINE_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 18
_TAIL_FOR_SIGNS = 64 << 10
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True)
class Line:
    """One line of a rank. `at`: time.perf_counter() at the arrival of its text. whole: not cut, and valid UTF-8."""

    rank: int
    error: bool
    text: str
    at: float
    whole: bool = True


@dataclass
class _Stream:
    rank: int
    error: bool
    path: Path
    descriptor: int
    unfinished: bytearray = field(default_factory=bytearray)
    cut: bool = False
    at: float = 0.0
    """Arrival of the unfinished line's last byte: a progress bar ends a line when it begins the next."""


class RankLog:
    """A log of bounded size: its beginning is written at once, its end when the rank has ended."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = path.open("ab")
        self._written = 0
        self._tail = bytearray()
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Take what the rank has printed. A full disk loses the log and nothing else."""
        room = HEAD_BYTES - self._written
        if room > 0 and self._file is not None:
            with suppress(OSError):
                self._file.write(data[:room])
                self._file.flush()
            self._written += min(room, len(data))
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * TAIL_BYTES:
            self._left_out += len(self._tail) - TAIL_BYTES
            del self._tail[:-TAIL_BYTES]

    def close(self) -> None:
        """Write the end, with the number of bytes between."""
        if self._file is None:
            return
        with suppress(OSError):
            if self._left_out:
                self._file.write(f"\n[... {self._left_out:,} bytes left out ...]\n".encode())
            self._file.write(self._tail)
        with suppress(OSError):
            self._file.close()
        self._file = None


class Outputs:
    """Pipes of all ranks of this node, their logs, and the last of what each said."""

    def __init__(self, folder: Path, ranks: Iterable[int], log_of: Callable[[int], Path], by_line: bool = True) -> None:
        self._by_line = by_line
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        self.logs = {rank: RankLog(log_of(rank)) for rank in ranks}
        self.tails = {rank: bytearray() for rank in self.logs}
        self.standard = {rank: bytearray() for rank in self.logs}
        """The end of each rank's standard output, for a JSON document."""
        self.last_at = time.monotonic()
        for rank in self.logs:
            for name in ("out", "err"):
                path = folder / f"{name}_{rank}"
                os.mkfifo(path, 0o600)
                # For reading and writing: it never blocks, and never ends while no rank has opened it.
                stream = _Stream(rank, name == "err", path, os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                self._streams.append(stream)
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def __enter__(self) -> "Outputs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for stream in self._streams:
            with suppress(OSError):
                os.close(stream.descriptor)
            stream.path.unlink(missing_ok=True)
        self._selector.close()
        for log in self.logs.values():
            log.close()

    def read(self, wait_seconds: float, limit_seconds: float = 0.5) -> Iterator[Line]:
        """Lines that have come, waiting so long for the first; returns after the limit however much is printed."""
        until = time.monotonic() + limit_seconds
        ready = self._selector.select(wait_seconds)
        while ready and time.monotonic() < until:
            for key, _ in ready:
                yield from self._take(key.data)
            ready = self._selector.select(0)

    def rest(self) -> Iterator[Line]:
        """What is still in the pipes after the ranks have ended, the last unfinished lines included."""
        yield from self.read(0.0, limit_seconds=10.0)
        for stream in self._streams:
            if stream.unfinished:
                yield _line(stream, bytes(stream.unfinished), stream.at)
                stream.unfinished.clear()

    def _take(self, stream: _Stream) -> Iterator[Line]:
        try:
            data = os.read(stream.descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return
        at = time.perf_counter()
        self.last_at = time.monotonic()
        self.logs[stream.rank].add(data)
        _keep_last(self.tails[stream.rank], data, _TAIL_FOR_SIGNS)
        if not stream.error:
            _keep_last(self.standard[stream.rank], data, TAIL_BYTES)
        if not self._by_line:
            return
        *lines, rest = re.split(rb"[\r\n]", bytes(stream.unfinished) + data)
        came_at = stream.at if data[0] in b"\r\n" else at
        for line in lines:
            if line or stream.cut:
                yield _line(stream, line, came_at)
            stream.cut, came_at = False, at
        if len(rest) > MAX_LINE_BYTES:
            stream.cut, rest = True, rest[-MAX_LINE_BYTES:]
        stream.unfinished, stream.at = bytearray(rest), at


def _line(stream: _Stream, data: bytes, at: float) -> Line:
    whole = not stream.cut and len(data) <= MAX_LINE_BYTES
    try:
        text = data[:MAX_LINE_BYTES].decode()
    except UnicodeDecodeError:
        text, whole = data[:MAX_LINE_BYTES].decode("utf-8", "replace"), False
    return Line(stream.rank, stream.error, _ESCAPES.sub("", text), at, whole)


def _keep_last(buffer: bytearray, data: bytes, size: int) -> None:
    buffer += data
    if len(buffer) > 2 * size:
        del buffer[:-size]
