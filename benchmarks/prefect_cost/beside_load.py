"""A team's server, schedules and limits beside two busy processes: python -m benchmarks.prefect_cost.beside_load PART

    server          `up` twice, requests, a run that names the API, a study called from Python
    schedule        a schedule of every minute behind a study that takes longer than three of its runs
    killed-worker   a deployment with a limit of one whose worker and flow run were killed: when its next run starts

`--bin` measures another installation, such as that of an older checkout, by the folder of its commands. Prints rows of
the tables of docs/measurements/prefect.md. Works in a temporary folder; a part takes two to eight minutes.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil

from flows.team.processes import processes_of
from flows.team.setup import FOLDER_VARIABLE

REQUESTS, REQUESTS_SECONDS = 20, 90.0
"""At most so many requests, and none more after so long."""
_STUDY = """
study: {name}
workload: {{kind: noop, seconds: {seconds}}}
pack: false
experiments: {{grid: {{kind: sweep, over: {{label: {labels}}}}}}}
measuring: {{repeats: 1, memory: false, cell_timeout_seconds: 300}}
"""
_FROM_PYTHON = """
import sys
from pathlib import Path
from flows.scaling_study import scaling_study
print(scaling_study(Path(sys.argv[1]), runs=Path("from-python")).report)
"""
NIGHTLY = "scheduled sweep/nightly"


@dataclass(frozen=True)
class Measured:
    """What is measured: the folder of its commands, and the number of busy processes beside it."""

    commands: Path
    busy: int


class Team:
    """A set-up in a folder of its own, and what it is asked."""

    def __init__(self, folder: Path, port: int, commands: Path) -> None:
        self.folder, self.port, self.commands = folder / "team", port, commands
        self.api = f"http://127.0.0.1:{port}/api"
        hidden = ("PREFECT_", "RANKWISE_")
        mine = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        names = ("data", "cache", "locks")  # locks: no waiting for launches of other studies
        self.environment = mine | {f"RANKWISE_{name.upper()}": str(folder / name) for name in names}
        (folder / "locks").mkdir()

    def rankwise(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.command(str(self.commands / "rankwise"), *arguments, **environment)

    def command(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.folder.mkdir(exist_ok=True)
        env = self.environment | environment
        return subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=400)

    def up(self) -> subprocess.CompletedProcess[str]:
        return self.rankwise("team", "up", "--folder", str(self.folder), "--port", str(self.port), "--background")

    def ask(self, path: str, **body: Any) -> Any:
        return httpx.post(f"{self.api}{path}", json=body, timeout=60, trust_env=False).raise_for_status().json()

    def study(self, name: str, seconds: float, cells: int) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(_STUDY.format(name=name, seconds=seconds, labels=[f"c{cell}" for cell in range(cells)]))
        return path

    def nightly(self) -> str:
        found = self.ask("/deployments/filter", deployments={"name": {"any_": ["nightly"]}})
        return str(found[0]["id"])

    def start(self, study: Path) -> str:
        """A run of the scheduled sweep, by hand."""
        body = {"parameters": {"study": str(study)}, "state": {"type": "SCHEDULED"}}
        return str(self.ask(f"/deployments/{self.nightly()}/create_flow_run", **body)["id"])

    def run(self, identifier: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.api}/flow_runs/{identifier}", timeout=60, trust_env=False)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


def busy_process() -> subprocess.Popen[bytes]:
    """Start one in a session of its own, as that of another user is: Linux shares the cores between sessions first."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)


@contextlib.contextmanager
def team(measured: Measured) -> Iterator[Team]:
    """A set-up that is ended with all that belongs to it, beside busy processes."""
    with tempfile.TemporaryDirectory(prefix="rankwise-") as folder:
        made = Team(Path(folder), 4399, measured.commands)
        busy = [busy_process() for _ in range(measured.busy)]
        try:
            yield made
        finally:
            made.rankwise("team", "down", "--folder", str(made.folder))
            for process in busy:
                process.kill()
                process.wait()


def row(what: str, figure: str) -> None:
    print(f"| {what} | {figure} |", flush=True)


def timed(what: str, call: Callable[[], subprocess.CompletedProcess[str]], expected: str) -> None:
    """One row: whether the command did what it is for, and its seconds."""
    began = time.monotonic()
    try:
        done = call()
    except subprocess.TimeoutExpired:
        row(what, f"not ended within {time.monotonic() - began:.0f} s")
        return
    fine = done.returncode == 0 and expected in done.stdout
    alone = ", without Prefect" if "without Prefect" in done.stdout + done.stderr else ""
    row(what, f"{'done' if fine else f'FAILED ({done.returncode})'} in {time.monotonic() - began:.1f} s{alone}")
    if not fine:
        print(done.stdout[-1500:], done.stderr[-1500:], file=sys.stderr)


