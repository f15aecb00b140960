"""What becomes of jobs by what Slurm's programs answer; they are stand-ins. On a real Slurm: tests/slurm/lab."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.common.execution import Layout
from configs.plans.job import Job, JobEnd, Measurement, Submission, Submitting
from configs.plans.paths import JobPaths
from configs.records.record import Accounting, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from slurm.schedulers import cluster, ending
from slurm.schedulers.commands.calls import SchedulerAnswer
from slurm.schedulers.job_queue import Sight
from slurm.schedulers.queue import Queue
from slurm.schedulers.refusals import REFUSED, Unavailable
from slurm.schedulers.waiting import is_suspended, read_waiting
from tests.support.cluster.launches import read_end, wait_until
from tests.support.cluster.slurm_jobs import begin, node_ends
from tests.support.cluster.slurm_programs import UNKNOWN, Cluster, account, details, stand_in_cluster
from tests.support.patience import patient


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = stand_in_cluster(tmp_path)
    monkeypatch.setattr(cluster, "shared_queue", lambda *_: made.queue)
    monkeypatch.setattr(ending, "LOST_SECONDS", 0.1)
    monkeypatch.setattr(ending, "ACCOUNTS_SECONDS", 0.1)
    return made


def made_job(tmp_path: Path, job_id: str | None = "7", **target: Any) -> JobPaths:
    """A job of two nodes that Slurm has, or may have."""
    paths = JobPaths(tmp_path / "run" / "jobs" / "0001-timed")
    paths.folder.mkdir(parents=True)
    cell = Cell(workload=NoopWorkload(seconds=0), layout=Layout(dp=2), nodes=2)
    job = Job(
        name="0001-timed", study="s", measuring_pass="timed", measuring=Measuring(), ranks_per_node=1,
        timeout_seconds=60, measurements=(Measurement(cell=cell, repeat=0, attempt=1),), inputs=".", cache=".",
        target=SlurmTarget.model_validate({"name": "lab", "poll_seconds": 0.01} | target),
    )  # fmt: skip
    paths.job.write_text(job.model_dump_json())
    paths.submitting.write_text(Submitting(name="rw-1-0001-timed").model_dump_json())
    if job_id is not None:
        paths.submission.write_text(Submission(job_id=job_id, submitted_at="2026-11-01T12:00:00Z").model_dump_json())
    return paths


def polled(paths: JobPaths, seconds: float = 0.5, until_called: Callable[[], object] | None = None) -> set[str]:
    """What polling says for a while; on a busy machine for longer, until what is waited for was called."""
    until, last, said = time.monotonic() + seconds, time.monotonic() + patient(20), set()
    while (now := time.monotonic()) < until or (until_called and not until_called() and now < last):
        said.add(cluster.poll(paths.folder))
        time.sleep(0.02)
    return said


def ended(paths: JobPaths) -> JobEnd:
    wait_until(lambda: cluster.poll(paths.folder) == "ended", "the end", limit_seconds=20)
    return read_end(paths)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_squeue_that_shows_nothing_loses_no_job(slurm: Cluster, tmp_path: Path, state: str) -> None:
    paths = made_job(tmp_path)
    slurm.says("squeue", f"7|{state}|n[1-2]|None\n")
    slurm.says("scontrol", details("7", state, "n[1-2]"))
    slurm.look(lambda: cluster.poll(paths.folder) == ("running" if state == "RUNNING" else "waiting"))
    slurm.says("squeue", "")
    assert polled(paths) <= {"running", "waiting"}
    assert not paths.end.exists() and slurm.calls("scancel") == []


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_what_sacct_calls_pending_or_running_is_not_lost(slurm: Cluster, tmp_path: Path, state: str) -> None:
    paths = made_job(tmp_path)
    slurm.away("squeue", UNKNOWN)
    slurm.says("sacct", account("7", state))
    assert polled(paths, 1.0) <= {"running", "waiting"}
    assert not paths.end.exists() and slurm.calls("scancel") == []


def test_nothing_is_called_lost_before_it_is_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    slurm.away("squeue", UNKNOWN)
    slurm.away("scancel", "Unable to contact slurm controller (connect failure)")
    assert polled(paths, 1.0, lambda: slurm.calls("scancel")) <= {"running", "waiting"}
    assert slurm.calls("scancel") and not paths.end.exists()
    slurm.says("scancel", "")
    assert ended(paths).status is Status.LOST
    assert slurm.calls("scancel")[-1] == "7"


def test_the_nodes_own_ends_decide_where_slurm_has_forgotten_the_job(slurm: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    slurm.away("squeue", UNKNOWN)
    slurm.away("sacct", "Slurm accounting storage is disabled")
    begin(paths)
    node_ends(paths, Status.COMPLETED)
    assert ended(paths).status is Status.COMPLETED
    assert slurm.calls("scancel") == []


@pytest.mark.parametrize("takes", [0.0, 0.5], ids=["at once", "slowly"])
def test_without_accounts_scontrol_tells_of_the_job(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: float
) -> None:
    paths, run = made_job(tmp_path), slurm.queue.run

    def delayed(command: Sequence[str], limit_seconds: float) -> SchedulerAnswer:
        time.sleep(takes if command[0] == "scontrol" else 0.0)
        return run(command, limit_seconds)

    monkeypatch.setattr(slurm.queue, "run", delayed)
    monkeypatch.setattr(ending, "ACCOUNTS_SECONDS", 10.0)
    slurm.says("squeue", "7|NODE_FAIL|n[1-2]|None\n")
    slurm.away("sacct", "Slurm accounting storage is disabled")
    slurm.says("scontrol", details("7", "NODE_FAIL", "n[1-2]"))
    assert ended(paths).status is Status.NODE_FAILED
    told = Accounting.model_validate_json(paths.accounting.read_bytes())
    assert (told.state, told.nodes, told.elapsed_seconds) == ("NODE_FAIL", ("n1", "n2"), 7)


def test_a_node_that_never_came_up_is_named_though_accounts_name_only_the_other(slurm: Cluster, tmp_path: Path) -> None:
    """squeue had named both: without the name a retry went to the broken node again."""
    paths = made_job(tmp_path)
    slurm.says("squeue", "7|NODE_FAIL|n[1-2]|None\n")
    slurm.says("sacct", account("7", "NODE_FAIL", nodes="n1"))
    begin(paths)
    node_ends(paths, Status.CANCELLED)
    for file in (paths.node_launcher(1), paths.node_end(1)):
        file.unlink()
    end = ended(paths)
    assert (end.status, end.nodes) == (Status.NODE_FAILED, ("n2",))


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_a_requeue_is_a_preemption_and_is_cancelled_before_it_has_an_end(
    slurm: Cluster, tmp_path: Path, state: str
) -> None:
    paths = made_job(tmp_path)
    slurm.says("squeue", "7|RUNNING|n[1-2]|None\n")
    begin(paths)
    slurm.look(lambda: cluster.poll(paths.folder) == "running")
    node_ends(paths, Status.CANCELLED)
    slurm.says("squeue", f"7|{state}||BeginTime\n")
    slurm.look(lambda: [cluster.poll(paths.folder), slurm.calls("scancel")][1] == ["7"])
    assert polled(paths, 0.3) == {"running"} and not paths.end.exists()
    slurm.says("squeue", "7|CANCELLED||BeginTime\n")
    slurm.says("sacct", account("7", "CANCELLED by 0"))
    end = ended(paths)
    assert (end.status, end.kind, end.nodes) == (Status.PREEMPTED, "REQUEUED", ())
    told = Accounting.model_validate_json(paths.accounting.read_bytes())
    assert (told.state, told.nodes) == ("REQUEUED", ("n1", "n2"))


def test_a_job_that_waited_when_it_was_last_looked_at_is_not_requeued(slurm: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path, poll_seconds=60.0)
    slurm.says("squeue", "7|PENDING||Resources\n")
    slurm.look(lambda: [cluster.poll(paths.folder), read_waiting(paths)][1] is not None)
    begin(paths)  # after the look, long before the next one
    assert polled(paths, 0.3) == {"waiting"}
    assert not paths.requeued.exists()


def test_a_second_time_that_a_launcher_refused_is_a_requeue_though_nobody_saw_it(
    slurm: Cluster, tmp_path: Path
) -> None:
    paths = made_job(tmp_path)
    begin(paths)
    node_ends(paths, Status.CANCELLED)
    paths.requeued.touch()
    slurm.says("squeue", "7|COMPLETED|n[1-2]|None\n")
    slurm.says("sacct", account("7"))
    assert ended(paths).status is Status.PREEMPTED


def test_each_reason_to_wait_is_kept_for_who_asks(slurm: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    for reason in ("Priority", "JobHeldUser"):
        slurm.says("squeue", f"7|PENDING||{reason}\n")
        slurm.look(
            lambda reason=reason: (
                [cluster.poll(paths.folder), (kept := read_waiting(paths)) and kept.reason][1] == reason
            )
        )
    assert cluster.note(paths.folder) == "job 7 held: JobHeldUser. `scontrol release 7` lets it start"


@pytest.mark.parametrize(
    ("reason", "target", "status", "kind", "words"),
    [
        ("QOSMaxNodePerJobLimit", {}, Status.FAILED, REFUSED, "target.nodes of lab: Slurm cannot start the job"),
        ("JobHeldAdmin", {"max_queue_minutes": 0.001}, Status.CANCELLED, None, "JobHeldAdmin"),
    ],
)
def test_what_never_starts_is_cancelled_and_then_ended(
    slurm: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    target: dict[str, Any],
    status: Status,
    kind: str | None,
    words: str,
) -> None:
    monkeypatch.setattr(cluster, "_HOPELESS_SECONDS", 0.1)
    paths = made_job(tmp_path, **target)
    slurm.says("squeue", f"7|PENDING||{reason}\n")
    slurm.away("scancel", "Unable to contact slurm controller (connect failure)")
    assert polled(paths, until_called=lambda: slurm.calls("scancel")) == {"waiting"}
    assert slurm.calls("scancel") and not paths.end.exists()
    slurm.says("scancel", "")
    end = ended(paths)
    assert (end.status, end.kind) == (status, kind) and words in (end.message or "")
    assert Accounting.model_validate_json(paths.accounting.read_bytes()).job_id == "7"


@pytest.mark.parametrize("meanwhile", ["8|RUNNING|n1|None\n", ""])
def test_the_limit_of_waiting_does_not_count_while_others_of_the_run_run(
    slurm: Cluster, tmp_path: Path, meanwhile: str
) -> None:
    paths = made_job(tmp_path, max_queue_minutes=0.005)
    reason = "Resources" if meanwhile else "JobArrayTaskLimit"
    slurm.says("squeue", f"7|PENDING||{reason}\n{meanwhile}")
    if meanwhile:
        slurm.queue.watch("8", every_seconds=0.01)
    assert polled(paths, 1.0) == {"waiting"}
    assert not paths.end.exists()


def test_a_suspended_job_is_said_to_be_so_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path)
    begin(paths)
    for state, said in (("RUNNING", "running"), ("SUSPENDED", "suspended"), ("STOPPED", "suspended")):
        slurm.says("squeue", f"7|{state}|n[1-2]|None\n")
        slurm.look(lambda said=said: cluster.poll(paths.folder) == said)
        assert is_suspended(paths) == (said == "suspended"), "what `rankwise status` reads"
    slurm.says("squeue", "7|RUNNING|n[1-2]|None\n")
    slurm.look(lambda: cluster.poll(paths.folder) == "running")
    assert not is_suspended(paths)
    assert not paths.end.exists() and slurm.calls("scancel") == []


def test_a_submission_that_is_not_found_is_looked_for_twice_and_cancelled_by_name(
    slurm: Cluster, tmp_path: Path
) -> None:
    paths = made_job(tmp_path, job_id=None)
    old = time.time() - 1000
    os.utime(paths.submitting, (old, old))
    assert cluster.poll(paths.folder) == "waiting", "one look that finds nothing"
    assert ended(paths).status is Status.LOST
    assert slurm.calls("scancel") == ["--name=rw-1-0001-timed"]


def test_a_submission_from_before_a_clock_was_set_back_is_given_up_in_its_time(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It seemed younger than it was, and was looked for until the clock had caught up."""
    monkeypatch.setattr(cluster, "_SUBMITTING_SECONDS", 1.0)
    paths = made_job(tmp_path, job_id=None)
    later = time.time() + 3600
    os.utime(paths.submitting, (later, later))
    assert cluster.poll(paths.folder) == "waiting"
    assert ended(paths).status is Status.LOST
    assert slurm.calls("scancel") == ["--name=rw-1-0001-timed"]


