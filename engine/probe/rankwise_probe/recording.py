"""The file of samples of one rank, written by the probe and read by Rankwise's agent.

Layout, little-endian: a header of HEADER bytes, then pages of ROWS rows. Header: magic, number of rows, whether the
device's clock was used, whether the interpreter ended in order, whether the next is given (bytes 16 to 18), number of
rows that the device has ended too (byte 24), names of marks (byte 64). A page has one block of ROWS float64
for each column: begin, end, tokens, loss, device_end, and MARKS own figures. What is not known is NaN. Pages are
allocated before they are mapped, so a full disk raises here and never becomes a SIGBUS in the script.
"""

import atexit
import collections
import json
import mmap
import os
import struct
import sys
import threading
import time

MAGIC = b"RWPROBE1"
HEADER = 65536
ROWS = 8192
MARKS = 8
STEP_COLUMNS = ("begin", "end", "tokens", "loss", "device_end", *["mark_%d" % place for place in range(MARKS)])
PAGE = ROWS * 8 * len(STEP_COLUMNS)
MAX_PAGES = 512
_BEGIN, _END, _TOKENS, _LOSS, _DEVICE, _FIRST_MARK = range(6)
_NAN = float("nan")
_UNKNOWN = struct.pack("<Q", 0x7FF8525750524F42)  # bits of a NaN that stands for a loss that nobody told
_FLOAT = struct.Struct("<d")
_COUNT = struct.Struct("<Q")
_PENDING = 64
_WHOLE = 24  # place of the number of rows that the device has ended, with all their values
_BASE_SECONDS = 10.0  # CUDA gives the time between events as float32 milliseconds: 1 us apart after 10 s, 4 ms in hours


