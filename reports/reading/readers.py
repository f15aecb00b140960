"""Read all records of a run folder, with a second process for large folders.

    cells = read_cells(cell_folders(run.records, plan.repeats), run.folder)

The second process is a fresh interpreter that runs `serve` (not a fork, which may not be made beside
Prefect's threads, and not multiprocessing, which would import the caller's main module again). It gets
every second folder on its standard input and answers with pickles on its standard output. Where it fails,
its share is read here, so the result, errors included, is the same with and without it.
"""

import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reports.reading.collecting import uncollected
from reports.reading.read import CellFolder, CellReadings, read_cell

SECOND_READER_RECORDS = 2000
"""From so many records on the second process is worth its start, about half a second."""

_CHUNK = 64  # folders in one pickle: strings that repeat are sent once, and neither side holds all of it twice


@dataclass(frozen=True)
class _Failed:
    """Where a share ended, and why."""

    position: int
    error: ValueError


def read_cells(folders: list[CellFolder], run: Path) -> list[CellReadings]:
    """The readings of each folder, in order. Raises the error of the first file that cannot be read."""
    many = sum(len(folder.names) for folder in folders) >= SECOND_READER_RECORDS
    if not many or len(os.sched_getaffinity(0)) < 2:
        return [read_cell(folder, run) for folder in folders]
    try:
        second = _Second(folders[1::2], run)
    except OSError:  # no interpreter where this one was started from, or no room for a process
        return [read_cell(folder, run) for folder in folders]
    with second, uncollected():
        own = list(_share(folders[0::2], run))
        other = second.answer()
    if other is None:
        other = list(_share(folders[1::2], run))
    failed = [
        (2 * item.position + offset, item.error)
        for offset, items in enumerate((own, other))
        for item in items
        if isinstance(item, _Failed)
    ]
    if failed:
        raise min(failed, key=lambda pair: pair[0])[1]
    merged: list[CellReadings] = [None] * len(folders)  # type: ignore[list-item]
    merged[0::2], merged[1::2] = own, other  # type: ignore[assignment]
    return merged


def _share(folders: list[CellFolder], run: Path) -> Iterator[CellReadings | _Failed]:
    """Each folder's readings; ends with `_Failed` where a file cannot be read."""
    for position, folder in enumerate(folders):
        try:
            yield read_cell(folder, run)
        except ValueError as error:
            yield _Failed(position, error)
            return


class _Second:
    """The second process; it is ended when the `with` block is left early."""

    def __init__(self, folders: list[CellFolder], run: Path) -> None:
        # -P: a folder named `reports` where the user stands must not be taken for ours.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from reports.reading.readers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._expected = len(folders)
        self._items: list[CellReadings | _Failed] | None = None
        self._question = pickle.dumps((folders, run))
        self._listener = threading.Thread(target=self._listen, name="second reader", daemon=True)

    def __enter__(self) -> None:
        self._listener.start()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._listener.join()
        self._process.wait()

    def answer(self) -> list[CellReadings | _Failed] | None:
        """What it read, once it is done; None where it did not come to an end."""
        self._listener.join()
        return self._items

    def _listen(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        items: list[CellReadings | _Failed] = []
        with self._process.stdin as question, self._process.stdout as answer:
            try:
                question.write(self._question)
                question.close()
                while size := answer.read(8):
                    items += pickle.loads(answer.read(int.from_bytes(size, "big")))
            except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError):
                return  # it was ended in the midst of a pickle
        if len(items) == self._expected or (items and isinstance(items[-1], _Failed)):
            self._items = items


def serve() -> None:
    """The second process: folders in, pickles of their readings out."""
    gc.disable()
    folders, run = pickle.loads(sys.stdin.buffer.read())
    chunk: list[CellReadings | _Failed] = []
    for item in _share(folders, run):
        chunk.append(item)
        if len(chunk) == _CHUNK:
            _send(chunk)
            chunk = []
    _send(chunk)


def _send(chunk: list[CellReadings | _Failed]) -> None:
    content = pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
    sys.stdout.buffer.write(len(content).to_bytes(8, "big") + content)
    sys.stdout.buffer.flush()
