"""Studies through Prefect to a real Slurm: many jobs at once, bounds held, faults retried, deaths survived."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from configs.records.record import Record, read_record
from flows.server.local import ApiLease, lease_server
from tests.support.run_folders.studies import (
    job_count,
    processes_of,
    rankwise,
    start,
    status,
    under_measurement,
    wait_until,
    write_study,
)

if TYPE_CHECKING:
    from tests.support.cluster.lab import Lab

pytestmark = pytest.mark.slurm

START_SECONDS = 200.0
END_SECONDS = 20.0
SLURM = {"kind": "slurm", "name": "lab", "partition": "lab", "nodes": 2, "poll_seconds": 0.5, "preflight": False}


@pytest.fixture(scope="module", autouse=True)
def api() -> Iterator[ApiLease]:
    """One local server for all runs of this file."""
    with lease_server() as lease:
        lease.wait_until_healthy()
        yield lease


def lab_study(folder: Path, name: str = "s", target: dict[str, Any] | None = None, **changes: Any) -> Path:
    return write_study(folder, name, targets=[SLURM | (target or {})], **changes)


def records(run: Path) -> list[Record]:
    """All attempts, oldest first."""
    found = [read_record(path) for path in run.glob("records/*/*.json")]
    return sorted(found, key=lambda record: (record.job, record.position))


def in_queue(lab: "Lab", run: Path) -> list[str]:
    """Jobs of one run, by the run folder in their comment: `id state`."""
    told = lab.slurm("squeue", "--noheader", "--array", "--format=%i %T %k")
    return [line.rpartition(" ")[0] for line in told.splitlines() if line.split(maxsplit=2)[2:] == [str(run)]]


@contextmanager
def queue_watched(lab: "Lab", run: Path) -> Iterator[list[list[str]]]:
    """What the queue held of a run, again and again, asked apart from the run."""
    seen: list[list[str]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.3):
            seen.append(in_queue(lab, run))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def running(states: list[str]) -> int:
    return sum(1 for state in states if state.endswith("RUNNING"))


def test_a_study_on_two_nodes_has_a_record_of_everything(lab: "Lab", tmp_path: Path) -> None:
    """Two layouts, two repeats: measured on the nodes, with the scheduler's accounts, and nothing left behind."""
    experiments = {
        "grid": {"kind": "sweep", "over": {"label": ["a", "b"]}},
        "strong": {"kind": "strong", "grow": "dp", "to": 2, "base": {"items": 2}},
    }
    study, run = lab_study(tmp_path, experiments=experiments, measuring={"repeats": 2}), tmp_path / "runs" / "s"
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = status(run)
    assert [(row["status"], row["attempts"]) for row in rows] == [("completed", 1)] * 8
    assert all(row["job"] for row in rows)
    made = records(run)
    assert {len(set(record.hosts)) for record in made} == {1, 2}
    assert {host for record in made for host in record.hosts} <= set(lab.plan.node_names)
    assert all(record.accounting and record.accounting.elapsed_seconds is not None for record in made)
    assert job_count(run) >= 4 and not in_queue(lab, run)
    again = rankwise("run", study, cwd=tmp_path)
    assert "8 of 8 measurements were already completed" in again.stdout, again.stdout + again.stderr


def test_the_queue_never_holds_more_than_it_may(lab: "Lab", tmp_path: Path) -> None:
    """Six jobs of two shapes through a queue of three, of which one may run: arrays of two shapes are two arrays."""
    experiments = {
        "grid": {"kind": "sweep", "over": {"label": ["a", "b"]}},
        "strong": {"kind": "strong", "grow": "dp", "to": 2, "base": {"items": 2}},
    }
    study = lab_study(
        tmp_path, target={"max_queued": 3, "max_running": 1}, experiments=experiments, pack=False,
        workload={"kind": "noop", "seconds": 0.2},
    )  # fmt: skip
    run = tmp_path / "runs" / "s"
    with queue_watched(lab, run) as seen:
        done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["status"] for row in status(run)] == ["completed"] * 4
    assert 1 <= max(map(len, seen)) <= 3
    assert max(map(running, seen)) == 1


