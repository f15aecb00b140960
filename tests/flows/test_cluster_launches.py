"""How a scheduler's queue is filled: in the order of blocks, in arrays of one shape, within the bounds."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.packing import Launch, pack_launches
from configs.plans.paths import RunPaths
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from flows import cluster_launches
from flows.cluster_launches import SubmissionQueue, room_for, shape_of, take_alike
from flows.held_groups import HeldGroup, asked_of
from slurm.schedulers.refusals import Unavailable
from tasks.campaign.launches.active_jobs import ActiveJobs
from tasks.campaign.launches.leftovers import collected_marker
from tasks.campaign.progress import ProgressRow, RunProgress
from tasks.campaign.retries import Retries
from tasks.submit import Refusal


def cells(nodes: int, count: int) -> list[Cell]:
    """Cells of one shape."""
    return [
        Cell(workload=NoopWorkload(label=f"{nodes}-{i}", items=nodes), layout=Layout(dp=nodes), target="c", nodes=nodes)
        for i in range(count)
    ]


def launches(blocks: int) -> list[Launch]:
    """Unpacked launches of three cells on one node and two on two nodes, in their random order."""
    all_cells = cells(1, 3) + cells(2, 2)
    measurements = [Measurement(cell=cell, repeat=block, attempt=1) for block in range(blocks) for cell in all_cells]
    return pack_launches(measurements, "timed", 0, pack=False)


def row() -> ProgressRow:
    return ProgressRow("", 1, 1, 1)


def job(launch: Launch, name: str, target: SlurmTarget) -> Job:
    return Job(
        name=name,
        study="s",
        measuring_pass="timed",
        measuring=Measuring(),
        target=target,
        measurements=launch.measurements,
        ranks_per_node=1,
        timeout_seconds=60,
        inputs="",
        cache="",
    )


def flying(target: SlurmTarget, *arrays: int) -> ActiveJobs:
    """A flight of arrays of so many jobs each."""
    active_jobs, queue = ActiveJobs(), iter(launches(sum(arrays)))
    for number, count in enumerate(arrays):
        active_jobs.add([(job(next(queue), f"{number}-{place}", target), row()) for place in range(count)])
    return active_jobs


def test_arrays_are_of_one_shape_and_blocks_keep_their_order() -> None:
    queue = deque((launch, row()) for launch in launches(blocks=3))
    groups = []
    while queue:
        groups.append([launch for launch, _ in take_alike(queue, 100, 100, shape_of)])
    assert [len({shape_of(launch) for launch in group}) for group in groups] == [1] * 6
    assert [group[0].block for group in groups] == [0, 0, 1, 1, 2, 2]
    assert sorted(len(group) for group in groups) == [2, 2, 2, 3, 3, 3]


def test_no_more_are_taken_than_there_is_room_for_and_none_from_far_behind() -> None:
    order = launches(blocks=1)
    queue = deque((launch, row()) for launch in order)
    assert [launch for launch, _ in take_alike(queue, 1, 100, shape_of)] == order[:1]
    assert [launch for launch, _ in queue] == order[1:]
    first_two = order[1:3]
    taken = [launch for launch, _ in take_alike(queue, 100, 2, shape_of)]
    assert taken == [launch for launch in first_two if shape_of(launch) == shape_of(first_two[0])]


def test_what_is_refused_now_is_passed_over_and_keeps_its_place() -> None:
    order = launches(blocks=1)
    queue = deque((launch, row()) for launch in order)
    refused = asked_of(order[0])
    taken = [launch for launch, _ in take_alike(queue, 100, 100, shape_of, lambda launch: asked_of(launch) == refused)]
    assert taken == [launch for launch in order if asked_of(launch) != refused]
    assert [launch for launch, _ in queue] == [launch for launch in order if asked_of(launch) == refused]
    assert take_alike(queue, 100, 100, shape_of, lambda launch: True) == []


@pytest.mark.parametrize(
    ("max_queued", "max_running", "arrays", "room"),
    [
        (5, None, [], 5),
        (5, None, [3], 2),
        (5, None, [3, 2], 0),
        (5, 1, [], 5),  # one array, of which one job runs at a time
        (5, 1, [3], 0),  # a second array would run one beside it
        (5, 3, [4], 0),
        (5, 3, [1], 2),
        (5, 3, [1, 1], 1),
        (2, 3, [1], 1),
        (5, 3, [2, 2], -1),  # adopted: more than ever were submitted with this bound
    ],
)
def test_the_room_in_a_queue(max_queued: int, max_running: int | None, arrays: list[int], room: int) -> None:
    target = SlurmTarget(name="c", max_queued=max_queued, max_running=max_running)
    assert room_for(target, flying(target, *arrays)) == room
    other = SlurmTarget(name="other", max_queued=max_queued)
    assert room_for(other, flying(target, *arrays)) == max_queued, "every target has a queue of its own"


def test_what_runs_at_once_is_counted_over_all_targets() -> None:
    one, other = SlurmTarget(name="one", max_running=2), SlurmTarget(name="other", max_running=2)
    assert room_for(other, flying(one, 1)) == 1
    assert room_for(other, flying(one, 5)) == 0
    assert room_for(other, flying(one)) == other.max_queued


def test_no_more_steps_of_an_allocation_are_started_than_may_run() -> None:
    """srun knows no bound such as an array's: what is not started here cannot run too early."""
    target = SlurmTarget(name="c", allocation="current", max_running=1)
    assert room_for(target, flying(target)) == 1
    assert room_for(target, flying(target, 1)) == 0
    unbounded = SlurmTarget(name="c", allocation="current")
    assert room_for(unbounded, flying(unbounded)) == unbounded.max_queued


