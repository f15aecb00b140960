"""The shared look at the queue. Slurm's programs are stand-ins that print what a file says and count their calls."""

import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from configs.common.execution import Layout
from configs.plans.job import Job, Launcher, Measurement, Submission
from configs.plans.paths import JobPaths
from configs.records.record import Accounting
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from slurm.schedulers.cluster import poll
from slurm.schedulers.job_queue import LONGEST_PAUSE_SECONDS, Pace, Sight
from slurm.schedulers.queue import Queue, read_squeue, squeue_command
from tests.support.cluster.slurm_jobs import made
from tests.support.cluster.slurm_programs import UNKNOWN, Cluster, account, details, stand_in_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return stand_in_cluster(tmp_path)


def test_lines_of_squeue() -> None:
    seen = read_squeue("5_0|RUNNING|lab[1-2]|None\n5_1|PENDING||Resources\n6|PENDING||a|b\nnoise\n")
    assert seen["5_0"] == Sight("RUNNING", ("lab1", "lab2"), "None")
    assert seen["5_1"] == Sight("PENDING", (), "Resources")
    assert seen["6"].reason == "a|b"
    assert len(seen) == 3


def test_an_array_is_asked_for_once() -> None:
    assert squeue_command(["12_1", "9", "12_0"])[-1] == "--jobs=9,12"