def test_a_task_whose_siblings_are_there_is_known_by_them(slurm: Cluster, tmp_path: Path) -> None:
    paths = made_job(tmp_path, job_id=None)
    paths.submitting.write_text(Submitting(name="rw-1-0001-timed", index=3).model_dump_json())
    slurm.says("squeue", "12_0|RUNNING|n1|None\n12_1|PENDING||Resources\n")
    cluster.poll(paths.folder)
    assert Submission.model_validate_json(paths.submission.read_bytes()).job_id == "12_3"


def test_every_program_is_asked_on_the_targets_cluster(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.queue.cluster = "b"
    monkeypatch.setenv("SLURM_CLUSTERS", "a")
    slurm.queue.environment = {**slurm.queue.environment, "SLURM_CLUSTERS": "a"}
    paths = made_job(tmp_path, None, cluster="b")
    slurm.says("squeue", "CLUSTER: b\n7|RUNNING|n[1-2]|None\n")  # squeue names the cluster in spite of --noheader
    slurm.look(lambda: cluster.poll(paths.folder) == "running")
    slurm.away("squeue", UNKNOWN)
    slurm.says("sacct", account("7", "COMPLETED", nodes="n[1-2]"))
    begin(paths)
    node_ends(paths, Status.COMPLETED)
    assert ended(paths).status is Status.COMPLETED
    calls = [call for name in ("squeue", "sacct", "scontrol") for call in slurm.calls(name)]
    assert calls and all(call.startswith("--clusters=b ") for call in calls)


def test_jobs_of_two_clusters_are_ended_each_on_its_own(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = {name: Queue(environment=slurm.queue.environment, cluster=name) for name in ("a", "b")}
    monkeypatch.setattr(cluster, "shared_queue", queues.__getitem__)
    jobs = [made_job(tmp_path / name, cluster=name) for name in queues]
    slurm.says("squeue", "7|CANCELLED|n[1-2]|None\n")
    cluster.cancel_many([paths.folder for paths in jobs])
    assert [read_end(paths).status for paths in jobs] == [Status.CANCELLED] * 2
    assert slurm.calls("scancel") == ["--clusters=a 7", "--clusters=b 7"]


def test_what_the_scheduler_may_have_taken_is_not_submitted_again_while_it_does_not_answer(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch was not answered in time, and squeue is not now; the next sbatch might be."""
    paths, submitted = made_job(tmp_path, job_id=None), []

    def submit(queue: Queue, folders: Sequence[Path], name: str, run_folder: Path) -> list[str]:
        submitted.append(name)
        return ["8"]

    monkeypatch.setattr(Queue, "submit", submit)
    slurm.away("squeue")
    slurm.away("sacct")
    with pytest.raises(Unavailable, match="whether it took 0001-timed is unknown"):
        cluster.submit(paths.folder)
    assert submitted == []
    slurm.says("squeue", "7|PENDING||Priority\n")
    cluster.submit(paths.folder)
    assert submitted == [] and '"7"' in paths.submission.read_text()
    paths.submission.unlink()
    slurm.says("squeue", "")
    cluster.submit(paths.folder)
    assert len(submitted) == 1


@pytest.mark.parametrize(
    ("may_have_taken", "looks"), [(True, 2), (False, 0)], ids=["no answer in time", "no connection"]
)
def test_a_job_that_may_be_taken_late_is_submitted_again_when_it_no_longer_may(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_have_taken: bool, looks: int
) -> None:
    paths, submitted = made_job(tmp_path, job_id=None), []
    paths.submitting.unlink()

    def submit(queue: Queue, folders: Sequence[Path], name: str, run_folder: Path) -> list[str]:
        submitted.append(name)
        if len(submitted) == 1:
            error = Unavailable("sbatch: time-out after 60 s")
            error.may_have_taken = may_have_taken
            raise error
        return ["8"]

    monkeypatch.setattr(Queue, "submit", submit)
    with pytest.raises(Unavailable, match="time-out"):
        cluster.submit(paths.folder)
    for _ in range(looks):
        with pytest.raises(Unavailable, match="did not say whether it took 0001-timed, and may yet take it"):
            cluster.submit(paths.folder)
    monkeypatch.setattr(cluster, "_SUBMITTING_SECONDS", 0.0)
    cluster.submit(paths.folder)
    assert (submitted[0] == submitted[1]) is not may_have_taken and '"8"' in paths.submission.read_text()
    assert slurm.calls("scancel") == [f"--name={submitted[0]}"] * bool(looks), "taken late, it would be measured twice"


def test_one_look_that_shows_no_job_is_not_enough_to_submit_it_again(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long after a time-out of sbatch, as where the pause between two tries has grown."""
    paths, submitted = made_job(tmp_path, job_id=None), []

    def submit(queue: Queue, folders: Sequence[Path], name: str, run_folder: Path) -> list[str]:
        submitted.append(name)
        raise Unavailable("sbatch: time-out after 60 s")

    monkeypatch.setattr(Queue, "submit", submit)
    monkeypatch.setattr(cluster, "_SUBMITTING_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(Unavailable):
            cluster.submit(paths.folder)
    slurm.says("squeue", "7|PENDING||Priority\n")
    cluster.submit(paths.folder)
    assert len(submitted) == 1 and '"7"' in paths.submission.read_text()


def test_a_look_at_a_waiting_job_costs_the_same_for_a_thousand_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of each node was looked for, twice a second on a shared disk, for as long as the job waited."""
    paths = made_job(tmp_path)
    job = Job.model_validate_json(paths.job.read_bytes())
    (one,) = job.measurements
    cell = one.cell.model_copy(update={"layout": Layout(dp=1000), "nodes": 1000})
    job = job.model_copy(update={"measurements": (one.model_copy(update={"cell": cell}),)})
    paths.job.write_text(job.model_dump_json())
    asked, exists = list[Path](), Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: (asked.append(self), exists(self))[1])
    assert not cluster._is_requeued(paths, Sight("PENDING", asked_at=time.monotonic()))
    assert len(asked) < 5
    paths.node_launcher(999).write_text("{}")
    assert not cluster._is_requeued(paths, Sight("PENDING", asked_at=time.monotonic())), "it began after the look"
    assert cluster._is_requeued(paths, Sight("PENDING", asked_at=time.monotonic() + 1))
