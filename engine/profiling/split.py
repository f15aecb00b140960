"""The wall time of a profiled region, split into compute, communication and idle. Pure arithmetic.

    found = split(wall_seconds, events, collectives(events, reported))
    found.compute_share + found.exposed_communication_share + found.idle_share      # 1

All times are lengths of merged intervals, never sums: what overlaps counts once. Compute is when an operator (on a
GPU: a kernel) was running, less what a thread spent inside of a collective, since it then waits. Communication is
when at least one collective was in flight, waiting for late ranks included; exposed is what of it no compute covers.
Idle is the rest: the interpreter, launches, and whatever the profiler cannot see.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.intervals import Intervals, difference, intersection, intervals, length, union
from engine.profiling.collectives import Collective
from engine.profiling.events import Event


@dataclass(frozen=True)
class Split:
    """Seconds of one region on one rank. `communication_seconds` overlaps with compute, the other three sum up."""

    wall_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float

    @property
    def compute_share(self) -> float:
        """Share of the wall time in which work was done."""
        return self.compute_seconds / self.wall_seconds

    @property
    def communication_share(self) -> float:
        """Share in which a collective was in flight, hidden behind compute or not."""
        return self.communication_seconds / self.wall_seconds

    @property
    def exposed_communication_share(self) -> float:
        """Share in which a collective was in flight and nothing was computed."""
        return self.exposed_communication_seconds / self.wall_seconds

    @property
    def idle_share(self) -> float:
        """Share in which neither was."""
        return 1.0 - self.compute_share - self.exposed_communication_share


def split(wall_seconds: float, events: Sequence[Event], found: Sequence[Collective]) -> Split:
    """Split a region of `wall_seconds` that began at 0."""
    assert wall_seconds > 0
    region = intervals([(0.0, wall_seconds)])
    communication = intersection(_communication(events, found), region)
    compute = intersection(_compute(events, found), region)
    return Split(
        wall_seconds=wall_seconds,
        compute_seconds=length(compute),
        communication_seconds=length(communication),
        exposed_communication_seconds=length(difference(communication, compute)),
    )


def _communication(events: Sequence[Event], found: Sequence[Collective]) -> Intervals:
    """When a collective was in flight, or a thread waited for one; on a GPU what a CPU asks for is neither."""
    waits = [] if _on_gpu(events) else [event for event in events if event.is_waiting and event.is_communication]
    return union(_spans(found), _spans(waits))


def _compute(events: Sequence[Event], found: Sequence[Collective]) -> Intervals:
    """When the device worked; without one, when a thread was in an operator and not in a collective."""
    if _on_gpu(events):
        return union(_spans(event for event in events if event.on_device and event.is_compute))
    operators: dict[int, list[Event]] = defaultdict(list)
    blocked: dict[int, list[Event | Collective]] = defaultdict(list)
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


def _on_gpu(events: Sequence[Event]) -> bool:
    return any(event.on_device for event in events)


def _spans(items: Iterable[Event | Collective]) -> Intervals:
    return intervals([(item.began, item.ended) for item in items])
