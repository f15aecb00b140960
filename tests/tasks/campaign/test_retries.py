"""What becomes of measurements whose launch ended without them: a table of ends, and how often is enough."""

from typing import Any

import pytest

from configs.common.execution import Layout
from configs.plans.job import JobEnd, Measurement
from configs.plans.packing import Launch
from configs.records.record import Failure, Record, Status
from configs.spec.cell import Cell
from configs.targets.target import LocalTarget, SlurmTarget, Target
from configs.workloads.noop import NoopWorkload
from configs.workloads.train import TrainWorkload
from slurm.schedulers.refusals import REFUSED
from tasks.campaign.records import Collected
from tasks.campaign.retries import LOCAL_RESUMES, LOCAL_RETRIES, Retries, nodes_to_leave_out

CELLS = [Cell(workload=NoopWorkload(label=label), target="slurm") for label in "abc"]
MEASUREMENTS = [Measurement(cell=cell, repeat=0, attempt=1) for cell in CELLS]
CLUSTER = SlurmTarget(retries=2)


def ended(status: Status, *nodes: str) -> JobEnd:
    return JobEnd(status=status, return_code=None, nodes=nodes, finished_at="2026-01-01T00:00:09+00:00")


def record(measurement: Measurement, status: Status) -> Record:
    return Record(
        key=measurement.cell.key,
        cell=measurement.cell,
        repeat=measurement.repeat,
        attempt=measurement.attempt,
        status=status,
        job="j",
        position=0,
        started_at=None,
        finished_at=None,
    )


def attempt(measurement: Measurement, number: int) -> Measurement:
    return measurement.model_copy(update={"attempt": number})


def never_started(status: Status, *nodes: str, measurements: list[Measurement] = MEASUREMENTS) -> Collected:
    return Collected(unreached=list(measurements), start_failure="no word", end=ended(status, *nodes))


@pytest.mark.parametrize("status", list(Status))
def test_only_faults_of_the_cluster_ask_for_a_further_attempt(status: Status) -> None:
    collected = Collected(records=[record(MEASUREMENTS[0], status)], unreached=MEASUREMENTS[1:], end=ended(status))
    outcome = Retries().after(collected, "timed", CLUSTER)
    retried = [measurement.attempt for measurement in outcome.again if measurement.cell == CELLS[0]]
    assert retried == ([2] if status in ("node_failed", "preempted", "lost") else [])
    assert list(outcome.again)[:2] == MEASUREMENTS[1:], "who was not measured yet goes on first"
    assert not outcome.given_up


def test_on_this_machine_a_measurement_that_was_lost_is_not_tried_again() -> None:
    collected = Collected(
        records=[record(MEASUREMENTS[0], Status.LOST)], unreached=MEASUREMENTS[1:], end=ended(Status.LOST)
    )
    assert Retries().after(collected, "timed", LocalTarget()).again == tuple(MEASUREMENTS[1:])


@pytest.mark.parametrize(
    ("status", "kind", "again"),
    [
        (Status.FAILED, "SIGKILL", True),
        (Status.FAILED, "PeerLost", True),
        (Status.TIMEOUT, "PeerLost", True),
        (Status.LOST, None, True),
        (Status.FAILED, "ValueError", False),
        (Status.FAILED, "FloatingPointError", False),
        (Status.TIMEOUT, "CellTimeout", False),
        (Status.OUT_OF_MEMORY, "SIGKILL", False),
        (Status.CANCELLED, None, False),
    ],
)
@pytest.mark.parametrize("target", [LocalTarget(), CLUSTER])
def test_training_with_checkpoints_that_lost_a_rank_goes_on(
    status: Status, kind: str | None, again: bool, target: Target
) -> None:
    for every, measuring_pass in ((10, "timed"), (None, "timed"), (10, "memory")):
        work = TrainWorkload(checkpoint_every=every)
        measurement = Measurement(
            cell=Cell(model="m", workload=work, layout=Layout(dp=2, strategy="ddp")), repeat=0, attempt=1
        )
        lost = record(measurement, status).model_copy(update={"failure": Failure(message="gone", kind=kind)})
        outcome = Retries().after(Collected(records=[lost], end=ended(status)), measuring_pass, target)
        expected = again and every is not None and measuring_pass == "timed"
        if target is CLUSTER and status is Status.LOST:
            expected = True  # as every measurement there
        assert bool(outcome.again) == expected
        assert [measurement.attempt for measurement in outcome.again] == [2] * expected


def test_training_goes_on_a_bounded_number_of_times() -> None:
    work = TrainWorkload(checkpoint_every=10)
    cell = Cell(model="m", workload=work, layout=Layout(dp=2, strategy="ddp"))
    retries, measurements = Retries(), (Measurement(cell=cell, repeat=0, attempt=1),)
    attempts = []
    while measurements:
        attempts.append(measurements[0].attempt)
        killed = {"failure": Failure(message="gone", kind="SIGKILL")}
        lost = Collected(
            records=[record(measurements[0], Status.FAILED).model_copy(update=killed)], end=ended(Status.FAILED)
        )
        measurements = retries.after(lost, "timed", LocalTarget()).again
    assert attempts == list(range(1, 2 + LOCAL_RESUMES))


def test_a_damaged_file_is_no_fault_of_the_cluster() -> None:
    collected = Collected(records=[record(MEASUREMENTS[0], Status.LOST)], end=ended(Status.COMPLETED))
    assert Retries().after(collected, "timed", CLUSTER).again == ()


