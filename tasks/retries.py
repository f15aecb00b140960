"""What becomes of the visits of a launch that ended without them: tried again, or given up. No Prefect here.

    outcome = retries.after(collected, target)
    outcome.again                       # visits for a fresh launch
    outcome.given_up                    # visits that get a record with outcome.status and outcome.message

A visit that never began goes on in another launch: whoever ended this one has its record. A launch that ended
before its first visit is tried again a bounded number of times. On a cluster so is a visit that was lost to a
node, to a preemption or with its whole launch: as a further attempt, whose record stands beside the earlier one's.
Training that keeps checkpoints is tried again wherever a rank was lost, since the next attempt goes on from the last
one. What memory, time or the ranks' own exception ended would end so again, and what somebody cancelled was meant to.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.job import JobEnd, Visit
from configs.packing import Launch
from configs.record import Record, Status
from configs.target import SlurmTarget, Target
from slurm.verdict import OTHER_NODE, PEER_LOST
from tasks.merge import Collected

LOCAL_RETRIES = 2
"""Of a launch on this machine that ends before its first visit."""

LOCAL_RESUMES = 3
"""Of a training visit on this machine that keeps checkpoints and lost a rank."""

_Place = tuple[str, str, int]
"""Cell key, measuring pass, repeat."""

_FAULTS_OF_THE_CLUSTER = (Status.NODE_FAILED, Status.PREEMPTED, Status.LOST)
_LOST_RANK = ("SIGKILL", "SIGTERM", PEER_LOST, OTHER_NODE)
"""Kinds of failure that say that a rank was ended from outside, or was not heard of any more."""
_FINAL = (Status.CANCELLED, Status.OUT_OF_MEMORY, Status.TIMEOUT)


@dataclass(frozen=True)
class Outcome:
    """What is to be done with visits that have no figures yet. `failed_starts`: of the launch, in a row."""

    again: tuple[Visit, ...] = ()
    given_up: tuple[Visit, ...] = ()
    status: Status = Status.FAILED
    message: str = ""
    failed_starts: int = 0


class Retries:
    """How often each visit of a run was tried again, and which nodes were to blame when it was lost."""

    def __init__(self) -> None:
        self._tries: Counter[_Place] = Counter()
        self._blamed: dict[_Place, frozenset[str]] = {}

    def after(self, collected: Collected, measuring_pass: str, target: Target) -> Outcome:
        """Decide for each visit of a launch that has ended; counts what it decides."""
        end = collected.end
        assert end is not None, "a launch that ran has an end"
        if collected.start_failure:
            outcome = self._after_failed_start(collected, end, measuring_pass, target)
        else:
            again = collected.unvisited + self._lost_visits(collected.records, end, measuring_pass, target)
            outcome = Outcome(again=tuple(again))
        for visit in outcome.again:
            place = _place(visit, measuring_pass)
            self._blamed[place] = self._blamed.get(place, frozenset()) | frozenset(end.nodes)
        return outcome

    def blamed(self, launch: Launch) -> frozenset[str]:
        """Nodes that one of these visits was lost on, or whose launch did not start because of them."""
        return frozenset().union(
            *(self._blamed.get(_place(visit, launch.measuring_pass), ()) for visit in launch.visits)
        )

    def _after_failed_start(self, collected: Collected, end: JobEnd, measuring_pass: str, target: Target) -> Outcome:
        visits, why = collected.unvisited, collected.start_failure or ""
        cluster = isinstance(target, SlurmTarget)
        if cluster and end.status in _FINAL:
            return Outcome(given_up=tuple(visits), status=end.status, message=why)
        self._tries.update(_place(visit, measuring_pass) for visit in visits)
        tries = {visit.name: self._tries[_place(visit, measuring_pass)] for visit in visits}
        most = target.retries if isinstance(target, SlurmTarget) else LOCAL_RETRIES
        return Outcome(
            again=tuple(visit for visit in visits if tries[visit.name] <= most),
            given_up=tuple(visit for visit in visits if tries[visit.name] > most),
            status=end.status if cluster and end.status in _FAULTS_OF_THE_CLUSTER else Status.FAILED,
            message=f"the launch does not start: {why}",
            failed_starts=max(tries.values()),
        )

    def _lost_visits(self, records: Sequence[Record], end: JobEnd, measuring_pass: str, target: Target) -> list[Visit]:
        """Further attempts at visits that were under way when their launch was ended by no fault of theirs."""
        again = []
        for record in records:
            visit = Visit(cell=record.cell, repeat=record.repeat, attempt=record.attempt + 1)
            place = _place(visit, measuring_pass)
            # A record is lost too where a rank's own file was damaged: that is no fault of the cluster.
            cluster = isinstance(target, SlurmTarget)
            fault = cluster and record.status in _FAULTS_OF_THE_CLUSTER and record.status is end.status
            if not fault and measuring_pass == "timed" and visit.keeps_checkpoints:
                fault = _lost_a_rank(record, end)
            if fault and self._tries[place] < (target.retries if isinstance(target, SlurmTarget) else LOCAL_RESUMES):
                self._tries[place] += 1
                again.append(visit)
        return again


def _lost_a_rank(record: Record, end: JobEnd) -> bool:
    if record.status in _FAULTS_OF_THE_CLUSTER:
        return record.status is end.status
    kind = record.failure.kind if record.failure else None
    return record.status in (Status.FAILED, Status.TIMEOUT) and kind in _LOST_RANK


def nodes_to_leave_out(
    blamed: frozenset[str], slow: frozenset[str], usable: Iterable[str], needed: int
) -> tuple[str, ...]:
    """Which nodes a job of `needed` nodes is kept from: as many of those that may be, where enough others are left.

    blamed: on which an earlier attempt was lost. slow: found so before measuring. usable: that the scheduler would
    use now; none where it cannot say, and then nothing is left out, since a job without nodes would never start.
    """
    there = set(usable)
    for left_out in (blamed | slow, slow, blamed):
        if left_out and len(there - left_out) >= needed:
            return tuple(sorted(left_out))
    return ()


def _place(visit: Visit, measuring_pass: str) -> _Place:
    return visit.cell.key, measuring_pass, visit.repeat
