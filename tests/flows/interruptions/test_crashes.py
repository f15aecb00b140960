"""What becomes of a study when it is cancelled, killed, or its Prefect server is away: each case for real.

Each case runs once through a Prefect worker and once as plain Python, with the same server. What was seen is
printed as a table at the end of the test session; docs/how-to/prefect.md keeps it.
"""

import contextlib
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterName
from prefect.states import Cancelling

from slurm.launcher.machine_lock import launch_lock
from tests.support.run_folders.studies import processes_of, status, under_measurement, wait_until, write_study
from tests.support.servers.offline_team import OfflineTeam, form

pytestmark = pytest.mark.slow

PLAIN = "import sys; from pathlib import Path; from flows.scaling_study import scaling_study as s; s(Path(sys.argv[1]))"
OUTAGE_SECONDS = 60.0
LOCKED_SECONDS = 20.0
WAYS = ["worker", "python"]
MEASUREMENTS = [2.0, 1.0]


@pytest.fixture(autouse=True)
def on_the_teams_network(team: OfflineTeam) -> Iterator[None]:
    with team.inside():
        yield


@dataclass
class Started:
    """A study that was started one way or the other."""

    team: OfflineTeam
    name: str
    flow_run: UUID
    folder: Path
    pid: int
    killed_at: float = 0.0

    def gone(self) -> bool:
        """Whether no process of the study is left, neither the flow's nor a launch's."""
        return (
            not processes_of(self.folder) and not processes_of(self.folder.with_suffix(".yaml")) and not alive(self.pid)
        )

    def statuses(self) -> list[str]:
        return sorted(row["status"] for row in status(self.folder))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ask_for(team: OfflineTeam, way: str, name: str, measurements: list[float]) -> Started:
    """Start a study of noop measurements that take so many seconds, each in a launch of its own."""
    sweep = {"kind": "sweep", "over": {"seconds": measurements}}
    folder = team.work / "runs" / name
    if way == "worker":
        flow_run = team.run_form(form(name, experiments=[{"name": "grid", "question": sweep}], pack=False))
        return Started(team, name, flow_run, folder, 0)
    study = write_study(team.work, name, experiments={"grid": sweep}, pack=False)
    process = team.start(name, sys.executable, "-c", PLAIN, str(study))
    found: list[UUID] = []

    def registered() -> bool:
        assert process.poll() is None, team.logs()
        runs = team.client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))
        found.extend(run.id for run in runs)
        return bool(found)

    wait_until(registered, what="the flow run")
    return Started(team, name, found[0], folder, process.pid)


def begin(team: OfflineTeam, way: str, name: str, measurements: list[float]) -> Started:
    """Start a study; return inside a measurement."""
    run = ask_for(team, way, name, measurements)
    wait_until(lambda: under_measurement(run.folder), seconds=90, what="a measurement")
    run.pid = run.pid or int(team.flow_run(run.flow_run).infrastructure_pid or 0)
    return run


@pytest.fixture(scope="module")
def victims(team: OfflineTeam) -> dict[str, Started]:
    """Studies whose flow process was killed with SIGKILL inside a measurement; the worker's along with the worker.

    The first tests of this file need them dead, the last ones look what became of them.
    """
    found = {}
    with team.inside():
        for way in WAYS:
            run = begin(team, way, f"kill-{way}", [3.0, 3.1])
            if way == "worker":
                team.stop("worker", signal.SIGKILL)
            os.kill(run.pid, signal.SIGKILL)
            run.killed_at = time.time()
            found[way] = run
        team.start_worker()
    return found


def test_killed_launches_go_on(victims: dict[str, Started]) -> None:
    """What is under way ends by itself, and its records wait for the next run."""
    for run in victims.values():
        wait_until(run.gone, what="the end of the launch")
        # So it stays, until heartbeats have been missing for a while; on a busy machine they are by now.
        assert run.team.state(run.flow_run) in ("RUNNING", "CRASHED")