def test_jobs_of_one_id_on_two_clusters_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cluster counts its jobs by itself: the first one's node would have begun the second one's launch."""
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho Submitted batch job 12\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run = tmp_path / "run"
    jobs = [made(run, number, cluster=name) for number, name in ((1, None), (2, "a"), (3, "b"))]
    for paths, queue in zip(jobs, (Queue(), Queue(cluster="a"), Queue(cluster="b")), strict=True):
        assert queue.submit([paths.folder], "rw-1", run) == ["12"]
        queue.show_logs(paths, "12")
    pickles = sorted(run.glob("submitit*/12_submitted.pkl"))
    assert len(pickles) == 3
    for paths, pickle in zip(jobs, pickles, strict=True):
        assert str(paths.job).encode() in pickle.read_bytes()
        assert paths.scheduler_log(0).resolve() == pickle.parent / "12_0_log.out"


def test_one_call_for_all_jobs_in_an_interval(cluster: Cluster) -> None:
    cluster.says("squeue", "".join(f"7_{index}|RUNNING|n1|None\n" for index in range(50)))
    jobs = [f"7_{index}" for index in range(50)]
    for job in jobs:
        cluster.queue.watch(job, every_seconds=30)
    cluster.look(lambda: all(cluster.queue.sight(job) == Sight("RUNNING", ("n1",), "None") for job in jobs))
    for job in jobs:
        cluster.queue.sight(job)
    assert len(cluster.calls("squeue")) == cluster.queue.squeue_calls == 1
    assert cluster.calls("sacct") == []


def test_nobody_waits_for_a_look(cluster: Cluster) -> None:
    answered = cluster.folder / "may answer"
    wait = f'for _ in $(seq 100); do [ -e "{answered}" ] && break; sleep 0.1; done'
    (cluster.folder / "squeue").write_text(f"#!/bin/sh\n{wait}\necho '7|RUNNING|n1|None'\n")
    cluster.queue.watch("7", every_seconds=1)
    assert cluster.queue.sight("7") is None
    assert cluster.queue.sight("7") is None
    answered.touch()
    cluster.look(lambda: cluster.queue.sight("7") == Sight("RUNNING", ("n1",), "None"))


def test_a_look_is_taken_where_no_thread_can_be_started(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Login nodes limit processes: the run ended, and its jobs' cancellation waited for that look without end."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cluster.says("squeue", "7|RUNNING|n1|None\n")
    cluster.queue.watch("7", every_seconds=30)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert cluster.queue.sight("7") == Sight("RUNNING", ("n1",), "None")
    assert not cluster.queue._looking.locked()


def test_accounts_are_asked_for_what_has_ended_and_no_longer(cluster: Cluster) -> None:
    queue = cluster.queue
    cluster.says("squeue", "7|COMPLETED|n1|None\n8|RUNNING|n2|None\n")
    cluster.says("sacct", account("7"))
    for job in ("7", "8"):
        queue.watch(job, every_seconds=0.05)
    cluster.look(lambda: queue.sight("8") is not None and queue.account("7") is not None)
    calls = len(cluster.calls("sacct"))
    asked = len(cluster.calls("squeue"))
    cluster.look(lambda: queue.sight("8") is not None and len(cluster.calls("squeue")) > asked + 2)
    assert len(cluster.calls("sacct")) == calls
    assert all(call.endswith("--jobs=7") for call in cluster.calls("sacct"))
    assert all(call.endswith("--jobs=8") for call in cluster.calls("squeue")[asked:])


def test_accounts_that_lag_behind_are_waited_for(cluster: Cluster) -> None:
    queue = cluster.queue
    cluster.says("squeue", "7|COMPLETED|n1|None\n")
    cluster.says("sacct", account("7", "RUNNING"))
    queue.watch("7", every_seconds=0.05)
    cluster.look(lambda: queue.sight("7") is not None and queue.account("7") is None and queue.sacct_calls > 1)
    cluster.says("sacct", account("7"))
    cluster.look(lambda: queue.account("7") is not None)


def test_accounts_that_name_too_few_nodes_are_completed_by_the_nodes_themselves(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen once, of a job that ended a moment ago: sacct named one node of two."""
    cell = Cell(workload=NoopWorkload(seconds=0), layout=Layout(dp=2), nodes=2)
    target = SlurmTarget(name="lab", ranks_per_node=1, poll_seconds=0.05)
    for named, launched, expected in (
        ("b", ("a", "b"), ("a", "b")),
        ("a,b", ("a",), ("a", "b")),
        ("a,b", (), ("a", "b")),
        ("", ("a", "b"), ("a", "b")),
    ):
        paths = JobPaths(tmp_path / f"run-{named}-{len(launched)}" / "jobs" / "job")
        paths.folder.mkdir(parents=True)
        job = Job(
            name="job", study="s", measuring_pass="timed", measuring=Measuring(), ranks_per_node=1, timeout_seconds=60,
            measurements=(Measurement(cell=cell, repeat=0, attempt=1),), inputs=".", cache=".", target=target,
        )  # fmt: skip
        paths.job.write_text(job.model_dump_json())
        paths.submission.write_text(Submission(job_id="7", submitted_at="2026-01-01T00:00:00+00:00").model_dump_json())
        for rank, host in enumerate(launched):
            launcher = Launcher(node_rank=rank, pid=1, pid_started=1, host=host, started_at="2026-01-01T00:00:00+00:00")
            paths.node_launcher(rank).write_text(launcher.model_dump_json())
        queue = Queue(environment=cluster.queue.environment)
        monkeypatch.setattr("slurm.schedulers.cluster.shared_queue", lambda *_, queue=queue: queue)
        cluster.says("squeue", f"7|NODE_FAIL|{named}|None\n")
        cluster.says("sacct", account("7", "NODE_FAIL", nodes=named))
        cluster.look(lambda folder=paths.folder: poll(folder) == "ended")
        assert Accounting.model_validate_json(paths.accounting.read_bytes()).nodes == expected


def looks(cluster: Cluster, job_id: str, count: int = 1) -> None:
    """Take looks and wait for them."""
    cluster.queue.watch(job_id, every_seconds=0.01)
    for _ in range(count):
        cluster.queue.look()


def test_an_empty_answer_is_no_answer_and_the_next_calls_come_later(cluster: Cluster) -> None:
    cluster.says("squeue", "7|RUNNING|n1|None\n")
    looks(cluster, "7")
    for nothing in ("", "\n", "Welcome to the cluster!\n"):
        cluster.says("squeue", nothing)
        looks(cluster, "7")
        assert cluster.queue.seen("7") == Sight("RUNNING", ("n1",), "None")
        assert cluster.queue._paces["squeue"].pause > 0.01
        cluster.says("squeue", "7|RUNNING|n1|None\n")
        looks(cluster, "7")
    assert cluster.calls("scontrol") == [], "one look that shows nothing asks nobody else"
    assert cluster.queue._paces["squeue"].pause == 0.01


