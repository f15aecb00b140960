"""Read the wanted pieces of a checkpoint in sequence, with read-ahead.

    for piece, tensor in read_pieces(files, pieces, local_rank=0, local_ranks=2):
        model[piece.name] = pack(tensor)

The order is that of the files and of the bytes in them, the same on all ranks, so that ranks of one host reuse each
other's reads (`engine.loading.read_ahead`). The consumer may keep a tensor; the memory of a dropped one is reused,
because fresh pages cost more than the copy into them (154 MB from the page cache: 47 ms into fresh memory, 18 ms into
used). A consumer that can use the page cache directly gets its pages (`lend`), without either cost.
"""

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.loading.access import OpenFile
from engine.loading.header import TensorLocation, tensor_locations
from engine.loading.page_cache import state_of
from engine.loading.pieces import Extent, FileRanges, TensorSlice, merged_extents
from engine.loading.read_ahead import ReadAhead
from engine.loading.report import LoadReport

_LEAST_REUSED_BYTES = 64 << 10


def read_pieces(
    files: Iterable[Path],
    pieces: Iterable[TensorSlice],
    *,
    local_rank: int = 0,
    local_ranks: int = 1,
    host_pieces: Iterable[TensorSlice] | None = None,
    read_ahead: bool = True,
    mapped: bool | None = None,
    lend: bool = False,
    report: LoadReport | None = None,
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Yield the pieces in file order, each in the stored dtype, in memory of this process, or with `lend` in pages of
    the page cache (`OpenFile.lend`), columns then as a view of whole rows.

    `local_ranks` ranks of this host call this together, each with its number, to share the reading; `host_pieces` are
    those of all of them (None: together they keep the whole tensors). `mapped`: whether columns are copied out of a
    mapping or cut out of whole rows (None: depending on the file system). Raises ValueError, naming the file, for a
    damaged or missing one and for a tensor or a part of one that is not there.
    """
    files = list(files)
    tensors = tensor_locations(files)
    places = _places(pieces, tensors)
    if report is None:
        report = LoadReport.before(files)
    report.begin(sum(tensor.nbytes for tensor in tensors.values()))
    plan = _plan(files, tensors, places, host_pieces, local_ranks)
    ask = read_ahead and state_of(report.cached_share) != "warm"
    with ReadAhead(plan, local_rank, local_ranks) if ask else nullcontext() as ahead:
        yield from _lend(places, report) if lend else _read(places, plan, ahead, mapped, report)
    report.end()


def _places(pieces: Iterable[TensorSlice], tensors: dict[str, TensorLocation]) -> list[FileRanges]:
    """Return the places of the pieces, in the order of `tensors`."""
    order = {name: number for number, name in enumerate(tensors)}
    places = []
    for piece in pieces:
        if piece.name not in tensors:
            names = ", ".join(sorted({str(tensor.file) for tensor in tensors.values()})) or "no file"
            raise ValueError(f"{names}: tensor {piece.name} is missing")
        places.append(FileRanges.of(piece, tensors[piece.name]))
    return sorted(places, key=lambda place: (order[place.piece.name], place.offset))


def _plan(
    files: Sequence[Path],
    tensors: dict[str, TensorLocation],
    places: Sequence[FileRanges],
    host_pieces: Iterable[TensorSlice] | None,
    local_ranks: int,
) -> list[tuple[Path, list[Extent]]]:
    """Return the extents of each file that the ranks of this host need."""
    extents: dict[Path, list[Extent]] = {path: [] for path in files}
    if host_pieces is not None:
        for place in _places(host_pieces, tensors):
            extents[place.stored.file].append(place.extent)
    for place in places:
        whole = host_pieces is None and local_ranks > 1
        stored = place.stored
        extents[stored.file].append((stored.offset, stored.offset + stored.nbytes) if whole else place.extent)
    return [(path, merged_extents(found)) for path, found in extents.items()]


def _read(
    places: Sequence[FileRanges],
    plan: Sequence[tuple[Path, list[Extent]]],
    ahead: ReadAhead | None,
    mapped: bool | None,
    report: LoadReport,
) -> Iterator[tuple[TensorSlice, Tensor]]:
    memory = _Memory()
    position_of = _positions(plan)
    for path, here in groupby(places, key=lambda place: place.stored.file):
        with OpenFile(path, mapped) as file:
            for place in here:
                if place.nbytes == 0:
                    yield place.piece, torch.empty(place.shape, dtype=place.stored.dtype)
                    continue
                if ahead is not None:
                    ahead.passed(position_of(path, place.offset))
                buffer = memory.take(place.nbytes)
                report.asked_bytes += file.read(place, buffer)
                tensor = torch.from_numpy(buffer).view(place.stored.dtype).view(place.shape)
                del buffer
                yield place.piece, tensor
                del tensor


def _lend(places: Sequence[FileRanges], report: LoadReport) -> Iterator[tuple[TensorSlice, Tensor]]:
    for path, here in groupby(places, key=lambda place: place.stored.file):
        with OpenFile(path) as file:
            for place in here:
                dtype, shape = place.stored.dtype, place.shape
                if place.nbytes == 0:
                    yield place.piece, torch.empty(shape, dtype=dtype)
                    continue
                memory_mapped = torch.from_numpy(file.lend(place)).view(dtype)
                report.asked_bytes += place.nbytes
                yield place.piece, memory_mapped.view(shape) if place.count == 1 else memory_mapped


def _positions(plan: Sequence[tuple[Path, list[Extent]]]) -> Callable[[Path, int], int]:
    """Return a function that counts the plan's bytes before an offset of a file in the plan."""
    numbers = {path: number for number, (path, _) in enumerate(plan)}
    begins = [(number, begin) for number, (_, extents) in enumerate(plan) for begin, _ in extents]
    lengths = (end - begin for _, extents in plan for begin, end in extents)
    before = list(accumulate(lengths, initial=0))

    def position_of(path: Path, offset: int) -> int:
        extent = bisect_right(begins, (numbers[path], offset)) - 1
        return before[extent] + offset - begins[extent][1]

    return position_of


class _Memory:
    """Buffers by size: each is reused once nothing refers to its contents."""

    def __init__(self) -> None:
        self._buffers: defaultdict[int, list[tuple[np.ndarray, weakref.ref[np.ndarray]]]] = defaultdict(list)

    def take(self, nbytes: int) -> np.ndarray:
        """Return bytes [nbytes]; tensors made from the array keep its memory allocated."""
        if nbytes < _LEAST_REUSED_BYTES:
            return np.empty(nbytes, np.uint8)
        known = self._buffers[nbytes]
        free = next((number for number, (_, claim) in enumerate(known) if claim() is None), None)
        memory = np.empty(nbytes, np.uint8) if free is None else known.pop(free)[0]
        claim = memory[:]
        known.append((memory, weakref.ref(claim)))
        # A loop still holds its last tensor when it requests the next: two alternate.
        del known[:-2]
        return claim