def test_jobs_that_a_killed_run_left_are_adopted_at_once_and_none_is_submitted_again(
    lab: "Lab", tmp_path: Path
) -> None:
    """Killed while two jobs run and two wait; a third pair was never submitted."""
    experiments = {"grid": {"kind": "sweep", "over": {"label": list("abcdef")}}}
    study = lab_study(
        tmp_path, target={"max_queued": 4}, experiments=experiments, pack=False,
        workload={"kind": "noop", "seconds": 4.0},
    )  # fmt: skip
    run = tmp_path / "runs" / "s"
    first = start("run", study, cwd=tmp_path)
    wait_until(
        lambda: under_measurement(run) and len(in_queue(lab, run)) == 4,
        what="a measurement, with the queue full",
        seconds=START_SECONDS,
    )
    first.kill()
    first.wait()
    jobs = job_count(run)
    second = start("run", study, cwd=tmp_path)
    assert second.wait(timeout=600) == 0, (tmp_path / "out.log").read_text()
    assert (tmp_path / "out.log").read_text().count("adopted 000") >= 3
    assert [(row["status"], row["attempts"]) for row in status(run)] == [("completed", 1)] * 6
    assert job_count(run) == jobs + 2, "only what was never submitted"
    assert not in_queue(lab, run)


def _interrupt(process: "subprocess.Popen[str]", _: ApiLease) -> None:
    os.killpg(process.pid, signal.SIGINT)


