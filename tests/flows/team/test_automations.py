"""What people want to hear of is told: the shipped automations fire on real runs, through a block of notifications."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.run_folders.studies import wait_until, write_study
from tests.support.servers.offline_team import OfflineTeam, form

pytestmark = pytest.mark.slow
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
FIRES_SECONDS = 120.0
SAVE_BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
block = CustomWebhookNotificationBlock(
    name="test", url=sys.argv[1], json_data={"subject": "{{subject}}", "body": "{{body}}"})
block.save("rankwise-notifications", overwrite=True)
"""
HURRIED = "import time\n_sleep = time.sleep\ntime.sleep = lambda seconds: _sleep(0.6 * seconds)\n"


class Received(BaseHTTPRequestHandler):
    """Keeps what is posted."""

    messages: list[dict[str, str]] = []

    def do_POST(self) -> None:
        self.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def on_the_teams_network(team: OfflineTeam) -> Iterator[None]:
    with team.inside():
        yield


@pytest.fixture(scope="module")
def told(team: OfflineTeam) -> Iterator[list[dict[str, str]]]:
    """What automations tell, with a block of notifications that posts to a server here."""
    with team.inside(), ThreadingHTTPServer(("127.0.0.1", 0), Received) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        command = [sys.executable, "-c", SAVE_BLOCK, url]
        saved = subprocess.run(command, env=team.environment, capture_output=True, text=True)
        assert saved.returncode == 0, saved.stderr
        lines = team.rankwise("deploy-flows", "--folder", str(team.work))
        assert "automation rankwise: study failed: updated, enabled" in lines
        again = team.rankwise("deploy-flows", "--folder", str(team.work))
        assert "automation rankwise: study failed: exists, enabled" in again
        yield Received.messages
        server.shutdown()


def bodies(told: list[dict[str, str]], subject: str) -> list[str]:
    return [message["body"] for message in told if message["subject"] == subject]


def events(team: OfflineTeam, name: str) -> list[dict[str, Any]]:
    found = httpx.post(f"{team.url}/events/filter", json={"filter": {"event": {"name": [name]}}}, trust_env=False)
    listed: list[dict[str, Any]] = found.json()["events"]
    return listed


def test_a_study_that_is_refused_is_told(team: OfflineTeam, told: list[dict[str, str]]) -> None:
    wrong = [{"name": "s", "question": {"kind": "strong", "grow": "dp"}}]
    run = team.run_form(form("told-refused", experiments=wrong))
    assert team.wait_for(run, *FINAL) == "FAILED"
    assert "refused" in team.flow_run(run).tags
    subject = "rankwise: study failed"
    wait_until(lambda: any("told-refused" in body for body in bodies(told, subject)), FIRES_SECONDS, "the notification")
    assert any("experiments.s: expected either" in body for body in bodies(told, subject)), told


def test_a_budget_that_is_nearly_used_up_is_told_and_cells_are_events(
    team: OfflineTeam, told: list[dict[str, str]]
) -> None:
    sweep = {"kind": "sweep", "over": {"seconds": [1.0 + number / 100 for number in range(12)]}}
    measuring = {"repeats": 1, "memory": False, "cell_timeout_seconds": 60, "budget_minutes": 0.2}
    questions = [{"name": "grid", "question": sweep}]
    run = team.run_form(form("told-budget", experiments=questions, measuring=measuring, pack=False))
    team.wait_for(run, *FINAL, seconds=240)
    subject = "rankwise: budget near"
    wait_until(lambda: bool(bodies(told, subject)), FIRES_SECONDS, "the notification")
    [body] = bodies(told, subject)
    assert body.startswith("told-budget: ") and body.endswith(" of 0.2 minutes of the budget are used")
    measured = [event for event in events(team, "rankwise.cell.measured") if event["payload"]["study"] == "told-budget"]
    assert measured and all("completed in" in event["payload"]["message"] for event in measured)
    assert measured[0]["resource"]["prefect.resource.id"] == "rankwise.study.told-budget"
    assert f"prefect.flow-run.{run}" in {related["prefect.resource.id"] for related in measured[0]["related"]}


@pytest.mark.nightly
def test_a_sweep_slower_than_the_one_before_is_told(
    team: OfflineTeam, told: list[dict[str, str]], tmp_path: Path
) -> None:
    experiments = {"grid": {"kind": "sweep", "over": {"seconds": [0.1]}}}
    measuring = {"repeats": 8, "memory": False, "cell_timeout_seconds": 60}
    study = write_study(team.folder, "told-slower", experiments=experiments, measuring=measuring)
    (tmp_path / "sitecustomize.py").write_text(HURRIED)
    team.rankwise("run", str(study), "--runs", "runs/2026-01-01T02-00-00Z", PYTHONPATH=str(tmp_path))
    deployment = team.client.read_deployment_by_name("scheduled sweep/nightly").id
    run = team.client.create_flow_run_from_deployment(deployment, parameters={"study": str(study)}).id
    assert team.wait_for(run, *FINAL, seconds=240) == "COMPLETED", team.logs()
    subject = "rankwise: regression found"
    wait_until(lambda: bool(bodies(told, subject)), FIRES_SECONDS, "the notification")
    [body] = bodies(told, subject)
    assert body.startswith("told-slower: ") and " times (before: runs/" in body, body
