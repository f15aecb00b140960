"""Jobs through submitit to a real Slurm: submitted, watched, cancelled, refused, and found again by others."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.records.record import Status
from configs.targets.target import SlurmTarget
from slurm.schedulers import cluster
from slurm.schedulers.adapter import adapter_for
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.commands.partitions import read_cluster
from slurm.schedulers.commands.states import NEVER_BEGAN, STANDINGS
from slurm.schedulers.commands.trial import trial
from slurm.schedulers.queue import shared_queue
from slurm.schedulers.refusals import REFUSED, Refused
from tests.support.cluster.lab import Lab
from tests.support.cluster.launches import in_measurement, part, read_end, wait_until
from tests.support.cluster.slurm_jobs import accounting, finished, job_id, made, measurement_of

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def nothing_left(lab: Lab, tmp_path: Path) -> Iterator[None]:
    """A test that fails leaves nothing in the queue for the next."""
    yield
    cluster.cancel_many([path.parent for path in tmp_path.rglob("job.json")])


def test_the_adapter_is_chosen_by_the_targets_kind() -> None:
    assert adapter_for("slurm").submit_many is cluster.submit_many


def test_a_job_of_two_nodes_in_a_folder_with_a_difficult_name(lab: Lab, tmp_path: Path) -> None:
    paths = made(tmp_path / 'it\'s a $HOME "run"', nodes=2, setup=['echo "up on $SLURMD_NODENAME"'])
    cluster.submit(paths.folder)
    assert job_id(paths) in cluster.note(paths.folder) or cluster.note(paths.folder) == f"job {job_id(paths)}"
    assert finished([paths])[0].status is Status.COMPLETED
    told = accounting(paths)
    assert (told.state, told.nodes) == ("COMPLETED", lab.plan.node_names)
    assert told.elapsed_seconds and told.cpu_seconds and told.max_rss_bytes and told.queued_seconds is not None
    assert [part(paths, measurement_of(paths), rank).host for rank in (0, 1)] == list(lab.plan.node_names)
    # Every node ran the target's own lines; what Slurm's programs said lies in the job's folder.
    for rank, name in enumerate(lab.plan.node_names):
        assert f"up on {name}" in paths.scheduler_log(rank).read_text()
        assert not paths.scheduler_log(rank).is_symlink()
    assert lab.queue() == [] or job_id(paths) not in lab.queue()


def test_an_array_is_asked_after_once_an_interval(lab: Lab, tmp_path: Path) -> None:
    jobs = [made(tmp_path, number) for number in range(1, 6)]
    queue = shared_queue()
    before, began = (queue.squeue_calls, queue.sacct_calls), time.monotonic()
    cluster.submit_many([paths.folder for paths in jobs])
    ids = [job_id(paths) for paths in jobs]
    assert ids == [f"{ids[0].partition('_')[0]}_{index}" for index in range(5)]
    assert [end.status for end in finished(jobs)] == [Status.COMPLETED] * 5
    intervals = (time.monotonic() - began) / 1.0
    assert queue.squeue_calls - before[0] <= intervals + 2
    assert queue.sacct_calls - before[1] <= intervals + 2
    assert [accounting(paths).job_id for paths in jobs] == ids


def test_cancel_ends_what_runs_and_what_waits_together(lab: Lab, tmp_path: Path) -> None:
    jobs = [made(tmp_path, number, seconds=300) for number in (1, 2)] + [made(tmp_path, 3, nodes=2, seconds=300)]
    cluster.submit_many([paths.folder for paths in jobs])
    running = jobs[:2]
    wait_until(lambda: all(in_measurement(paths, measurement_of(paths))() for paths in running), "two to run", 120)
    wait_until(lambda: cluster.poll(jobs[0].folder) == "running", "the queue to say so")
    assert cluster.poll(jobs[2].folder) == "waiting"
    wait_until(lambda: [cluster.poll(jobs[2].folder), "pending: " in cluster.note(jobs[2].folder)][1], "the reason")
    assert f"job {job_id(jobs[0])} on " in cluster.note(jobs[0].folder)
    cluster.cancel_many([paths.folder for paths in jobs])
    assert [read_end(paths).status for paths in jobs] == [Status.CANCELLED] * 3
    assert [read_end(paths).measurement for paths in running] == [measurement_of(paths).name for paths in running]
    assert not {job_id(paths) for paths in jobs} & set(lab.queue())
    cluster.cancel(jobs[0].folder)  # again: nothing happens


def test_somebody_elses_scancel_and_one_of_many(lab: Lab, tmp_path: Path) -> None:
    paths = made(tmp_path, seconds=300)
    cluster.submit(paths.folder)
    wait_until(in_measurement(paths, measurement_of(paths)), "it to run")
    lab.slurm("scancel", job_id(paths))
    end = finished([paths])[0]
    assert (end.status, end.measurement) == (Status.CANCELLED, measurement_of(paths).name)
    assert end.message is not None and "through Slurm" in end.message


REFUSALS = [
    ({"partition": "nowhere"}, r"target\.partition 'nowhere'"),
    ({"constraint": "nothing"}, r"target\.constraint 'nothing'"),
    ({"reservation": "nobody"}, r"target\.reservation 'nobody'"),
    ({"memory_per_node": "900G"}, r"target\.memory_per_node '900G'"),
    ({"gpus_per_node": 1}, r"target\.gpus_per_node 1"),
    ({"extra": {"no-such-thing": 1}}, r"target\.extra"),
    ({"extra": {"requeue": True}}, r"target\.extra: requeue"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSALS)
def test_what_slurm_refuses_names_the_field(lab: Lab, tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    paths = made(tmp_path, **fields)
    with pytest.raises(Refused, match=named):
        cluster.submit(paths.folder)
    assert not paths.submission.exists() and not paths.submitting.exists()


@pytest.mark.parametrize(("fields", "named"), REFUSALS)
def test_sbatch_refuses_the_same_when_it_is_only_asked(lab: Lab, fields: dict[str, Any], named: str) -> None:
    sound = {"nodes": 2, "partition": "lab"}
    assert trial(SlurmTarget.model_validate(sound), nodes=1, cores=1) is None
    told = trial(SlurmTarget.model_validate(sound | fields), nodes=1, cores=1)
    assert told is not None and re.search(named, told)


def test_a_job_that_would_wait_for_ever_is_given_up(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_HOPELESS_SECONDS", 1.5)
    lab.slurm("scontrol", "create", "partitionname=brief", "maxtime=1", "nodes=ALL")
    try:
        paths = made(tmp_path, partition="brief")
        cluster.submit(paths.folder)
        end = finished([paths])[0]
        assert (end.status, end.kind) == (Status.FAILED, REFUSED)
        assert end.message is not None and "target.time_limit_minutes" in end.message
        assert job_id(paths) not in lab.queue()
    finally:
        lab.slurm("scontrol", "delete", "partitionname=brief", check=False)


SUBMITTER = """
import os, sys
from pathlib import Path
from slurm.schedulers import cluster
cluster.submit_many([Path(name) for name in sys.argv[1:]])
os.kill(os.getpid(), 9)
"""


def test_jobs_outlive_their_submitter_and_are_adopted(lab: Lab, tmp_path: Path) -> None:
    jobs = [made(tmp_path, number, seconds=0.5) for number in (1, 2, 3)]
    killed = subprocess.run([sys.executable, "-c", SUBMITTER, *(str(paths.folder) for paths in jobs)], timeout=600)
    assert killed.returncode == -9
    ids = [job_id(paths) for paths in jobs]
    # One whose submitter did not even come to write down the id: it is found by its name and its place in the array.
    jobs[1].submission.unlink()
    assert [end.status for end in finished(jobs)] == [Status.COMPLETED] * 3
    assert [job_id(paths) for paths in jobs] == ids


def test_a_folder_that_was_never_submitted_is_lost_at_once(lab: Lab, tmp_path: Path) -> None:
    paths = made(tmp_path)
    assert cluster.poll(paths.folder) == "ended"
    assert read_end(paths).status is Status.LOST


def test_a_submission_that_slurm_never_had_is_lost_after_its_grace(lab: Lab, tmp_path: Path) -> None:
    paths = made(tmp_path)
    paths.submitting.write_text('{"name": "rw-00000000-nobody", "index": null}')
    assert cluster.poll(paths.folder) == "waiting"
    old = time.time() - 1000
    os.utime(paths.submitting, (old, old))
    assert finished([paths])[0].status is Status.LOST


@pytest.mark.parametrize("broken", [{"python": "/nowhere/python3"}, {"setup": ["false"]}])
def test_a_job_whose_launchers_never_begin_says_so(lab: Lab, tmp_path: Path, broken: dict[str, Any]) -> None:
    paths = made(tmp_path, nodes=2, **broken)
    cluster.submit(paths.folder)
    end = finished([paths])[0]
    assert (end.status, end.kind) == (Status.FAILED, NEVER_BEGAN)
    assert end.message is not None and "targets[].shared" in end.message
    assert accounting(paths).state == "FAILED"


def test_secrets_and_a_users_defaults_do_not_travel(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "hush-42")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "777")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("HARMLESS", "fine")
    paths = made(tmp_path, setup=["env"])
    cluster.submit(paths.folder)
    assert finished([paths])[0].status is Status.COMPLETED
    said = paths.scheduler_log(0).read_text()
    assert "HARMLESS=fine" in said and "hush-42" not in said


def test_this_slurms_states_are_all_in_the_table(lab: Lab) -> None:
    refused = subprocess.run(["squeue", "--states=nonsense"], capture_output=True, text=True)
    words = refused.stderr.partition("include:")[2].strip().split(",")
    assert len(words) > 15
    assert set(words) <= set(STANDINGS)


def test_a_cluster_is_named_to_every_program(lab: Lab, tmp_path: Path) -> None:
    """One cluster that slurmdbd has registered is all that a lab has; the programs find it by its name all the same."""
    named = lab.plan.name
    jobs = [made(tmp_path, number, cluster=named) for number in (1, 2)] + [made(tmp_path, 3, 2, 300, cluster=named)]
    cluster.submit_many([paths.folder for paths in jobs])
    assert [end.status for end in finished(jobs[:2])] == [Status.COMPLETED] * 2
    assert accounting(jobs[0]).cpu_seconds
    wait_until(in_measurement(jobs[2], measurement_of(jobs[2])), "it to run", 120)
    cluster.cancel(jobs[2].folder)
    assert read_end(jobs[2]).status is Status.CANCELLED
    assert read_cluster(named).name == read_cluster().name


def test_an_unknown_cluster_is_refused_by_its_field(lab: Lab, tmp_path: Path) -> None:
    paths = made(tmp_path, cluster="nowhere")
    with pytest.raises(Refused, match=r"target\.cluster 'nowhere' of slurm: sbatch: No cluster 'nowhere'"):
        cluster.submit(paths.folder)
    with pytest.raises(ClusterError, match="cluster nowhere"):
        read_cluster("nowhere")
    assert "target.cluster" in str(trial(SlurmTarget(cluster="nowhere"), nodes=1, cores=1))