def ask(api: ApiLease, path: str, body: dict[str, Any]) -> Any:
    """What the Prefect API says."""
    request = Request(f"{api.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        return json.load(answer)


def _cancel(_: "subprocess.Popen[str]", api: ApiLease) -> None:
    found = ask(api, "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}})
    ask(api, f"/flow_runs/{found[0]['id']}/set_state", {"state": {"type": "CANCELLING"}, "force": False})


@pytest.mark.parametrize(("end", "said"), [(_interrupt, "interrupted"), (_cancel, "cancelled")])
def test_what_ends_a_run_ends_all_its_jobs(
    lab: "Lab", tmp_path: Path, api: ApiLease, end: Callable[["subprocess.Popen[str]", ApiLease], None], said: str
) -> None:
    experiments = {"grid": {"kind": "sweep", "over": {"label": list("abcd")}}}
    study = lab_study(tmp_path, experiments=experiments, pack=False, workload={"kind": "noop", "seconds": 60.0})
    run = tmp_path / "runs" / "s"
    process = start("run", study, cwd=tmp_path)
    wait_until(
        lambda: under_measurement(run) and len(in_queue(lab, run)) == 4,
        what="a measurement, with all queued",
        seconds=START_SECONDS,
    )
    end(process, api)
    assert process.wait(timeout=600) == 1
    wait_until(lambda: not in_queue(lab, run), what="an empty queue", seconds=END_SECONDS)
    said_in_all = (tmp_path / "out.log").read_text()
    assert f"{said}: all launches ended" in said_in_all, said_in_all
    assert {row["status"] for row in status(run)} == {"cancelled", "waiting"}


@contextmanager
def without_slurmd(lab: "Lab", node: str) -> Iterator[None]:
    """Kill a node's slurmd; afterwards the node works again."""
    from slurm.lab import daemons

    daemon = daemons.slurmd(lab.plan, node)
    daemons.stop(lab.plan, daemon)
    try:
        yield
    finally:
        daemons.start_daemon(lab.plan, daemon)
        daemons.wait_until_it_works(lab.plan, daemon)
        wait_until(lambda: not lab.slurm("sinfo", "--noheader", "--nodes", node, "--states=down", "--format=%N"))


def test_a_measurement_that_a_node_lost_is_made_on_another(lab: "Lab", tmp_path: Path) -> None:
    """The first attempt hangs on a node whose slurmd is killed; the second leaves that node out."""
    work = {"kind": "noop", "seconds": 0.05, "fault": "hang", "fault_attempts": 1}
    grid = {"grid": {"kind": "sweep", "over": {"label": ["a"]}}}
    study = lab_study(tmp_path, experiments=grid, workload=work, measuring={"cell_timeout_seconds": 100})
    run = tmp_path / "runs" / "s"
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    (node,) = lab.slurm("squeue", "--noheader", "--states=RUNNING", "--format=%N").split()
    with without_slurmd(lab, node):
        assert process.wait(timeout=600) == 0, (tmp_path / "out.log").read_text()
    lost, made = records(run)
    assert (lost.status, lost.attempt, made.status, made.attempt) == ("node_failed", 1, "completed", 2)
    assert node not in made.hosts and set(made.hosts) < set(lab.plan.node_names)
    assert json.loads((run / "jobs" / made.job / "job.json").read_bytes())["exclude"] == [node]
    assert not in_queue(lab, run)
    wait_until(lambda: not processes_of(run), what="the end of all processes", seconds=END_SECONDS)


def test_a_measurement_that_was_suspended_is_made_again(lab: "Lab", tmp_path: Path) -> None:
    """Slurm stops a job for longer than its measurement takes, and may take; the rank that wakes finishes at once."""
    study = lab_study(
        tmp_path,
        experiments={"grid": {"kind": "sweep", "over": {"label": ["a"]}}},
        workload={"kind": "noop", "seconds": 10.0},  # squeue and scontrol may take seconds of it
        measuring={"cell_timeout_seconds": 14},
    )
    run = tmp_path / "runs" / "s"
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    (job,) = lab.slurm("squeue", "--noheader", "--format=%i").split()
    lab.slurm("scontrol", "suspend", job)
    try:
        wait_until(lambda: in_queue(lab, run) == [f"{job} SUSPENDED"], what="the suspension")
        time.sleep(15)
    finally:
        lab.slurm("scontrol", "resume", job)
    assert process.wait(timeout=600) == 0, (tmp_path / "out.log").read_text()
    paused, made = records(run)
    assert (paused.status, paused.attempt, made.status, made.attempt) == ("preempted", 1, "completed", 2)
    assert paused.failure is not None and "suspended for 1" in paused.failure.message
    assert not in_queue(lab, run)


def test_what_sbatch_refuses_is_given_up_in_its_words(lab: "Lab", tmp_path: Path) -> None:
    study = lab_study(tmp_path, target={"extra": {"licenses": "no-such-licence"}}, pack=False)
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    rows = status(tmp_path / "runs" / "s")
    assert [(row["status"], row["attempts"]) for row in rows] == [("failed", 1)] * 2
    assert all("licens" in row["failure"].lower() for row in rows)
    assert "Traceback" not in done.stdout + done.stderr


def test_a_budget_of_time_ends_what_waits_in_the_queue(lab: "Lab", tmp_path: Path) -> None:
    """The nodes are others' for longer than the budget lasts: nothing is begun, and nothing stays queued."""
    blocker = lab.slurm("sbatch", "--parsable", "--partition=lab", "--nodes=2", "--output=/dev/null", "--wrap=sleep 60")
    try:
        study = lab_study(tmp_path, measuring={"budget_minutes": 0.1})
        done = rankwise("run", study, cwd=tmp_path)
    finally:
        lab.slurm("scancel", blocker.strip())
    assert done.returncode == 3, done.stdout + done.stderr
    assert [row["status"] for row in status(tmp_path / "runs" / "s")] == ["over_budget"] * 2
    assert not in_queue(lab, tmp_path / "runs" / "s")


def test_a_local_target_beside_a_cluster(lab: "Lab", tmp_path: Path) -> None:
    study = write_study(tmp_path, targets=[{"name": "here"}, SLURM], pack=False)
    done = rankwise("run", study, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    made = records(tmp_path / "runs" / "s")
    assert sorted(record.cell.target for record in made) == ["here", "here", "lab", "lab"]
    assert max(record.finished_at or "" for record in made if record.cell.target == "lab") < min(
        record.started_at or "" for record in made if record.cell.target == "here"
    )


def test_status_and_the_ui_name_the_jobs_that_wait(lab: "Lab", tmp_path: Path, api: ApiLease) -> None:
    experiments = {"grid": {"kind": "sweep", "over": {"label": list("abc")}}}
    study = lab_study(
        tmp_path, "waiting", experiments=experiments, pack=False, workload={"kind": "noop", "seconds": 120.0},
        measuring={"cell_timeout_seconds": 200},
    )  # fmt: skip
    run = tmp_path / "runs" / "waiting"
    process = start("run", study, cwd=tmp_path)
    wait_until(lambda: under_measurement(run), what="a measurement", seconds=START_SECONDS)
    wait_until(lambda: {"running", "queued"} <= {row["status"] for row in status(run)}, what="both states")
    known = {row["job"] for row in status(run)}
    assert known == {entry.split()[0] for entry in in_queue(lab, run)}
    table = {"artifacts": {"key": {"any_": ["jobs-waiting"]}}, "sort": "CREATED_DESC"}

    def states() -> list[str]:
        return sorted(row["state"] for row in json.loads(ask(api, "/artifacts/filter", table)[0]["data"]))

    wait_until(lambda: states() == ["queued", "running", "running"], what="the table in the UI")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=600) != 0
    assert not in_queue(lab, run)
