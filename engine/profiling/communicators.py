"""Record operations of our communicators in a profiled region: shared memory has no event in torch's profiler.

with Listening(context.communicators) as listening:
    ...
reported = listening.collectives(region_began)      # perf_counter at the region's begin
"""

import threading
from collections import defaultdict
from types import TracebackType

from engine.parallel.communicator import CommunicationEvent, Communicator, Communicators, Listener
from engine.profiling.collectives import NO_GROUP, RecordedCollective, group_of


class Listening:
    """Listen to every group of a rank within the context."""

    def __init__(self, communicators: Communicators) -> None:
        everyone = (communicators.tensor, communicators.pipeline, communicators.data, communicators.world)
        self._communicators: dict[int, Communicator] = {id(one): one for one in everyone if one.size > 1}
        self._heard: list[tuple[Communicator, CommunicationEvent]] = []
        self._thread = 0

    def __enter__(self) -> "Listening":
        self._thread = threading.get_native_id()
        for communicator in self._communicators.values():
            communicator.listener = self._ear(communicator)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for communicator in self._communicators.values():
            communicator.listener = None

    def _ear(self, communicator: Communicator) -> Listener:
        return lambda event: self._heard.append((communicator, event))

    def collectives(self, region_began: float) -> list[RecordedCollective]:
        """Return the recorded operations, numbered within each group; seconds since `region_began` (perf_counter)."""
        counts: dict[int, int] = defaultdict(int)
        found = []
        for communicator, event in self._heard:
            if event.began < region_began:
                continue
            group = _group(communicator, event)
            found.append(
                RecordedCollective(
                    operation=event.operation,
                    group=group,
                    sequence=counts[group],
                    size_bytes=event.size_bytes,
                    began=event.began - region_began,
                    ended=event.ended - region_began,
                    thread=self._thread,
                    on_device=communicator.transport == "nccl",
                )
            )
            counts[group] += 1
        return found


def _group(communicator: Communicator, event: CommunicationEvent) -> int:
    """Return the group: collectives by their ranks; transfers by direction, which is known in a group of two ranks."""
    if event.operation not in ("send", "receive"):
        return group_of(*event.ranks)
    if communicator.size > 2:
        return NO_GROUP
    mine, other = event.ranks[communicator.index], event.ranks[1 - communicator.index]
    source, target = (mine, other) if event.operation == "send" else (other, mine)
    return group_of(source, "to", target)