def requests(one: Team) -> None:
    """Seconds of requests of the database, one after the other."""
    seconds: list[float] = []
    while len(seconds) < REQUESTS and sum(seconds) < REQUESTS_SECONDS:
        began = time.monotonic()
        with contextlib.suppress(httpx.HTTPError):
            one.ask("/flow_runs/filter")
        seconds.append(time.monotonic() - began)
    row("API request", f"{statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s, n = {len(seconds)}")


def measure_server(measured: Measured) -> None:
    """Measure what a team server answers, its registration, a run that names its API and one that names none."""
    with team(measured) as one:
        timed("`team up`, new folder", one.up, "deployment nightly")
        requests(one)
        timed("`team up` again", one.up, "deployment nightly")
        study = str(one.study("named", 0.01, 2))
        timed(
            "`rankwise run` with PREFECT_API_URL of that server",
            lambda: one.rankwise("run", study, PREFECT_API_URL=one.api),
            "Report",
        )
        timed(
            "`scaling_study()` in Python, no API named",
            lambda: one.command(str(measured.commands / "python"), "-c", _FROM_PYTHON, study),
            "report.md",
        )


def measure_schedule(measured: Measured) -> None:
    """A schedule of every minute behind a study of some minutes: which runs are made, and which are not."""
    with team(measured) as one:
        assert one.up().returncode == 0
        deployment = one.nightly()
        long, short = one.study("long", 8.0, 24), one.study("short", 0.01, 2)
        one.start(long)
        anchor = (datetime.now(UTC) + timedelta(seconds=20)).isoformat()
        schedule = {"interval": 60, "anchor_date": anchor}
        body = [{"schedule": schedule, "active": True, "slug": "minute", "parameters": {"study": str(short)}}]
        httpx.post(f"{one.api}/deployments/{deployment}/schedules", json=body, trust_env=False).raise_for_status()
        ours = {"deployments": {"id": {"any_": [deployment]}}}
        deadline = time.monotonic() + 450
        made: list[dict[str, Any]] = []
        while time.monotonic() < deadline and len(made) < 2:
            time.sleep(3)
            found = one.ask("/flow_runs/filter", **ours, sort="EXPECTED_START_TIME_ASC", limit=200)
            made = [run for run in found if run["auto_scheduled"] and run["state_type"] == "COMPLETED"]
        for run in found:
            planned = (run["idempotency_key"] or "").rpartition(" ")[2][:19]
            if run["state_type"] != "SCHEDULED":
                message = (run["state"]["message"] or "")[:60]
                told = f"{run['state_name']}, started {str(run['start_time'])[:19]} {message}"
                row(f"run planned for {planned or 'now, by hand'}", told)


def measure_killed_worker(measured: Measured) -> None:
    with team(measured) as one:
        assert one.up().returncode == 0
        first = one.start(one.study("first", 120.0, 1))
        while one.run(first)["state_type"] != "RUNNING":
            time.sleep(0.5)
        time.sleep(5)
        for process in processes_of(one.folder):
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get(FOLDER_VARIABLE) == str(one.folder)
                if ours and ("PREFECT__FLOW_RUN_ID" in process.environ() or "worker" in process.cmdline()):
                    process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        second = one.start(one.study("second", 0.01, 1))
        crashed: float | None = None
        while (run := one.run(second))["state_type"] not in ("COMPLETED", "FAILED", "CRASHED"):
            if crashed is None and one.run(first)["state_type"] == "CRASHED":
                crashed = time.monotonic() - killed
            if time.monotonic() - killed > 340:
                break
            time.sleep(1)
        row("the killed run is marked as crashed after", "not" if crashed is None else f"{crashed:.0f} s")
        row("the next run of the deployment", f"{run['state_name']} {time.monotonic() - killed:.0f} s after the kill")


PARTS = {"server": measure_server, "schedule": measure_schedule, "killed-worker": measure_killed_worker}


def main() -> int:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent, help="folder of the commands measured")
    parser.add_argument("--busy", type=int, default=2, help="busy processes beside it (default: %(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then, too
    row("load average at the start", f"{os.getloadavg()[0]:.1f}, and {arguments.busy} busy processes")
    PARTS[arguments.part](Measured(arguments.bin.absolute(), arguments.busy))
    row("load average at the end", f"{os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
