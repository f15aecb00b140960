"""Decide whether measurements missing after a launch are retried or recorded as failed. Does not import Prefect.

    outcome = retries.after(collected, measuring_pass, target)
    outcome.again                       # measurements for a fresh launch
    outcome.given_up                    # measurements that get a record with outcome.status and outcome.message

A measurement that never began continues in another launch. A launch that ended before its first measurement is
retried a bounded number of times; each time is an attempt, whose record says how it ended. On a cluster, a measurement
lost to a node failure, a preemption or the end of its launch is retried as a further attempt with its own record.
Training with checkpoints is retried after the loss of any rank and resumes from the last checkpoint. Out-of-memory,
time-outs, exceptions of the ranks, cancellations and jobs that can never start are not retried.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from configs.common.failure_kinds import OTHER_NODE, PEER_LOST
from configs.plans.job import JobEnd, Measurement
from configs.plans.packing import Launch
from configs.records.record import Record, Status
from configs.targets.resources import ClusterTarget
from configs.targets.target import Target
from slurm.schedulers.refusals import REFUSED
from tasks.campaign.records import Collected

LOCAL_RETRIES = 2
"""Of a launch on this machine that ends before its first measurement."""

LOCAL_RESUMES = 3
"""Of a training measurement on this machine that keeps checkpoints and lost a rank."""

_Place = tuple[str, str, int]
"""Cell key, measuring pass, repeat."""

_FAULTS_OF_THE_CLUSTER = (Status.NODE_FAILED, Status.PREEMPTED, Status.LOST)
_LOST_RANK = ("SIGKILL", "SIGTERM", PEER_LOST, OTHER_NODE)
"""Kinds of failure that say that a rank was ended from outside, or was not heard of any more."""
_FINAL = (Status.CANCELLED, Status.OUT_OF_MEMORY, Status.TIMEOUT)


@dataclass(frozen=True)
class RetryDecision:
    """What is to be done with measurements that have no figures yet. `failed_starts`: of the launch, in a row."""

    again: tuple[Measurement, ...] = ()
    given_up: tuple[Measurement, ...] = ()
    status: Status = Status.FAILED
    message: str = ""
    failed_starts: int = 0


class Retries:
    """Number of retries of each measurement of a run, and the nodes to which its losses are attributed."""

    def __init__(self) -> None:
        self._tries: Counter[_Place] = Counter()
        self._blamed: dict[_Place, frozenset[str]] = {}

    def after(self, collected: Collected, measuring_pass: str, target: Target) -> RetryDecision:
        """Decide for each measurement of a launch that has ended; counts what it decides."""
        end = collected.end
        assert end is not None, "a launch that ran has an end"
        if collected.start_failure:
            outcome = self._after_failed_start(collected, end, measuring_pass, target)
        else:
            again = collected.unreached + self._lost_measurements(collected.records, end, measuring_pass, target)
            outcome = RetryDecision(again=tuple(again))
        for measurement in outcome.again:
            place = _place(measurement, measuring_pass)
            self._blamed[place] = self._blamed.get(place, frozenset()) | frozenset(end.nodes or end.suspects)
        return outcome

    def blamed(self, launch: Launch) -> frozenset[str]:
        """Nodes that one of these measurements was lost on, or whose launch did not start because of them."""
        return frozenset().union(
            *(self._blamed.get(_place(measurement, launch.measuring_pass), ()) for measurement in launch.measurements)
        )

    def _after_failed_start(
        self, collected: Collected, end: JobEnd, measuring_pass: str, target: Target
    ) -> RetryDecision:
        measurements, why = collected.unreached, collected.start_failure or ""
        cluster = isinstance(target, ClusterTarget)
        if cluster and (end.status in _FINAL or end.kind == REFUSED):
            return RetryDecision(given_up=tuple(measurements), status=end.status, message=why)
        self._tries.update(_place(measurement, measuring_pass) for measurement in measurements)
        tries = {measurement.name: self._tries[_place(measurement, measuring_pass)] for measurement in measurements}
        most = target.retries if isinstance(target, ClusterTarget) else LOCAL_RETRIES
        return RetryDecision(
            again=tuple(next_attempt(each) for each in measurements if tries[each.name] <= most),
            given_up=tuple(measurement for measurement in measurements if tries[measurement.name] > most),
            status=end.status if cluster and end.status in _FAULTS_OF_THE_CLUSTER else Status.FAILED,
            message=f"the launch failed to start: {why}",
            failed_starts=max(tries.values()),
        )

    def _lost_measurements(
        self, records: Sequence[Record], end: JobEnd, measuring_pass: str, target: Target
    ) -> list[Measurement]:
        """Further attempts at measurements that were under way when their launch was ended by no fault of theirs."""
        again = []
        for record in records:
            made = Measurement(cell=record.cell, repeat=record.repeat, attempt=record.attempt)
            measurement = next_attempt(made)
            place = _place(measurement, measuring_pass)
            # A record is lost too where a rank's own file was damaged: that is no fault of the cluster.
            cluster = isinstance(target, ClusterTarget)
            fault = cluster and record.status in _FAULTS_OF_THE_CLUSTER and record.status is end.status
            if not fault and measuring_pass == "timed" and measurement.keeps_checkpoints:
                fault = _lost_a_rank(record, end)
            if fault and self._tries[place] < (target.retries if isinstance(target, ClusterTarget) else LOCAL_RESUMES):
                self._tries[place] += 1
                again.append(measurement)
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


def next_attempt(measurement: Measurement) -> Measurement:
    """The same once more; what was tried keeps its record."""
    return measurement.model_copy(update={"attempt": measurement.attempt + 1})


def _place(measurement: Measurement, measuring_pass: str) -> _Place:
    return measurement.cell.key, measuring_pass, measurement.repeat
