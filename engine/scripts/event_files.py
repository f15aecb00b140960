"""TensorBoard event files: the scalars of one tag, read by the format itself and within bounds.

    scalars(folder, "train/loss")          # [(step, wall_time, value), ...]
    last = LastStep(folder, "train/loss"); last.look()    # while it is written: only what is new is read

An event file is a sequence of records (length, CRC, bytes, CRC; https://www.tensorflow.org/tutorials/load_data/tfrecord)
of the protocol buffer Event (tensorflow/core/util/event.proto): wall_time 1, step 2, summary 5; Summary.Value has
tag 1, simple_value 2 and tensor 8 (summary.proto), as SummaryWriter of torch writes it. TensorBoard's own reader needs
TensorBoard on the node and has no bounds.
"""

import os
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from configs.common.files.reading import open_regular
from engine.scripts.series import StepSeries

_MAX_RECORD = 16 << 20
"""Of an event with scalars; larger ones, such as videos, are passed over unread."""
_MAX_FILES = 200
_FLOAT_TENSOR, _DOUBLE_TENSOR = 1, 2

LoggedScalar = tuple[int, float, float]


def scalars(folder: Path, tag: str, earlier: Collection[Path] = ()) -> list[LoggedScalar]:
    """(step, seconds since the epoch, value) of a tag in all event files below a folder, in order of step.

    earlier: files that are left out.
    """
    found: dict[int, LoggedScalar] = {}
    for path in _event_files(folder, earlier):
        with suppress(OSError, ValueError, struct.error, IndexError):
            for _, written in _events(path):
                for step, at, name, value in written:
                    if name == tag:
                        found.setdefault(step, (step, at, value))
    return [found[step] for step in sorted(found)]


class LastStep:
    """Count the steps of a tag in event files that are being written. Each look reads on where the one before ended.

    Files that are there at the beginning, `earlier`, are of another run and left out.
    """

    def __init__(self, folder: Path, tag: str) -> None:
        self._folder, self._tag, self.earlier = folder, tag, frozenset(_all_files(folder))
        self._read: dict[Path, int] = {}
        self._steps: tuple[int, int] | None = None

    def look(self) -> int:
        """Return the steps from the first scalar to the last so far, whatever the number that the script began at."""
        for path in _event_files(self._folder, self.earlier):
            with suppress(OSError, ValueError, struct.error, IndexError):
                for end, written in _events(path, self._read.get(path, 0)):
                    self._read[path] = end
                    steps = [*(self._steps or ()), *(step for step, _, name, _ in written if name == self._tag)]
                    self._steps = (min(steps), max(steps)) if steps else None
        return 0 if self._steps is None else self._steps[1] - self._steps[0]


def _all_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*tfevents*") if not path.is_symlink())


def _event_files(folder: Path, earlier: Collection[Path]) -> list[Path]:
    return [path for path in _all_files(folder) if path not in earlier][:_MAX_FILES]


def series_of_events(folder: Path, tag: str, loss_tag: str | None, earlier: Collection[Path] = ()) -> StepSeries:
    """Steps between the scalars: each lasts from the one before, divided by the steps between."""
    series = StepSeries()
    points = scalars(folder, tag, earlier)
    loss_of = {step: value for step, _, value in (scalars(folder, loss_tag, earlier) if loss_tag else [])}
    if loss_tag is None and tag.lower().endswith("loss"):
        loss_of = {step: value for step, _, value in points}
    for (before, began, _), (step, ended, _) in pairwise(points):
        count = step - before
        for _ in range(min(count, 100_000)):
            series.add(max(0.0, ended - began) / count, None, loss_of.get(step))
    return series


def _events(path: Path, start: int = 0) -> Iterator[tuple[int, list[tuple[int, float, str, float]]]]:
    """(where the event ends in the file, its scalars) of each event that is whole, from byte `start` on."""
    with open_regular(path) as file:
        file.seek(start)
        while len(head := file.read(12)) == 12:
            (size,) = struct.unpack_from("<Q", head)
            if size + 4 > os.fstat(file.fileno()).st_size - file.tell():
                return  # it is being written, or damaged
            if size > _MAX_RECORD:
                file.seek(size + 4, os.SEEK_CUR)
                yield file.tell(), []
                continue
            data = file.read(size)
            if len(data) < size or len(file.read(4)) < 4:
                return
            yield file.tell(), list(_scalars_of(data))


def _scalars_of(event: bytes) -> Iterator[tuple[int, float, str, float]]:
    at, step, values = 0.0, 0, []
    for field, wire, content in _fields(event):
        if field == 1 and wire == 1:
            (at,) = struct.unpack("<d", content)
        elif field == 2 and wire == 0:
            step = int.from_bytes(content, "little")
        elif field == 5 and wire == 2:
            values += [inner for number, kind, inner in _fields(content) if (number, kind) == (1, 2)]
    for value in values:
        name, number = "", None
        for field, wire, content in _fields(value):
            if field == 1 and wire == 2:
                name = content.decode("utf-8", "replace")
            elif field == 2 and wire == 5:
                (number,) = struct.unpack("<f", content)
            elif field == 8 and wire == 2:
                number = _tensor(content)
        if name and number is not None:
            yield step, at, name, number


def _tensor(data: bytes) -> float | None:
    """A scalar of TensorProto: dtype 1, tensor_content 4, float_val 5, double_val 6."""
    kind, found = _FLOAT_TENSOR, None
    for field, wire, content in _fields(data):
        if field == 1 and wire == 0:
            kind = int.from_bytes(content, "little")
        elif field in (4, 5, 6) and len(content) in (4, 8):
            double = field == 6 or (field == 4 and kind == _DOUBLE_TENSOR)
            found = struct.unpack("<d" if double and len(content) == 8 else "<f", content[: 8 if double else 4])[0]
    return found


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(field, wire type, bytes) of a message; a varint as 8 bytes, little-endian. Raises ValueError, IndexError."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        wire = key & 7
        if wire == 0:
            value, place = _varint(data, place)
            content = (value & (2**64 - 1)).to_bytes(8, "little")
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            content, place = data[place : place + size], place + size
        elif wire == 2:
            size, place = _varint(data, place)
            content, place = data[place : place + size], place + size
        else:
            raise ValueError(f"wire type {wire}")
        yield key >> 3, wire, content


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 64 bits")