class StepRecorder:
    """Writes rows. Each process has a file of its own: a fork or a second process of a rank does not mix into it."""

    def __init__(self, folder):
        rank = os.environ.get("RANK") or os.environ.get("RANKWISE_RANK") or "0"
        self._path = os.path.join(folder, "rank_%d.%d.samples" % (int(rank), os.getpid()))
        self._pid = os.getpid()
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.posix_fallocate(self._descriptor, 0, HEADER)
        self._header = mmap.mmap(self._descriptor, HEADER)
        self._header[:16] = MAGIC + _COUNT.pack(0)
        self._header[18:19] = b"\x01"
        self._lock = threading.Lock()
        self._pages = []
        self._names = {}
        self._rows = 0
        self._last = _NAN
        self._device = None
        self._pending = collections.deque()
        self._full = False
        self._grow()
        atexit.register(self._finish)

    def step(self, now, tokens, loss):
        """Keep a row that ends now and began where the last one ended."""
        if os.getpid() != self._pid or self._full:
            return StepContext(self, None, now, tokens)
        with self._lock:
            row = self._row(self._last, now, tokens)
            self._last = now
        self._after(row, tokens, loss)
        return StepContext(self, row, now, tokens)

    def finish(self, row, begin, tokens, loss):
        """Complete the row of a `with` block: it began when the block did."""
        now = time.perf_counter()
        if os.getpid() != self._pid or self._full or row is None:
            return
        with self._lock:
            row = self._row(begin, now, tokens)
            self._last = now
        self._after(row, tokens, loss)

    def retract(self, row):
        """Take back the row of a call that turned out to begin a `with` block."""
        with self._lock:
            if row is not None and row == self._rows - 1:
                self._rows = row
                if self._pending and self._pending[-1][0] == row:
                    self._pending.pop()
                self._count()

    def set_loss(self, loss):
        """Set the loss of the last row, where it is known after the step."""
        if self._rows and not self._full and os.getpid() == self._pid:
            self._put_loss(self._rows - 1, loss)

    def mark(self, name, value):
        """Keep a figure of the current step, that is of the next row that ends."""
        if os.getpid() != self._pid or self._full:
            return
        name = str(name)[:60]
        with self._lock:
            place = self._names.get(name)
            if place is None:
                if len(self._names) == MARKS:
                    return
                place = self._names[name] = len(self._names)
                self._header[64:HEADER] = json.dumps(list(self._names)).encode().ljust(HEADER - 64)[: HEADER - 64]
            row, column = self._rows, _FIRST_MARK + place
            if not _on_gpu(value):
                self._put(row, column, _number(value))
                return
        try:
            cuda = sys.modules["torch"].cuda
            if not cuda.is_current_stream_capturing():
                self._later(cuda.Event(), row, False, [(column, value)])
        except Exception:
            self._pending.clear()
        finally:
            self._count()

    def _row(self, begin, end, tokens):
        row = self._rows
        self._put(row, _BEGIN, begin)
        self._put(row, _END, end)
        self._put(row, _TOKENS, _NAN if tokens is None or _on_gpu(tokens) else _number(tokens))
        page, place = divmod(row, ROWS)
        if page < len(self._pages):
            at = 8 * (_LOSS * ROWS + place)
            self._pages[page][at : at + 8] = _UNKNOWN
        self._put(row, _DEVICE, _NAN)
        self._rows = row + 1
        if self._rows == ROWS * len(self._pages):  # not again for a row that was taken back
            self._grow()
        return row

    def _after(self, row, tokens, loss):
        """Loss and device time, at once where they are known and later where the device still works."""
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        on_device = cuda is not None and getattr(cuda, "is_initialized", bool)()
        if not _on_gpu(loss):
            self._put_loss(row, loss)
        try:
            if not on_device or cuda.is_current_stream_capturing():
                return
            if self._device is None:
                cuda.current_stream().synchronize()  # once: places the device's clock against this machine's
                base = cuda.Event(enable_timing=True)
                base.record()
                base.synchronize()
                self._device = (base, time.perf_counter())
                self._header[16:17] = b"\x01"
            values = [(column, value) for column, value in ((_TOKENS, tokens), (_LOSS, loss)) if _on_gpu(value)]
            self._later(cuda.Event(enable_timing=True), row, True, values)
        except Exception:
            self._pending.clear()
        finally:
            self._count()

    def _later(self, event, row, timed, values):
        """Keep what the device has not computed yet. timed: the row's step ends at the event.

        Values are copied into pinned memory in the order of the stream: to read one where it lies would wait for all
        work of the stream, and a CUDA graph or an accumulator writes to the same memory again.
        """
        copies = []
        for column, value in values:
            try:
                if value.numel() == 1:
                    copies.append((column, value.detach().to("cpu", non_blocking=True)))
            except Exception:
                continue
        event.record()
        self._pending.append((row, event, timed, copies))
        self._settle(row - _PENDING)

    def _settle(self, last=-1):
        """Read events that have passed; waits for those of rows up to the last."""
        while self._pending and (self._pending[0][0] <= last or self._pending[0][1].query()):
            row, event, timed, values = self._pending.popleft()
            event.synchronize()
            if timed:
                base, began = self._device
                passed = base.elapsed_time(event) / 1000.0
                self._put(row, _DEVICE, began + passed)
                if passed > _BASE_SECONDS:
                    self._device = (event, began + passed)
            for column, value in values:
                if column == _LOSS:
                    self._put_loss(row, value)
                else:
                    self._put(row, column, _number(value))

    def _finish(self):
        """At the script's end, read what is left."""
        if os.getpid() != self._pid:
            return
        self._header[17:18] = b"\x01"
        try:
            self._settle(self._rows)
        except Exception:
            self._pending.clear()
        self._count()

    def _put_loss(self, row, loss):
        """Keep a loss; one that is no number stays unknown, since NaN would say that training failed."""
        try:
            if loss is not None:
                self._put(row, _LOSS, float(_host(loss)))
        except Exception:
            return

    def _put(self, row, column, value):
        page, place = divmod(row, ROWS)
        if page < len(self._pages):
            _FLOAT.pack_into(self._pages[page], 8 * (column * ROWS + place), value)

    def _count(self):
        _COUNT.pack_into(self._header, 8, self._rows)
        _COUNT.pack_into(self._header, _WHOLE, self._pending[0][0] if self._pending else self._rows)

    def _grow(self):
        """Allocate and map the next page."""
        if len(self._pages) == MAX_PAGES:
            self._full = True
            return
        offset = HEADER + PAGE * len(self._pages)
        try:
            os.posix_fallocate(self._descriptor, offset, PAGE)
            page = mmap.mmap(self._descriptor, PAGE, offset=offset)
        except OSError as error:
            self._full = True
            os.write(2, ("rankwise_probe: no more samples are kept: %s\n" % error).encode("utf-8", "replace"))
            return
        page[8 * ROWS * _FIRST_MARK :] = _FLOAT.pack(_NAN) * (ROWS * MARKS)
        self._pages.append(page)


class StepContext:
    """What a call returns: nothing needs to be done with it, unless it is used as a context manager."""

    __slots__ = ("_begin", "_given", "_recorder", "_row", "loss", "tokens")

    def __init__(self, recorder, row, begin, tokens):
        self._recorder, self._row, self._begin, self._given = recorder, row, begin, tokens
        self.loss = None
        self.tokens = None

    def __enter__(self):
        recorder = self._recorder
        if self._row is not None:
            self.tokens = self._given
            recorder.retract(self._row)
        self._begin = time.perf_counter()
        return self

    def __exit__(self, kind, error, traceback):
        if kind is None:
            self._recorder.finish(self._row, self._begin, self.tokens, self.loss)


def _number(value):
    """A number of anything like one; NaN for what is none. Reading a tensor of a GPU waits for it."""
    try:
        return float(_host(value))
    except Exception:
        return _NAN


def _on_gpu(value):
    return getattr(value, "is_cuda", False) is True


def _host(value):
    return value.detach() if hasattr(value, "detach") else value