@pytest.mark.parametrize("shown", ["", "8|RUNNING|n2|None\n"])
def test_a_job_that_two_looks_do_not_show_is_asked_for_by_itself(cluster: Cluster, shown: str) -> None:
    cluster.says("squeue", "7|PENDING||Resources\n8|RUNNING|n2|None\n")
    looks(cluster, "7")
    cluster.says("squeue", shown)
    cluster.says("scontrol", details("7", "RUNNING", "n1"))
    looks(cluster, "7")
    assert cluster.queue.seen("7") == Sight("PENDING", (), "Resources"), "one look decides nothing"
    looks(cluster, "7")
    assert cluster.queue.seen("7") == Sight("RUNNING", ("n1",), "")
    assert cluster.calls("scontrol") == ["--oneliner show job 7"]
    cluster.away("scontrol", "Unable to contact slurm controller (connect failure)")
    looks(cluster, "7", 3)
    assert cluster.queue.seen("7") == Sight("RUNNING", ("n1",), ""), "who does not answer denies nothing"


def test_a_job_in_a_hidden_partition_is_found_by_its_name(cluster: Cluster) -> None:
    """squeue shows it only where it is asked for all, and nobody may keep accounts."""
    shown = 'case " $* " in *" --all "*) echo "7|RUNNING|n1|None" ;; esac'
    (cluster.folder / "squeue").write_text(f"#!/bin/sh\n{shown}\n")
    cluster.away("sacct", "Slurm accounting storage is disabled")
    assert cluster.queue.find("rw-1", datetime(2026, 11, 1)) == {"7"}


def test_tasks_of_an_array_are_asked_for_together(cluster: Cluster) -> None:
    cluster.says("scontrol", details("9", "PENDING", array="ArrayJobId=9 ArrayTaskId=0-1 "))
    for task in ("9_0", "9_1", "9_2"):
        cluster.queue.watch(task, every_seconds=0.01)
    cluster.queue.look()
    cluster.queue.look()
    assert [cluster.queue.seen(f"9_{task}") for task in range(3)] == [
        Sight("PENDING", (), ""), Sight("PENDING", (), ""), Sight(gone=True)
    ]  # fmt: skip
    assert len(cluster.calls("scontrol")) == 1


@pytest.mark.parametrize("answer", ["unknown", "others"])
def test_a_job_that_slurm_has_forgotten_is_gone(cluster: Cluster, answer: str) -> None:
    cluster.says("squeue", "7|RUNNING|n1|None\n")
    looks(cluster, "7")
    if answer == "unknown":
        cluster.away("squeue", UNKNOWN)
    else:
        cluster.says("squeue", "8|RUNNING|n1|None\n")
    looks(cluster, "7")
    assert not (cluster.queue.seen("7") or Sight()).ended
    looks(cluster, "7")
    assert cluster.queue.seen("7") == Sight("RUNNING", ("n1",), "None", gone=True)
    assert cluster.queue.seconds_since_end("7") > 0


def test_a_job_that_is_gone_and_shows_up_again_is_there(cluster: Cluster) -> None:
    cluster.away("squeue", UNKNOWN)
    looks(cluster, "7", 2)
    assert (cluster.queue.seen("7") or Sight()).gone
    cluster.says("squeue", "7|RUNNING|n1|None\n")
    looks(cluster, "7")
    assert cluster.queue.seen("7") == Sight("RUNNING", ("n1",), "None")
    assert cluster.queue.seconds_since_end("7") == 0


