"""Runs of small noop studies through the real command line, for the tests of the whole pipeline."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from typer.testing import CliRunner

from flows.cli.main import app
from tests.support.patience import wait_for

RANKWISE = str(Path(sys.executable).with_name("rankwise"))
LIMIT_SECONDS = 600


def write_study(folder: Path, name: str = "s", **changes: Any) -> Path:
    """A study of two noop cells on one rank, once each; `changes` replace its top-level keys."""
    data: dict[str, Any] = {
        "study": name,
        "workload": {"kind": "noop", "seconds": 0.01},
        "experiments": {"grid": {"kind": "sweep", "over": {"label": ["a", "b"]}}},
        "measuring": {"repeats": 1, "memory": False, "cell_timeout_seconds": 60},
    }
    data["measuring"] |= changes.pop("measuring", {})
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


def rankwise(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command = [RANKWISE, *(str(argument) for argument in arguments)]
    env = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def rankwise_here(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, whose imports are made: for commands that only look, or refuse what they are asked."""
    command = [str(argument) for argument in arguments]
    with chdir(cwd):
        found = CliRunner().invoke(app, command, catch_exceptions=False)
    return subprocess.CompletedProcess(command, found.exit_code, found.stdout, found.stderr)


def start(*arguments: str | Path, cwd: Path) -> "subprocess.Popen[str]":
    """Start the command line in a session of its own, as a terminal would; output goes to `out.log`."""
    command = [RANKWISE, *(str(argument) for argument in arguments)]
    with (cwd / "out.log").open("a") as log:
        return subprocess.Popen(command, cwd=cwd, stdout=log, stderr=log, text=True, start_new_session=True)


def status(run: Path) -> list[dict[str, Any]]:
    """What `rankwise status --json` says."""
    finished = rankwise_here("status", run, "--json", cwd=run.parent)
    assert finished.returncode == 0, finished.stderr
    rows: list[dict[str, Any]] = json.loads(finished.stdout)
    return rows


def wait_until(condition: Callable[[], Any], seconds: float = 60.0, what: str = "the condition") -> None:
    """Return when the condition holds."""
    wait_for(condition, what, seconds)


def under_measurement(run: Path, label: str = "") -> bool:
    """Whether a rank of a job that goes on is inside a measurement now."""
    for path in run.glob("jobs/*/progress_0.json"):
        if not (path.parent / "end.json").exists() and b'"phase":"measurement"' in path.read_bytes():
            return True
    return False


def running_of(folder: Path) -> list[psutil.Process]:
    """Processes whose command lines name the folder, launches and runs alike."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if str(folder) in line and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def processes_of(folder: Path) -> list[str]:
    """The command lines of `running_of`."""
    lines = []
    for process in running_of(folder):
        with suppress(psutil.Error):  # it may end meanwhile
            lines.append(" ".join(process.cmdline()))
    return lines


def job_count(run: Path) -> int:
    """How many launches were made in a run folder."""
    return len(list((run / "jobs").iterdir()))