@pytest.mark.parametrize("way", ["worker", pytest.param("python", marks=pytest.mark.nightly)])
def test_cancelled_from_the_ui(team: OfflineTeam, way: str, seen: Callable[..., None]) -> None:
    run = begin(team, way, f"cancel-{way}", [600.0])
    began = time.monotonic()
    team.client.set_flow_run_state(run.flow_run, Cancelling())
    wait_until(run.gone, seconds=30, what="the end of all processes")
    gone = time.monotonic() - began
    team.wait_for(run.flow_run, "CANCELLED")
    seen(
        "cancelled from the UI",
        way,
        f"all processes gone in {gone:.1f} s, CANCELLED in {time.monotonic() - began:.1f} s",
    )
    assert run.statuses() == ["cancelled"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_terminated(team: OfflineTeam, way: str, seen: Callable[..., None]) -> None:
    run = begin(team, way, f"terminate-{way}", [600.0])
    began = time.monotonic()
    os.kill(run.pid, signal.SIGTERM)
    wait_until(run.gone, seconds=30, what="the end of all processes")
    gone = time.monotonic() - began
    state = team.wait_for(run.flow_run, "CANCELLED", "CRASHED", "FAILED")
    seen("SIGTERM to the flow's process", way, f"all processes gone in {gone:.1f} s, {state}")
    assert run.statuses() == ["cancelled"]


@pytest.mark.nightly
def test_killed_with_the_worker_alive(team: OfflineTeam, seen: Callable[..., None]) -> None:
    run = begin(team, "worker", "kill-flow", [20.0])
    began = time.monotonic()
    os.kill(run.pid, signal.SIGKILL)
    team.wait_for(run.flow_run, "CRASHED")
    crashed = time.monotonic() - began
    assert processes_of(run.folder), "the launch goes on"
    again = team.run_form(team.flow_run(run.flow_run).parameters["study"])
    team.wait_for(again, "COMPLETED")
    assert run.statuses() == ["completed"] and [row["attempts"] for row in status(run.folder)] == [1]
    seen("SIGKILL of the flow, worker alive", "worker", f"CRASHED in {crashed:.1f} s; the rerun adopted the launch")


def begin_both(team: OfflineTeam, name: str) -> dict[str, Started]:
    """A study each way; both have all to measure when the first measurement of one begins, and then this returns."""
    with launch_lock(give_up=lambda: False):
        runs = {way: ask_for(team, way, f"{name}-{way}", MEASUREMENTS) for way in WAYS}
        for run in runs.values():
            wait_until((run.folder / "plan.json").exists, seconds=90, what="the plan")
    wait_until(lambda: any(under_measurement(run.folder) for run in runs.values()), seconds=90, what="a measurement")
    return runs


def end_both(runs: dict[str, Started], measured: dict[str, int], case: str, seen: Callable[..., None]) -> None:
    """Both complete with everything measured once, and the server knows."""
    for way, run in runs.items():
        state = run.team.wait_for(run.flow_run, "COMPLETED", "CRASHED", "FAILED", seconds=280)
        total, done = len(MEASUREMENTS), run.statuses().count("completed")
        seen(case, way, f"{measured[way]} of {total} cells measured meanwhile, in the end {done}; {state}")
        assert state == "COMPLETED" and done == total
        assert {row["attempts"] for row in status(run.folder)} == {1}
        artifacts = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.flow_run]))
        kinds = {artifact.type for artifact in run.team.client.read_artifacts(artifact_filter=artifacts)}
        assert {"markdown", "table", "progress"} <= kinds, "the report reached the server"


def measured_by(runs: dict[str, Started]) -> dict[str, int]:
    return {way: len(list(run.folder.glob("records/*/*.json"))) for way, run in runs.items()}


def test_the_server_restarts(team: OfflineTeam, seen: Callable[..., None]) -> None:
    runs = begin_both(team, "restart")
    before = measured_by(runs)
    team.stop("server")
    team.start_server()
    after = measured_by(runs)
    end_both(runs, {way: after[way] - before[way] for way in WAYS}, "server restarted", seen)


@pytest.mark.nightly
def test_the_database_is_locked(team: OfflineTeam, seen: Callable[..., None]) -> None:
    runs = begin_both(team, "locked")
    before = measured_by(runs)
    with contextlib.closing(sqlite3.connect(team.database, isolation_level=None, timeout=600)) as database:
        database.execute("BEGIN IMMEDIATE")
        time.sleep(LOCKED_SECONDS)
        after = measured_by(runs)
        database.execute("COMMIT")
    assert sum(after.values()) > sum(before.values())
    case = f"database locked for {LOCKED_SECONDS:.0f} s"
    end_both(runs, {way: after[way] - before[way] for way in WAYS}, case, seen)


@pytest.mark.nightly
def test_the_server_is_away_for_a_minute(team: OfflineTeam, seen: Callable[..., None]) -> None:
    runs = begin_both(team, "away")
    before = measured_by(runs)
    team.stop("server")
    time.sleep(OUTAGE_SECONDS)
    try:
        all_of_them = {way: len(MEASUREMENTS) for way in WAYS}
        wait_until(lambda: measured_by(runs) == all_of_them, seconds=90, what="all measured without the server")
        after = measured_by(runs)
    finally:
        team.start_server()
    end_both(runs, {way: after[way] - before[way] for way in WAYS}, "server away for a minute", seen)


@pytest.mark.nightly
def test_the_server_is_away_at_the_start(team: OfflineTeam, seen: Callable[..., None]) -> None:
    """From the command line; a Prefect worker gets no runs from a server that is away."""
    write_study(team.work, "alone")
    out = team.rankwise("run", "alone.yaml", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "measuring without Prefect http://127.0.0.1:9/api" in out
    assert [row["status"] for row in status(team.work / "runs" / "alone")] == ["completed"] * 2
    assert "published" in team.rankwise("publish", "runs/alone")
    seen("server away at the start", "command line", "all measured at once without Prefect, published later")


@pytest.mark.parametrize("way", ["worker", pytest.param("python", marks=pytest.mark.nightly)])
def test_zombies_are_marked_and_taken_up(
    team: OfflineTeam, victims: dict[str, Started], way: str, seen: Callable[..., None]
) -> None:
    run = victims[way]
    team.wait_for(run.flow_run, "CRASHED", seconds=150)
    flow_run = team.flow_run(run.flow_run)
    assert flow_run.state is not None and "no heartbeat" in (flow_run.state.message or "")
    crashed = flow_run.state.timestamp.timestamp() - run.killed_at
    if way == "worker":
        again = team.run_form(flow_run.parameters["study"])
        team.wait_for(again, "COMPLETED")
    else:
        team.rankwise("run", f"{run.name}.yaml")
    assert run.statuses() == ["completed"] * 2
    assert [row["attempts"] for row in status(run.folder)] == [1, 1], "nothing is measured twice"
    seen("SIGKILL" + (" of worker and flow" if way == "worker" else ""), way, f"CRASHED {crashed:.0f} s later")
