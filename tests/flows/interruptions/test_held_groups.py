"""Jobs that a scheduler refuses for now: when each is tried again, and that nothing else waits for it."""

from configs.common.execution import Layout
from configs.plans.job import Job, Measurement
from configs.plans.packing import Launch
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from flows.held_groups import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, HeldGroup, HeldGroups, asked_of
from tasks.campaign.progress import ProgressRow
from tasks.submit import Refusal

LIMIT = Refusal("sbatch: QOSMaxSubmitJobPerUserLimit", final=False, limited=True)
AWAY = Refusal("sbatch: Unable to contact slurm controller", final=False)


def group(nodes: int, count: int = 1, target: str = "c") -> HeldGroup:
    """Jobs of so many nodes."""
    cell = Cell(workload=NoopWorkload(items=nodes), layout=Layout(dp=nodes), nodes=nodes, target=target)
    job = Job(
        name="j", study="s", measuring_pass="timed", measuring=Measuring(), target=SlurmTarget(name=target),
        measurements=(Measurement(cell=cell, repeat=0, attempt=1),), ranks_per_node=1, timeout_seconds=60,
        inputs="", cache="",
    )  # fmt: skip
    jobs = [(job.model_copy(update={"name": f"{nodes}-{number}"}), ProgressRow("", 1, 1, 1)) for number in range(count)]
    return HeldGroup(target, jobs)


def names(groups: list[HeldGroup]) -> list[list[str]]:
    return [[job.name for job, _ in each.jobs] for each in groups]


def test_pauses_double_up_to_a_minute_and_begin_anew_after_success() -> None:
    held, pauses, now = HeldGroups(), [], 0.0
    each = group(2)
    for _ in range(7):
        held.refused(each, LIMIT, now)
        assert held.take_due("c", now) == []
        pauses.append(held.groups[0].again_at - now)
        now = held.groups[0].again_at
        (each,) = held.take_due("c", now)
    assert pauses == [2, 4, 8, 16, 32, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    held.refused(group(2, 3), LIMIT, now)
    held.accepted(each)
    assert held.groups[0].pause == FIRST_PAUSE_SECONDS and held.due(now)


def test_of_one_shape_one_is_tried_and_others_wait_for_its_answer() -> None:
    held = HeldGroups()
    held.refused(group(2, 1), LIMIT, 0.0)
    held.refused(group(2, 3), LIMIT, 0.0)
    held.refused(group(1), LIMIT, 0.0)
    due = held.take_due("c", 100.0)
    assert names(due) == [["2-0"], ["1-0"]]
    held.refused(due[0], LIMIT, 100.0)
    assert held.take_due("c", 101.0) == []
    held.accepted(due[0])
    assert names(held.take_due("c", 101.0)) == [["2-0"]], "the scheduler takes such jobs again"


def test_a_limit_blocks_its_shape_and_an_absent_scheduler_its_target() -> None:
    held = HeldGroups()
    held.refused(group(2), LIMIT, 0.0)
    cell = group(2).jobs[0][0].measurements
    assert held.shapes("c") == {asked_of(Launch("timed", cell))} and held.shapes("other") == set()
    assert not held.is_away("c")
    held.refused(group(1), AWAY, 0.0)
    assert held.is_away("c") and not held.is_away("other")
    assert len(held.take_due("c", 100.0)) == 2, "the limited one, and one call that shows whether it is back"


def test_what_is_refused_for_too_long_is_overdue_unless_jobs_of_the_run_ran() -> None:
    held = HeldGroups()
    held.refused(group(2), LIMIT, 0.0)
    held.refused(group(2, target="other"), LIMIT, 0.0)
    assert held.take_overdue("c", 1000.0, None) == []
    held.restart_clocks("c", 50.0)
    assert held.take_overdue("c", 100.0, 60.0) == []
    assert len(held.take_overdue("c", 111.0, 60.0)) == 1
    assert [each.target for each in held.groups] == ["other"]


def test_halves_keep_the_order_and_one_put_back_does_not_spin() -> None:
    first, rest = group(1, 5).halves()
    assert names([first, rest]) == [["1-0", "1-1", "1-2"], ["1-3", "1-4"]]
    held = HeldGroups()
    held.put_back(first, now=10.0)
    assert not held.due(10.0) and held.due(10.0 + FIRST_PAUSE_SECONDS)