@pytest.mark.parametrize(("state", "active"), [("PENDING", True), ("RUNNING", True), ("FAILED", False)])
def test_what_sacct_says_of_a_job_that_is_gone_is_kept(cluster: Cluster, state: str, active: bool) -> None:
    cluster.away("squeue", UNKNOWN)
    cluster.says("sacct", account("7", state))
    looks(cluster, "7", 2)
    assert cluster.queue.active_by_accounts("7") is active
    assert (cluster.queue.account("7") is None) is active


def test_without_accounts_scontrol_says_how_a_job_ended(cluster: Cluster) -> None:
    cluster.away("sacct", "Slurm accounting storage is disabled")
    cluster.says("squeue", "7|FAILED|n1|NonZeroExitCode\n")
    cluster.says("scontrol", details("7", "FAILED", "n[1-2]"))
    looks(cluster, "7", 1)
    assert not cluster.queue.keeps_accounts and len(cluster.calls("sacct")) == 1, "it says so itself, once"
    told = cluster.queue.account("7")
    assert told is not None
    assert (told.accounting.state, told.accounting.nodes) == ("FAILED", ("n1", "n2"))
    assert (told.accounting.queued_seconds, told.accounting.elapsed_seconds) == (2, 7)


def test_a_line_whose_nodes_cannot_be_read_is_passed_over() -> None:
    assert read_squeue("7|RUNNING|n[1-|None\n8|RUNNING|n1|None\n").keys() == {"8"}


def test_while_the_controller_is_away_all_stays_as_last_seen(cluster: Cluster) -> None:
    queue = cluster.queue
    cluster.says("squeue", "7|RUNNING|n1|None\n")
    queue.watch("7", every_seconds=0.05)
    cluster.look(lambda: queue.sight("7") is not None)
    cluster.away("squeue")
    before = queue.squeue_calls
    cluster.look(lambda: (queue.sight("7"), queue.squeue_calls > before + 2)[1])
    assert queue.seen("7") == Sight("RUNNING", ("n1",), "None")
    cluster.says("squeue", "7|FAILED|n1|None\n")
    cluster.look(lambda: (queue.sight("7") or Sight()).ended)


def test_without_sacct_it_is_soon_known_that_there_are_no_accounts(cluster: Cluster) -> None:
    cluster.says("squeue", "7|COMPLETED|n1|None\n")
    cluster.away("sacct", "Slurm accounting storage is disabled")
    cluster.queue.watch("7", every_seconds=0.05)
    assert cluster.queue.keeps_accounts
    cluster.look(lambda: (cluster.queue.sight("7"), cluster.queue.account("7"), not cluster.queue.keeps_accounts)[2])
    assert cluster.queue.seconds_since_end("7") > 0


def test_a_job_that_came_while_squeue_was_on_its_way_is_not_gone(cluster: Cluster) -> None:
    queue = cluster.queue
    queue.watch("7", every_seconds=30)
    queue._ask_squeue(["7"], began=time.monotonic() - 60)
    assert queue.seen("7") is None


def test_pauses_double_after_bad_calls_up_to_a_minute() -> None:
    pace = Pace()
    pauses = []
    for failed, took in [(False, 0.1), (True, 0.1), (False, 2.0), (True, 0.1), (True, 0.1), (True, 0.1), (False, 0.1)]:
        pace.called(took=took, failed=failed, every=5, now=100)
        pauses.append(pace.pause)
    assert pauses == [5, 10, 20, 40, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, 5]
    assert pace.next_at == 105


def test_a_forgotten_job_of_an_hour_that_comes_twice_is_asked_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where clocks are set back, a local time is two moments, and sacct was asked from the later one on."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        submitted = datetime(2026, 10, 25, 0, 40, tzinfo=UTC).timestamp()  # 02:40 in summer time, an hour later again
        cluster.queue.find("rw-1", datetime.fromtimestamp(submitted))
        [call] = cluster.calls("sacct")
        asked = datetime.fromisoformat(call.partition("--starttime=")[2].split()[0])
        assert max(asked.replace(fold=fold).timestamp() for fold in (0, 1)) <= submitted
    finally:
        monkeypatch.undo()
        time.tzset()
