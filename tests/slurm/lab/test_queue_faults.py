"""A real Slurm whose programs say too little, whose jobs are requeued, held and denied."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.plans.job import Job
from configs.plans.paths import JobPaths
from configs.records.record import Status
from slurm.schedulers import cluster
from slurm.schedulers.commands.calls import run_slurm
from slurm.schedulers.commands.details import details_command, read_details
from slurm.schedulers.queue import Queue
from slurm.schedulers.refusals import Limited, Refused
from slurm.schedulers.waiting import read_waiting
from tests.support.cluster.lab import Lab
from tests.support.cluster.launches import in_measurement, wait_until
from tests.support.cluster.slurm_jobs import accounting, finished, job_id, made, measurement_of

pytestmark = pytest.mark.slurm

SILENT = """#!/bin/sh
echo . >>{folder}/calls
[ $(($(wc -l <{folder}/calls) % 6)) -lt 3 ] || exit 0
exec {program} "$@"
"""
NO_ACCOUNTS = "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n"


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab, tmp_path: Path) -> Iterator[None]:
    """A test that fails leaves nothing in the queue for the next."""
    yield
    cluster.cancel_many([path.parent for path in tmp_path.rglob("job.json")])


def stand_in(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program before Slurm's own on the PATH of this process and of its look at the queue."""
    folder.mkdir()
    (folder / name).write_text(script.format(folder=folder, program=shutil.which(name)))
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    queue = Queue()
    monkeypatch.setattr(cluster, "shared_queue", lambda *_: queue)
    return folder


