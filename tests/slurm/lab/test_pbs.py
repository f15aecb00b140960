"""Jobs and studies under a real OpenPBS on the nodes of a lab: submitted, ended by each hand, found again."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from configs.plans.job import Submission
from configs.plans.paths import JobPaths, RunPaths
from configs.records.record import Status, read_record
from configs.targets.target import PbsTarget
from reports.reading.load import load_run
from slurm.schedulers import cluster
from slurm.schedulers.commands.partitions import Need
from slurm.schedulers.inventory import Inventory
from slurm.schedulers.pbs.queue import shared_pbs_queue
from tests.support.cluster.launches import read_end, wait_until
from tests.support.cluster.pbs_lab import PbsLab
from tests.support.cluster.slurm_jobs import accounting, finished, job_id, made
from tests.support.run_folders.studies import job_count, processes_of, rankwise, start, under_measurement, write_study

pytestmark = pytest.mark.slurm

TARGET = {"kind": "pbs", "name": "cluster", "queue": "workq", "nodes": 2, "poll_seconds": 1.0}


def job(run: Path, number: int = 1, nodes: int = 2, seconds: float = 0.01, **target: Any) -> JobPaths:
    return made(run, number, nodes, seconds, PbsTarget.model_validate(TARGET | target))


def running(paths: JobPaths) -> None:
    cluster.submit(paths.folder)
    begun = [paths.node_launcher(rank) for rank in range(2)]
    wait_until(lambda: cluster.poll(paths.folder) == "running" and all(map(Path.exists, begun)), "it to run", 60)


def test_a_job_on_two_nodes(pbs: PbsLab, tmp_path: Path) -> None:
    paths = job(tmp_path / "run")
    cluster.submit(paths.folder)
    before = shared_pbs_queue().qstat_calls
    (end,) = finished([paths])
    assert end.status is Status.COMPLETED, (end, paths.scheduler_log(0).read_text())
    told = accounting(paths)
    assert (told.job_id, told.state, told.nodes) == (job_id(paths), "COMPLETED", pbs.plan.node_names)
    assert told.elapsed_seconds is not None and told.queued_seconds is not None
    assert shared_pbs_queue().qstat_calls - before <= told.elapsed_seconds + told.queued_seconds + 8
    assert pbs.active() == []


def test_a_job_that_waits_says_why_and_is_released(pbs: PbsLab, tmp_path: Path) -> None:
    first, second = job(tmp_path / "run", 1, seconds=300), job(tmp_path / "run", 2)
    running(first)
    cluster.submit(second.folder)
    wait_until(lambda: (cluster.poll(second.folder), "pending: " in cluster.note(second.folder))[1], "a reason", 30)
    assert "pending: Not enough free nodes available" in cluster.note(second.folder)
    pbs.call("qhold", job_id(second))
    wait_until(lambda: (cluster.poll(second.folder), "held" in cluster.note(second.folder))[1], "it to be held", 30)
    assert cluster.note(second.folder).endswith(f"`qrls {job_id(second)}` lets it start")
    cluster.cancel(first.folder)
    pbs.call("qrls", job_id(second))
    assert finished([second])[0].status is Status.COMPLETED


def test_a_cancelled_job_leaves_nothing(pbs: PbsLab, tmp_path: Path) -> None:
    paths = job(tmp_path / "run", seconds=300)
    running(paths)
    assert cluster.note(paths.folder) == f"job {job_id(paths)} on {', '.join(pbs.plan.node_names)}"
    cluster.cancel(paths.folder)
    assert (read_end(paths).status, read_end(paths).message) == (Status.CANCELLED, "cancelled on request")
    wait_until(lambda: processes_of(paths.folder) == [], "its processes to end", 15)
    assert pbs.active() == []


def test_a_job_that_somebody_deletes(pbs: PbsLab, tmp_path: Path) -> None:
    paths = job(tmp_path / "run", seconds=300)
    running(paths)
    pbs.call("qdel", job_id(paths))
    (end,) = finished([paths])
    assert end.status is Status.CANCELLED and "cancelled through PBS" in (end.message or ""), end


def test_a_job_beyond_its_walltime(pbs: PbsLab, tmp_path: Path) -> None:
    paths = job(tmp_path / "run", nodes=1, seconds=300, time_limit_minutes=1)
    cluster.submit(paths.folder)
    (end,) = finished([paths], 150)
    assert end.status is Status.TIMEOUT and "PBS ended the job at its time limit" in (end.message or ""), end


@pytest.mark.parametrize("place", [1, 0], ids=["another node's", "the first node's"])
def test_a_node_whose_daemon_is_killed(pbs: PbsLab, tmp_path: Path, place: int) -> None:
    paths = job(tmp_path / "run", seconds=300)
    running(paths)
    wait_until(lambda: under_measurement(tmp_path / "run"), "a measurement")
    node = pbs.plan.node_names[place]
    pbs.kill_mom(node)
    try:
        (end,) = finished([paths], 120)
        assert (end.status, end.nodes) == (Status.NODE_FAILED, (node,)), end
    finally:
        pbs.start_mom(node)


def test_what_the_server_lacks_is_said_before_anything_is_started(pbs: PbsLab, tmp_path: Path) -> None:
    target = PbsTarget.model_validate(TARGET)
    assert Inventory().lacks(target, [Need(2, 1)]) == []
    assert Inventory().identity(target).startswith("server pbshead, queue workq, nodes of 1 CPU, ")
    targets = [TARGET | {"queue": "wrokq"}, TARGET | {"name": "wide", "cores_per_rank": 2}]
    told = rankwise("run", write_study(tmp_path, targets=targets), cwd=tmp_path)
    assert told.returncode == 2 and not (tmp_path / "runs").exists()
    assert "targets[0].queue: unknown queue wrokq of server pbshead\n" in told.stderr and "workq" in told.stderr
    assert "targets[1].nodes: server pbshead cannot give 1 node with 2 cores: it has 2 nodes of 1 CPU" in told.stderr
    assert pbs.active() == []


def test_a_study_from_one_node_to_two(pbs: PbsLab, tmp_path: Path) -> None:
    study = write_study(
        tmp_path,
        workload={"kind": "noop", "seconds": 0.2},
        experiments={"weak": {"kind": "weak", "grow": "nodes", "to": 2}},
        targets=[TARGET],
    )
    told = rankwise("run", study, cwd=tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "PBS, queue workq, up to 2 nodes, 1 rank per node" in told.stdout
    run = RunPaths(tmp_path / "runs" / "s")
    hosts = sorted(sorted(cell.measurements[0].record.hosts) for cell in load_run(run).cells.values())
    assert len(hosts[0]) == 1 and sorted(pbs.plan.node_names) in hosts
    assert (run.folder / "report.md").exists() and (run.folder / "preflight.json").exists()


def test_a_run_that_is_killed_finds_its_jobs_again(pbs: PbsLab, tmp_path: Path) -> None:
    study = write_study(
        tmp_path,
        workload={"kind": "noop", "seconds": 10},
        experiments={"weak": {"kind": "weak", "grow": "nodes", "to": 2}},
        targets=[TARGET | {"preflight": False}],
    )
    run = tmp_path / "runs" / "s"
    first = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), "a measurement", 90)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    submitted = {path: Submission.model_validate_json(path.read_bytes()) for path in run.glob("jobs/*/submission.json")}
    told = rankwise("run", study, cwd=tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr
    again = {path: Submission.model_validate_json(path.read_bytes()) for path in run.glob("jobs/*/submission.json")}
    assert submitted and again.items() >= submitted.items()
    assert job_count(run) == 2  # nothing was measured twice
    assert [read_record(path).status for path in run.glob("records/*/*.json")] == [Status.COMPLETED] * 2