def test_a_measurement_is_tried_again_so_often_and_no_more() -> None:
    retries, attempts = Retries(), []
    measurements: tuple[Measurement, ...] = (MEASUREMENTS[0],)
    while measurements:
        attempts.append(measurements[0].attempt)
        lost = Collected(records=[record(measurements[0], Status.PREEMPTED)], end=ended(Status.PREEMPTED))
        measurements = retries.after(lost, "timed", CLUSTER).again
    assert attempts == [1, 2, 3]
    none = SlurmTarget(retries=0)
    lost = Collected(records=[record(MEASUREMENTS[0], Status.PREEMPTED)], end=ended(Status.PREEMPTED))
    assert Retries().after(lost, "timed", none).again == ()


@pytest.mark.parametrize(
    ("target", "status", "given_up_as", "tries"),
    [
        (CLUSTER, Status.NODE_FAILED, Status.NODE_FAILED, 3),
        (CLUSTER, Status.PREEMPTED, Status.PREEMPTED, 3),
        (CLUSTER, Status.LOST, Status.LOST, 3),
        (CLUSTER, Status.FAILED, Status.FAILED, 3),
        (CLUSTER, Status.OUT_OF_MEMORY, Status.OUT_OF_MEMORY, 1),
        (CLUSTER, Status.TIMEOUT, Status.TIMEOUT, 1),
        (CLUSTER, Status.CANCELLED, Status.CANCELLED, 1),
        (SlurmTarget(retries=0), Status.NODE_FAILED, Status.NODE_FAILED, 1),
        (LocalTarget(), Status.LOST, Status.FAILED, 1 + LOCAL_RETRIES),
        (LocalTarget(), Status.TIMEOUT, Status.FAILED, 1 + LOCAL_RETRIES),
    ],
)
def test_a_launch_that_does_not_start_is_given_up_in_the_end(
    target: Target, status: Status, given_up_as: Status, tries: int
) -> None:
    retries, made = Retries(), 0
    while True:
        made += 1
        tried = [attempt(measurement, made) for measurement in MEASUREMENTS]
        outcome = retries.after(never_started(status, measurements=tried), "timed", target)
        assert all(measurement.attempt == made + 1 for measurement in outcome.again), "each has a record of its own"
        assert not (outcome.again and outcome.given_up)
        if outcome.given_up:
            break
        assert outcome.failed_starts == made
    assert (made, outcome.status, outcome.given_up) == (tries, given_up_as, tuple(tried))
    assert "no word" in outcome.message


def test_a_job_that_can_never_start_is_not_tried_again() -> None:
    collected = never_started(Status.FAILED)
    collected.end = ended(Status.FAILED).model_copy(update={"kind": REFUSED})
    outcome = Retries().after(collected, "timed", CLUSTER)
    assert (outcome.again, outcome.given_up, outcome.status) == ((), tuple(MEASUREMENTS), Status.FAILED)


def test_a_lost_measurement_and_failed_starts_share_one_bound() -> None:
    """A measurement lost once whose next launch fails to start once has had its two; a companion has one left."""
    retries = Retries()
    lost = Collected(records=[record(MEASUREMENTS[0], Status.NODE_FAILED)], end=ended(Status.NODE_FAILED))
    (again,) = retries.after(lost, "timed", CLUSTER).again
    both = [again, MEASUREMENTS[1]]
    once_more = [attempt(again, 3), attempt(MEASUREMENTS[1], 2)]
    assert retries.after(never_started(Status.LOST, measurements=both), "timed", CLUSTER).again == tuple(once_more)
    last = retries.after(never_started(Status.LOST, measurements=once_more), "timed", CLUSTER)
    assert (last.given_up, last.again) == ((once_more[0],), (attempt(MEASUREMENTS[1], 3),))


def test_nodes_to_blame_are_remembered_for_all_that_goes_on() -> None:
    retries = Retries()
    first = Collected(
        records=[record(MEASUREMENTS[0], Status.NODE_FAILED)],
        unreached=MEASUREMENTS[1:2],
        end=ended(Status.NODE_FAILED, "n1"),
    )
    launch = Launch("timed", retries.after(first, "timed", CLUSTER).again)
    assert retries.blamed(launch) == {"n1"}
    retries.after(never_started(Status.LOST, "n2", measurements=list(launch.measurements)), "timed", CLUSTER)
    assert retries.blamed(launch) == {"n1", "n2"}
    assert retries.blamed(Launch("memory", launch.measurements)) == frozenset(), "another pass is another measurement"


def test_nodes_where_a_launch_was_lost_are_left_out_where_none_is_to_blame_by_name() -> None:
    retries, collected = Retries(), never_started(Status.LOST)
    collected.end = ended(Status.LOST).model_copy(update={"suspects": ("n3",)})
    assert retries.blamed(Launch("timed", retries.after(collected, "timed", CLUSTER).again)) == {"n3"}


@pytest.mark.parametrize(
    ("blamed", "slow", "usable", "needed", "left_out"),
    [
        ("a", "", "abc", 2, ("a",)),
        ("a", "b", "abc", 1, ("a", "b")),
        ("a", "b", "abc", 2, ("b",)),  # of the two, what was measured to be slow
        ("a", "", "ab", 2, ()),  # both are needed: the job waits until they can be had
        ("a", "", "b", 1, ("a",)),  # down now, and perhaps up again when the job starts
        ("a", "", "", 1, ()),  # nobody knows
        ("", "", "ab", 1, ()),
    ],
)
def test_nodes_are_left_out_where_enough_others_are(
    blamed: str, slow: str, usable: str, needed: int, left_out: Any
) -> None:
    assert nodes_to_leave_out(frozenset(blamed), frozenset(slow), usable, needed) == left_out