def test_a_squeue_that_says_nothing_in_half_of_its_calls_loses_no_job(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = stand_in(tmp_path / "bin", "squeue", SILENT, monkeypatch)
    jobs = [made(tmp_path / "run", number, seconds=4, poll_seconds=0.5) for number in range(1, 5)]
    cluster.submit_many([paths.folder for paths in jobs])
    assert [end.status for end in finished(jobs, 240)] == [Status.COMPLETED] * 4
    assert len((told / "calls").read_text().split()) > 5, "some of them were silent"


def test_all_tasks_of_a_long_irregular_array_are_seen(lab: Lab) -> None:
    """Slurm shortens what such an array is called to 64 characters, `0,1,4,9,...`, unless it is asked not to."""
    tasks = [number * number for number in range(30)]
    array = f"--array={','.join(map(str, tasks))}"
    job = lab.slurm("sbatch", "--parsable", "--hold", array, "--output=/dev/null", "--wrap=true").strip()
    try:
        seen = read_details(run_slurm(details_command(job), os.environ, 60).text)
    finally:
        lab.slurm("scancel", job)
    assert set(seen) == {f"{job}_{task}" for task in tasks}
    assert {details.state for details in seen.values()} == {"PENDING"}


def test_without_accounts_the_controller_and_the_launchers_decide(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "bin", "sacct", NO_ACCOUNTS, monkeypatch)
    paths = made(tmp_path / "run", nodes=2)
    cluster.submit(paths.folder)
    assert finished([paths])[0].status is Status.COMPLETED
    told = accounting(paths)
    assert (told.state, told.nodes) == ("COMPLETED", lab.plan.node_names)
    assert told.elapsed_seconds is not None and told.queued_seconds is not None


def requeued(lab: Lab, tmp_path: Path) -> tuple[JobPaths, str]:
    paths = made(tmp_path, nodes=2, seconds=300)
    cluster.submit(paths.folder)
    wait_until(in_measurement(paths, measurement_of(paths)), "it to run", 120)
    wait_until(lambda: cluster.poll(paths.folder) == "running", "the queue to say so")
    lab.slurm("scontrol", "update", f"jobid={job_id(paths)}", "requeue=1")
    lab.slurm("scontrol", "requeue", job_id(paths))
    return paths, job_id(paths)


def test_a_requeued_job_is_preempted_and_cancelled(lab: Lab, tmp_path: Path) -> None:
    paths, name = requeued(lab, tmp_path)
    end = finished([paths])[0]
    assert (end.status, end.kind) == (Status.PREEMPTED, "REQUEUED")
    assert end.measurement is not None and name not in lab.queue()
    assert accounting(paths).state == "REQUEUED"


def test_a_requeued_job_that_starts_again_unseen_does_nothing(lab: Lab, tmp_path: Path) -> None:
    paths, name = requeued(lab, tmp_path)
    before = [paths.node_launcher(rank).read_bytes() for rank in (0, 1)]
    wait_until(lambda: "PENDING" in lab.slurm("squeue", "--noheader", f"--jobs={name}", "--format=%T"), "the requeue")
    lab.slurm("scontrol", "update", f"jobid={name}", "starttime=now")
    assert lab.wait_until_ended(name, 120) == "COMPLETED"
    assert [paths.node_launcher(rank).read_bytes() for rank in (0, 1)] == before
    assert finished([paths])[0].status is Status.PREEMPTED


def test_a_held_job_is_told_and_given_up_when_its_target_says_so(lab: Lab, tmp_path: Path) -> None:
    paths = made(tmp_path, extra={"hold": True}, max_queue_minutes=0.1)
    cluster.submit(paths.folder)
    wait_until(lambda: [cluster.poll(paths.folder), "held: JobHeld" in cluster.note(paths.folder)][1], "the reason", 30)
    kept = read_waiting(paths)
    assert kept is not None and kept.reason.startswith("JobHeld")
    end = finished([paths])[0]
    assert end.status is Status.CANCELLED and end.message is not None
    assert "max_queue_minutes 0.1" in end.message and "JobHeld" in end.message
    assert job_id(paths) not in lab.queue()


def test_a_qos_that_denies_names_the_field_and_one_that_counts_jobs_may_take_them_later(
    lab: Lab, tmp_path: Path
) -> None:
    lab.add_qos("single", "MaxTRESPerJob=node=1", "flags=DenyOnLimit")
    lab.add_qos("few", "MaxSubmitJobsPerUser=1", "flags=DenyOnLimit")
    with pytest.raises(Refused, match=r"target\.nodes 2 of slurm: sbatch: QOSMaxNodePerJobLimit"):
        cluster.submit(made(tmp_path, 1, nodes=2, qos="single").folder)
    pair = [made(tmp_path, number, qos="few") for number in (2, 3)]
    with pytest.raises(Limited, match="QOSMaxSubmitJobPerUserLimit"):
        cluster.submit_many([paths.folder for paths in pair])
    assert not any(paths.submitting.exists() for paths in pair), "it is sure that none was taken"
    cluster.submit(pair[0].folder)
    assert finished(pair[:1])[0].status is Status.COMPLETED


def test_a_limit_of_one_job_without_that_flag_is_final_in_the_queue(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_HOPELESS_SECONDS", 1.5)
    lab.add_qos("narrow", "MaxTRESPerJob=node=1")
    paths = made(tmp_path, nodes=2, qos="narrow")
    cluster.submit(paths.folder)
    end = finished([paths])[0]
    assert end.status is Status.FAILED and end.message is not None
    assert "target.nodes" in end.message and "QOSMaxNodePerJobLimit" in end.message
    assert job_id(paths) not in lab.queue()


def test_a_job_that_sbatch_took_without_saying_so_is_not_submitted_twice(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = made(tmp_path, seconds=2)
    cluster.submit(paths.folder)
    first = job_id(paths)
    paths.submission.unlink()  # as after a time-out of sbatch
    time.sleep(1)
    cluster.submit(paths.folder)
    assert job_id(paths) == first
    assert finished([paths])[0].status is Status.COMPLETED
    assert Job.model_validate_json(paths.job.read_bytes()).name == read_name(lab, first)


def read_name(lab: Lab, job: str) -> str:
    """What of the job's name is the folder's: what follows is of this submission alone."""
    told = lab.slurm("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job, "--format=jobname")
    return told.strip().split("-", 2)[2].rpartition("-")[0]
