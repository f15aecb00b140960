"""Individual collectives of a profiled region, from request to completion.

    found = collectives(events, reported)

There are three sources: our communicators report their operations (shared memory has no event in the profiler), and
torch names requested collectives (`c10d::allreduce_`) and executed ones (`gloo:all_reduce`). The last two are one
collective, from the first's start to the second's end; both are dropped while one of our communicators reports the
same. On a GPU the kernel counts.
"""

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.profiling.events import ProfilerEvent

CollectiveColumns = dict[str, np.ndarray]

NO_GROUP = 0
"""Group of a collective that cannot be matched with its counterpart on another rank."""


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective, or one transfer from rank to rank, on this rank. Seconds since the region began.

    `group` (`group_of`) and `sequence`, from 0, are the same on all ranks that took part. `thread` is the blocked
    thread, or None. `on_device`: times are of the submission to the device, not of the work.
    """

    operation: str
    group: int
    sequence: int
    size_bytes: int | None
    began: float
    ended: float
    thread: int | None = None
    on_device: bool = False


def group_of(*names: object) -> int:
    """Return a number for a group's key (ranks, direction, operation), the same on every rank; never 0."""
    return zlib.crc32(repr(names).encode()) or 1


def collectives(events: Sequence[ProfilerEvent], reported: Sequence[RecordedCollective]) -> list[RecordedCollective]:
    """Return all collectives of the region in order of their start."""
    blocking = [item for item in reported if not item.on_device]
    of_device = sorted((event for event in events if event.on_device and event.is_communication), key=_began)
    seen = [event for event in events if (event.is_requested or event.is_executed) and not event.on_device]
    seen = _unreported(sorted(seen, key=_began), blocking)
    if any(event.on_device for event in events):
        seen = [event for event in seen if event.is_executed]  # submission to a GPU does not block
    found = [
        *blocking,
        *_of_device(of_device, [item for item in reported if item.on_device]),
        *_numbered(_paired(seen)),
    ]
    return sorted(found, key=lambda item: item.began)


def columns(found: Sequence[RecordedCollective]) -> CollectiveColumns:
    """Return one-dimensional columns, an entry for each collective; unknown sizes are -1 (a column of integers)."""
    return {
        "collective_operation": np.array([item.operation for item in found], dtype=np.str_),
        "collective_group": np.array([item.group for item in found], dtype=np.int64),
        "collective_sequence": np.array([item.sequence for item in found], dtype=np.int64),
        "collective_bytes": np.array(
            [-1 if item.size_bytes is None else item.size_bytes for item in found], dtype=np.int64
        ),
        "collective_began_seconds": np.array([item.began for item in found], dtype=np.float64),
        "collective_seconds": np.array([item.ended - item.began for item in found], dtype=np.float64),
    }


def _began(event: ProfilerEvent) -> float:
    return event.began


def _unreported(seen: list[ProfilerEvent], reported: Sequence[RecordedCollective]) -> list[ProfilerEvent]:
    """Drop events that began during an operation of our communicators, which is reported separately."""
    if not reported:
        return seen
    begins = np.array(sorted(item.began for item in reported))
    ends = np.array([item.ended for item in sorted(reported, key=lambda item: item.began)])
    kept = []
    for event in seen:
        place = int(np.searchsorted(begins, event.began, side="right")) - 1
        if place < 0 or event.began >= ends[place]:
            kept.append(event)
    return kept


def _paired(seen: list[ProfilerEvent]) -> list[RecordedCollective]:
    """Join executed collectives with their requests, which gloo's threads begin in order.

    Each with the first request before it that it may be of, else with none: gloo has no event for some.
    """
    waiting = [event for event in seen if not event.is_executed]
    pairs: list[tuple[ProfilerEvent | None, ProfilerEvent | None]] = []
    for done in (event for event in seen if event.is_executed):
        asked = next((event for event in waiting if event.began <= done.began and _may_be_of(done, event)), None)
        if asked is not None:
            waiting.remove(asked)
        pairs.append((asked, done))
    return [_joined(*pair) for pair in [*pairs, *((event, None) for event in waiting)]]


def _may_be_of(done: ProfilerEvent, asked: ProfilerEvent) -> bool:
    """Whether an executed collective may be of a request: `allgather` of `allgatherbase`.

    gloo sums whole tensors where parts were asked for (torch 2.13, ProcessGroupGloo's reduce_scatter).
    """
    executed, requested = _operation(done), _operation(asked)
    return requested.startswith(executed) or (executed == "allreduce" and requested.startswith("reducescatter"))


def _joined(asked: ProfilerEvent | None, done: ProfilerEvent | None) -> RecordedCollective:
    first = asked or done
    assert first is not None
    last = done or first
    size = last.size_bytes if last.size_bytes is not None else first.size_bytes
    operation = _operation(done or first)
    return RecordedCollective(operation, NO_GROUP, 0, size, first.began, max(first.ended, last.ended))


def _operation(event: ProfilerEvent) -> str:
    """Return `allreduce` for `c10d::allreduce_`, `gloo:all_reduce` and `ncclDevKernel_AllReduce_Sum_f32_RING_LL`."""
    if event.on_device:
        return event.name.removeprefix("ncclDevKernel_").removeprefix("ncclKernel_").partition("_")[0].lower()
    return event.name.rpartition(":")[2].replace("_", "")


def _of_device(kernels: list[ProfilerEvent], reported: list[RecordedCollective]) -> list[RecordedCollective]:
    """Join kernels with the reports of our communicators, if there are as many of both; else return kernels alone."""
    if len(kernels) == len(reported):
        pairs = zip(kernels, reported, strict=True)
        return [replace(item, began=kernel.began, ended=kernel.ended) for kernel, item in pairs]
    found = [
        RecordedCollective(_operation(event), NO_GROUP, 0, event.size_bytes, event.began, event.ended)
        for event in kernels
    ]
    return _numbered(found)


def _numbered(found: list[RecordedCollective]) -> list[RecordedCollective]:
    """Number collectives of the same operation in sequence. Correct if all are of one group of all ranks."""
    counts: dict[str, int] = defaultdict(int)
    numbered = []
    for item in sorted(found, key=lambda item: item.began):
        numbered.append(replace(item, group=group_of(item.operation), sequence=counts[item.operation]))
        counts[item.operation] += 1
    return numbered