def test_a_budget_that_is_spent_while_the_scheduler_is_away_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    left, asked, slept = SlurmTarget(), [], []

    def away(names: object, session: object) -> None:
        asked.append(names)
        raise Unavailable("Slurm does not respond")

    queue = SubmissionQueue(cast(Any, SimpleNamespace(adopted=[])), [], Retries(), cast(Any, None))
    queue._active_jobs = flying(left, 2)
    monkeypatch.setattr(queue._active_jobs, "cancel", away)
    monkeypatch.setattr(cluster_launches, "time", SimpleNamespace(sleep=slept.append))
    queue._leave_out_rest("budget of time")
    assert asked == [["0-0", "0-1"]] and len(queue._active_jobs.jobs) == 2 and len(slept) == 1


@pytest.mark.parametrize("away", [True, False])
def test_a_job_that_a_scheduler_may_have_taken_is_left_for_the_next_run(
    away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget was spent while the scheduler did not answer: its job stood as collected, and nobody ended it."""

    def cancel_many(folders: object) -> None:
        if away:
            raise Unavailable("Slurm does not respond")

    target, run, left = SlurmTarget(name="c"), RunPaths(tmp_path), []
    session = SimpleNamespace(adopted=[], run=run, run_progress=RunProgress())
    made = job(launches(1)[0], "0001-timed-a", target)
    run.job(made.name).folder.mkdir(parents=True)
    queue = SubmissionQueue(cast(Any, session), [], Retries(), cast(Any, None))
    queue._held.refused(HeldGroup("c", [(made, row())]), Refusal("Slurm does not respond", final=False), 0.0)
    monkeypatch.setattr(cluster_launches, "adapter_for", lambda name: SimpleNamespace(cancel_many=cancel_many))
    monkeypatch.setattr(cluster_launches, "leave_out", lambda *asked: left.append(asked[1].measurements))
    queue._leave_out_rest("budget of time")
    assert left == [made.measurements] * (not away) and not queue._held.groups
    assert collected_marker(run, made.name).exists() is not away
    assert [("1 job may be in its queue" in note) for note in session.run_progress.notes] == [True] * away
