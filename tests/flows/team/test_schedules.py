"""Runs of a schedule that missed their time, with a real server, its scheduler and a Prefect worker."""

import sqlite3
import time
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled

from tasks.prefect_api.schedules import scheduled_time
from tests.support.run_folders.studies import wait_until, write_study
from tests.support.servers.offline_team import OfflineTeam

EVERY_SECONDS = 6
"""Less than a process takes to start on a busy machine, so that further runs become due meanwhile."""


def runs_of(team: OfflineTeam, study: str) -> dict[datetime, FlowRun]:
    """What the scheduler made of a study whose time has come, by that time."""
    made = [run for run in team.client.read_flow_runs(limit=200) if run.parameters.get("study") == study]
    found = {time: run for run in made if (time := scheduled_time(run)) is not None}
    return {time: run for time, run in sorted(found.items()) if time <= datetime.now(UTC)}


def state_of(run: FlowRun) -> str:
    return run.state.type.value if run.state else ""


def processes_of(flow_run: UUID) -> list[int]:
    """Processes of a flow run. One that ends after the run was tried again would report it as crashed."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(flow_run) in process.environ().values():
                found.append(process.pid)
    return found


def waits_for_heartbeat(team: OfflineTeam, flow_run: UUID) -> bool:
    """Whether the automation for lost flow runs has heard a heartbeat of this one, and no state since."""
    with closing(sqlite3.connect(f"file:{team.database}?mode=ro", uri=True, timeout=600)) as database:
        found = database.execute(
            "SELECT count(*) FROM automation_bucket WHERE bucketing_key LIKE ? AND count < 1", (f"%{flow_run}%",)
        )
        return bool(found.fetchone()[0])


@pytest.mark.nightly
@pytest.mark.parametrize("others", [False, True], ids=["one-study", "two-studies"])
def test_the_newest_stands_for_all_that_were_missed(others: bool, tmp_path: Path) -> None:
    team = OfflineTeam(tmp_path / "team")
    try:
        with team.inside():
            team.start_server()
            team.start_worker()
            team.stop("worker")
            deployment = team.client.read_deployment_by_name("scheduled sweep/nightly")
            study = str(write_study(team.work, "swept"))
            another = str(write_study(team.work, "another"))
            # The scheduler makes no runs for what is past when it first looks, which a busy server does late.
            first = datetime.now(UTC) + timedelta(seconds=2 if others else 75)
            often: dict[str, Any] = {"interval": EVERY_SECONDS, "anchor_date": first.isoformat()}
            if not others:  # no more become due: each would be a process beside other tests
                rule = f"FREQ=SECONDLY;INTERVAL={EVERY_SECONDS};COUNT=4"
                often = {"rrule": f"DTSTART:{first:%Y%m%dT%H%M%SZ}\nRRULE:{rule}"}
            seldom = {"interval": 3600, "anchor_date": first.isoformat()}
            schedules = [
                {
                    "schedule": schedule,
                    "active": True,
                    "slug": slug,
                    "parameters": {"study": of, "assignments": [], "folder_per_run": True},
                }
                for slug, of, schedule in (("often", study, often), ("seldom", another, seldom))
            ][: 2 if others else 1]
            made = httpx.post(f"{team.url}/deployments/{deployment.id}/schedules", json=schedules, trust_env=False)
            made.raise_for_status()
            wait_until(lambda: len(runs_of(team, study)) >= 4, 120, "four runs to be missed")
            began, missed = datetime.now(UTC), list(runs_of(team, study))
            assert {state_of(run) for run in runs_of(team, study).values()} == {"SCHEDULED"}
            team.start("worker", *team.worker_command())
            wait_until(
                lambda: any(state_of(run) == "COMPLETED" for run in runs_of(team, study).values()), 180, "a sweep"
            )
            time.sleep(1)
            runs = runs_of(team, study)
            done = [at for at, run in runs.items() if state_of(run) == "COMPLETED"]
            assert len([at for at in done if at <= began]) <= 1, "one stands for all that were missed"
            left = [runs[at] for at in missed if at < min(done)]
            assert len(left) >= 3 and {state_of(run) for run in left} == {"CANCELLED"}
            words = {run.state.message or "" for run in left if run.state}
            assert all(said.startswith("superseded by the run scheduled for ") for said in words)
            folders = {path.name for path in (team.work / "runs").iterdir()}
            assert {at.strftime("%Y-%m-%dT%H-%M-%SZ") for at in done} <= folders
            identifier = next(each["id"] for each in made.json() if each["slug"] == "often")
            team.client.delete_deployment_schedule(deployment.id, UUID(identifier))
            if others:
                wait_until(
                    lambda: [state_of(run) for run in runs_of(team, another).values()] == ["COMPLETED"],
                    180,
                    "the sweep of another study, for which none of these stands",
                )
            # One that began, if any did, sent a heartbeat, whose silence is not held against its next attempt.
            wanted = next((run for run in left if run.run_count), left[0]).id
            wait_until(lambda: not processes_of(wanted), 60, "the process of the superseded run to end")
            wait_until(lambda: not waits_for_heartbeat(team, wanted), 30, "the state of its end to be heard")
            team.client.set_flow_run_state(wanted, Scheduled(), force=True)  # as a person does in the UI
            wait_until(
                lambda: (team.client.read_flow_run(wanted).state or Scheduled()).is_final(), 180, "the run tried again"
            )
            again = team.client.read_flow_run(wanted)
            assert state_of(again) == "COMPLETED", again.state
    finally:
        team.close()
