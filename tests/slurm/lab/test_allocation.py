"""Launches as steps of an allocation that somebody holds, on a real Slurm; salloc is the lab's own."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.plans.job import Job
from configs.plans.paths import JobPaths
from configs.records.record import Status
from slurm.schedulers import steps
from slurm.schedulers.adapter import adapter_for
from slurm.schedulers.commands.allocation import allocation_lacks, current_allocation
from slurm.schedulers.commands.listing import ClusterError
from slurm.schedulers.commands.partitions import Need, partition_nodes
from slurm.schedulers.commands.submission import slurm_target
from slurm.schedulers.refusals import REFUSED, Refused
from tests.support.cluster.lab import Lab
from tests.support.cluster.launches import in_measurement, read_end, wait_until
from tests.support.cluster.slurm_jobs import accounting, job_id, made, measurement_of

pytestmark = pytest.mark.slurm

Allocate = Callable[..., str]


@pytest.fixture
def allocate(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocate]:
    """Hold nodes as salloc does, with the variables of its shell."""
    held: list[str] = []

    def salloc(nodes: int = 2, partition: str = "lab") -> str:
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", f"--partition={partition}", "--job-name=held"]
        lab.slurm("salloc", *options, "--no-shell")
        found = lab.slurm("squeue", "--noheader", "--name=held", "--states=R", "--format=%i|%N").split()[-1]
        job, names = found.split("|")
        held.append(job)
        variables = {"JOB_ID": job, "JOB_NODELIST": names, "JOB_PARTITION": partition}
        variables["JOB_CPUS_PER_NODE"] = f"1(x{nodes})" if nodes > 1 else "1"
        for name, value in (variables | {"NTASKS": str(nodes), "NNODES": str(nodes)}).items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        return job

    yield salloc
    steps.cancel_many([path.parent for path in tmp_path.rglob("job.json")])
    for job in held:
        lab.slurm("scancel", job, check=False)
        lab.wait_until_ended(job)


def step(run: Path, number: int = 1, nodes: int = 1, seconds: float = 0.01, **target: object) -> JobPaths:
    return made(run, number, nodes, seconds, partition=None, allocation="current", **target)


def ended(paths: JobPaths) -> Status:
    wait_until(lambda: steps.poll(paths.folder) == "ended", "the step to end", 120)
    return read_end(paths).status


def test_launches_run_as_steps_and_the_allocation_stays(lab: Lab, tmp_path: Path, allocate: Allocate) -> None:
    held = allocate(2)
    jobs = [step(tmp_path / "run", 1), step(tmp_path / "run", 2), step(tmp_path / "run", 3, nodes=2)]
    assert adapter_for(slurm_target(Job.model_validate_json(jobs[0].job.read_bytes())).adapter) is steps
    steps.submit_many([paths.folder for paths in jobs])
    assert [ended(paths) for paths in jobs] == [Status.COMPLETED] * 3
    assert {job_id(paths) for paths in jobs} == {held}
    ids = {accounting(paths).job_id for paths in jobs}
    assert len(ids) == 3 and all(re.fullmatch(rf"{held}\.\d+", name) for name in ids)
    assert accounting(jobs[2]).nodes == lab.plan.node_names and accounting(jobs[2]).cpu_seconds is not None
    assert lab.state(held) == "RUNNING"
    assert set(lab.queue()) == {held}  # nothing was submitted


def test_cancel_ends_steps_that_run_and_that_wait(lab: Lab, tmp_path: Path, allocate: Allocate) -> None:
    held = allocate(1)
    running, waiting = (step(tmp_path / "run", number, seconds=300) for number in (1, 2))
    steps.submit(running.folder)
    wait_until(in_measurement(running, measurement_of(running)), "it to run", 60)
    steps.submit(waiting.folder)
    wait_until(lambda: "pending" in steps.note(waiting.folder), "it to wait", 30)
    assert (steps.poll(running.folder), steps.poll(waiting.folder)) == ("running", "waiting")
    steps.cancel_many([running.folder, waiting.folder])
    assert [read_end(paths).status for paths in (running, waiting)] == [Status.CANCELLED] * 2
    assert read_end(running).measurement == measurement_of(running).name
    assert lab.slurm("squeue", "--steps", "--noheader", f"--jobs={held}", "--format=%j").split() in ([], ["extern"])
    assert lab.state(held) == "RUNNING"


def test_a_step_of_a_killed_run_is_found_again(
    lab: Lab, tmp_path: Path, allocate: Allocate, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate(1)
    paths = step(tmp_path / "run", seconds=300)
    steps.submit(paths.folder)
    wait_until(in_measurement(paths, measurement_of(paths)), "it to run", 60)
    monkeypatch.setattr(steps, "_processes", {})  # another process knows only the files
    assert steps.poll(paths.folder) == "running"
    monkeypatch.delenv("SLURM_JOB_ID")
    steps.cancel(paths.folder)
    assert read_end(paths).status is Status.CANCELLED


@pytest.mark.parametrize(("how", "status"), [("high", Status.PREEMPTED), ("scancel", Status.CANCELLED)])
def test_the_end_of_the_allocation_is_the_end_of_its_steps(
    lab: Lab, tmp_path: Path, allocate: Allocate, how: str, status: Status
) -> None:
    held = allocate(2)
    running, waiting = (step(tmp_path / "run", number, nodes=2, seconds=300) for number in (1, 2))
    steps.submit(running.folder)
    wait_until(in_measurement(running, measurement_of(running)), "it to run", 60)
    steps.submit(waiting.folder)
    wait_until(lambda: "pending" in steps.note(waiting.folder), "it to wait", 30)
    if how == "scancel":
        lab.slurm("scancel", held)
    else:
        lab.slurm("sbatch", f"--partition={how}", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
    assert (ended(running), ended(waiting)) == (status, Status.CANCELLED)
    assert "before the step began" in str(read_end(waiting).message)
    message = read_end(running).message
    assert message is not None
    assert ("PREEMPTED" if how == "high" else f"allocation {held} ended (CANCELLED)") in message
    late = step(tmp_path / "run", 3)
    with pytest.raises(Refused, match=rf"job {held} of SLURM_JOB_ID") as refused:
        steps.submit(late.folder)
    assert refused.value.status is Status.CANCELLED


def test_what_srun_refuses_is_final(tmp_path: Path, allocate: Allocate) -> None:
    held = allocate(1)
    paths = step(tmp_path / "run", nodes=2)
    steps.submit(paths.folder)
    assert ended(paths) is Status.FAILED
    end = read_end(paths)
    assert end.kind == REFUSED and f"allocation {held}: srun: " in str(end.message)


def test_an_allocation_that_is_missing_or_too_small_is_told(
    lab: Lab, allocate: Allocate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ClusterError, match="SLURM_JOB_ID is not set"):
        current_allocation()
    held = allocate(1)
    target = slurm_target(Job.model_validate_json(step(tmp_path / "run").job.read_bytes()))
    found = current_allocation()
    assert (found.job_id, len(found.nodes), found.cores) == (held, 1, (1,))
    assert partition_nodes(target) == found.nodes
    assert allocation_lacks(target, [Need(nodes=1, cores=1)], found) == []
    (problem,) = allocation_lacks(target, [Need(nodes=2, cores=1)], found)
    assert f"job {held} is too small for 2 nodes with 1 core each: it has 1 node with 1 core" in problem
    monkeypatch.setenv("SLURM_JOB_ID", "999999999")
    with pytest.raises(ClusterError, match="slurmctld does not know it"):
        current_allocation()
    assert os.environ["SLURM_JOB_ID"]
