"""Split the wall time of a profiled region into compute, communication and idle. Pure arithmetic.

    found = split_region(wall_seconds, events, collectives(events, reported))
    found.compute_share + found.exposed_communication_share + found.idle_share      # 1

All times are lengths of merged intervals, never sums: overlaps count once. Compute: an operator (on a GPU: a kernel)
was running, minus a thread's time inside a collective, since it then waits. Communication: at least one collective was
active, including waiting for late ranks; exposed communication is the part without concurrent compute. Idle is the
rest: the interpreter, launches, and everything invisible to the profiler.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.common.intervals import Intervals, difference, intersection, intervals, length, union
from engine.profiling.collectives import RecordedCollective
from engine.profiling.events import ProfilerEvent


@dataclass(frozen=True)
class RegionSplit:
    """Seconds of one region on one rank. `communication_seconds` overlaps with compute; the other three add up."""

    wall_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float

    @property
    def compute_share(self) -> float:
        """Share of the wall time with compute."""
        return self.compute_seconds / self.wall_seconds

    @property
    def communication_share(self) -> float:
        """Share with an active collective, hidden behind compute or not."""
        return self.communication_seconds / self.wall_seconds

    @property
    def exposed_communication_share(self) -> float:
        """Share with an active collective and no compute."""
        return self.exposed_communication_seconds / self.wall_seconds

    @property
    def idle_share(self) -> float:
        """Share with neither."""
        return 1.0 - self.compute_share - self.exposed_communication_share


def split_region(
    wall_seconds: float, events: Sequence[ProfilerEvent], found: Sequence[RecordedCollective]
) -> RegionSplit:
    """Split a region of `wall_seconds` that began at 0."""
    assert wall_seconds > 0
    region = intervals([(0.0, wall_seconds)])
    communication = intersection(_communication(events, found), region)
    compute = intersection(_compute(events, found), region)
    return RegionSplit(
        wall_seconds=wall_seconds,
        compute_seconds=length(compute),
        communication_seconds=length(communication),
        exposed_communication_seconds=length(difference(communication, compute)),
    )


def _communication(events: Sequence[ProfilerEvent], found: Sequence[RecordedCollective]) -> Intervals:
    """Return the intervals in which a collective was active, or a thread waited for one; not CPU requests to a GPU."""
    waits = [] if _on_gpu(events) else [event for event in events if event.is_waiting and event.is_communication]
    return union(_spans(found), _spans(waits))


def _compute(events: Sequence[ProfilerEvent], found: Sequence[RecordedCollective]) -> Intervals:
    """Return the intervals in which the device worked; without one, a thread in an operator outside of a collective."""
    if _on_gpu(events):
        return union(_spans(event for event in events if event.on_device and event.is_compute))
    operators: dict[int, list[ProfilerEvent]] = defaultdict(list)
    blocked: dict[int, list[ProfilerEvent | RecordedCollective]] = defaultdict(list)
    for event in events:
        if event.is_communication:
            blocked[event.thread].append(event)
        elif event.is_compute:
            operators[event.thread].append(event)
    for item in found:
        if item.thread is not None:
            blocked[item.thread].append(item)
    return union(
        *(difference(_spans(members), _spans(blocked.get(thread, []))) for thread, members in operators.items())
    )


def _on_gpu(events: Sequence[ProfilerEvent]) -> bool:
    return any(event.on_device for event in events)


def _spans(items: Iterable[ProfilerEvent | RecordedCollective]) -> Intervals:
    return intervals([(item.began, item.ended) for item in items])
