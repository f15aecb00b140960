"""`rankwise doctor`: what of this machine is usable, with the remedy for what is not.

    rankwise doctor [--json] [--master HOST:PORT]

The checks (flows.cli.checks) run beside each other and within 9 seconds; one that hangs (a dead network
mount, a name server that does not answer) is reported as such and left behind.
"""

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli import checks as machine
from flows.cli.checks import Check
from flows.folders import cache_folder

__all__ = ["Check", "diagnose", "doctor", "print_checks"]

_LIMIT_SECONDS = 9.0
_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}
# Without these no study runs on this machine; all else is needed for some studies only.
_NEEDED = ("python", "package", "packages", "torch", "backend gloo", "run folder", "cache folder", "master")


def diagnose(master: str | None = None, runs: Path = Path("runs"), cache: Path | None = None) -> list[Check]:
    """Look at everything. Takes at most 9 seconds, whatever hangs."""
    constraints = Path(__file__).parents[2] / "constraints.txt"
    questions: dict[str, Callable[[], list[Check]]] = {
        "python": machine.check_python,
        "packages": partial(machine.check_packages, constraints),
        "cores": machine.check_cores_and_memory,
        "folders": partial(machine.check_folders, runs, cache or cache_folder()),
        "gpu": machine.check_gpus,
        "torch": machine.check_torch,
        "slurm sinfo": partial(machine.check_slurm_tool, "sinfo", ("--noheader", "--format=%P")),
        "slurm squeue": partial(machine.check_slurm_tool, "squeue", ("--noheader", "--me")),
        "slurm sacct": partial(
            machine.check_slurm_tool, "sacct", ("--noheader", "--allocations", "--starttime=now-1hour")
        ),
        "tools": machine.check_tools,
        "profilers": machine.check_profilers,
        "credentials": machine.check_credentials,
        "prefect api": machine.check_prefect_api,
    }
    if master is not None:
        questions["master"] = partial(machine.check_master, master)
    return _answers(questions, _LIMIT_SECONDS)


def doctor(master: str | None, as_json: bool) -> int:
    """Print what was found. Returns 0, or 1 where something is missing without which no study runs here."""
    checks = diagnose(master)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=1))
    else:
        print_checks(checks)
    return 1 if any(check.state == "missing" and _is_needed(check.name) for check in checks) else 0


def print_checks(checks: list[Check]) -> None:
    """A table on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        for check in checks:
            detail = check.detail.replace("\n", "\n    ")
            print(f"{check.state:8}{check.name}: {detail}")
            if check.remedy:
                print(f"        remedy: {check.remedy}")
        return
    table = Table("", "check", "found", "remedy")
    for check in checks:
        state = Text(check.state, style=_COLOURS[check.state])
        table.add_row(state, Text(check.name), Text(check.detail), Text(check.remedy or ""))
    Console().print(table)


def _is_needed(name: str) -> bool:
    return name in _NEEDED or name.startswith("package ")


def _answers(questions: dict[str, Callable[[], list[Check]]], limit_seconds: float) -> list[Check]:
    """Ask all at once, in threads that do not keep the process alive; what is not there in time is said so."""
    found: dict[str, list[Check]] = {}

    def ask(name: str, question: Callable[[], list[Check]]) -> None:
        try:
            found[name] = question()
        except Exception as error:
            # One check that fails must not hide the others.
            found[name] = [Check(name, "warning", f"could not be checked ({type(error).__name__}: {error})")]

    deadline = time.monotonic() + limit_seconds
    threads = {
        name: threading.Thread(target=ask, args=item, daemon=True)
        for name, item in zip(questions, questions.items(), strict=True)
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    late = "something that it asks does not answer: a network mount, a name server, a driver"
    return [
        check
        for name in questions
        for check in found.get(name, [Check(name, "missing", f"no answer within {limit_seconds:g} s", late)])
    ]
