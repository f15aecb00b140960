"""`rankwise doctor`: check this machine and print a remedy for each problem.

    rankwise doctor [--json] [--master HOST:PORT]

The checks (flows.cli.doctor.checks) run concurrently and take at most 30 seconds. A check that hangs (a dead network
mount, an unresponsive name server) is reported and abandoned.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.common.files.project_files import project_file
from configs.common.files.reading import read_text
from configs.common.printable import plural
from flows.cli.doctor import checks as machine
from flows.cli.doctor import gpus, optional
from flows.cli.doctor.checks import CheckState, DoctorCheck
from flows.cli.doctor.imports import check_imports
from flows.folders import cache_folder

__all__ = ["DoctorCheck", "diagnose", "doctor", "print_checks"]

_LIMIT_SECONDS = 30.0
_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red", "absent": "dim"}
# Required by every study on this machine; all other checks matter for some studies only.
_NEEDED = ("python", "package", "packages", "torch", "backend gloo", "run folder", "cache folder", "master")


def diagnose(master: str | None = None, runs: Path = Path("runs"), cache: Path | None = None) -> list[DoctorCheck]:
    """Run all checks. Takes at most 30 seconds, even if some hang."""
    questions: dict[str, Callable[[], list[DoctorCheck]]] = {
        "python": machine.check_python,
        "packages": partial(machine.check_packages, project_file("constraints.txt")),
        "imports": check_imports,
        "cores": machine.check_cores_and_memory,
        "folders": partial(machine.check_folders, runs, cache or cache_folder()),
        "gpu nvidia": gpus.check_nvidia,
        "gpu amd": gpus.check_amd,
        "gpu intel": gpus.check_intel,
        "torch": gpus.check_torch,
        "slurm sinfo": partial(machine.check_slurm_tool, "sinfo", ("--noheader", "--format=%P")),
        "slurm squeue": partial(machine.check_slurm_tool, "squeue", ("--noheader", "--me")),
        "slurm sacct": partial(
            machine.check_slurm_tool, "sacct", ("--noheader", "--allocations", "--starttime=now-1hour")
        ),
        "tools": machine.check_tools,
        "profilers": machine.check_profilers,
        "deepspeed": optional.check_deepspeed,
        "kernels": optional.check_kernels,
        "onnx": optional.check_onnx,
        "live": optional.check_live,
        "rocm": optional.check_rocm,
        "infiniband": optional.check_infiniband,
        "buffers": optional.check_buffers,
        "credentials": machine.check_credentials,
        "prefect api": machine.check_prefect_api,
    }
    if master is not None:
        questions["master"] = partial(machine.check_master, master)
    return _answers(questions, _LIMIT_SECONDS)


def doctor(master: str | None, as_json: bool) -> int:
    """Print the checks. Returns 0, or 1 if something required by every study is missing."""
    checks = diagnose(master)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) | {"state": _shown(check)} for check in checks], indent=1))
    else:
        print_checks(checks)
    return 1 if any(check.state == "missing" and _is_needed(check.name) for check in checks) else 0


def print_checks(checks: list[DoctorCheck]) -> None:
    """A table on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        for check in checks:
            detail = check.detail.replace("\n", "\n    ")
            print(f"{_shown(check):8}{check.name}: {detail}")
            if check.remedy:
                print(f"        remedy: {check.remedy}")
        return
    table = Table("", "check")
    for column in ("found", "remedy"):  # with commands to type: rich would cut their long words
        table.add_column(column, overflow="fold")
    for check in checks:
        state = Text(_shown(check), style=_COLOURS[_shown(check)])
        table.add_row(state, Text(check.name), Text(check.detail), Text(check.remedy or ""))
    Console().print(table)


def _shown(check: DoctorCheck) -> str:
    """`absent` for what is missing and not needed here: nothing that calls for a remedy looks like it."""
    unneeded = check.state == "missing" and (check.remedy or "").startswith("not needed")
    return "absent" if unneeded else check.state


def _is_needed(name: str) -> bool:
    return name in _NEEDED or name.startswith(("package ", "import "))


def _answers(questions: dict[str, Callable[[], list[DoctorCheck]]], limit_seconds: float) -> list[DoctorCheck]:
    """Run all checks concurrently in daemon threads and report those that exceed the limit."""
    found: dict[str, list[DoctorCheck]] = {}

    def ask(name: str, question: Callable[[], list[DoctorCheck]]) -> None:
        try:
            found[name] = question()
        except Exception as error:
            # One failing check must not hide the others.
            found[name] = [DoctorCheck(name, "warning", f"check failed ({type(error).__name__}: {error})")]

    deadline = time.monotonic() + limit_seconds
    threads = {
        name: threading.Thread(target=ask, args=item, daemon=True)
        for name, item in zip(questions, questions.items(), strict=True)
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    runnable, cores = _runnable(), os.cpu_count() or 1
    hangs = "a network mount, name server or driver does not respond"
    busy = f"{runnable} processes want {plural(cores, 'core')}: run it again when fewer do. Else {hangs}"
    late: tuple[CheckState, str] = ("warning", busy) if runnable > cores else ("missing", hangs)
    return [
        check
        for name in questions
        for check in found.get(name, [DoctorCheck(name, late[0], f"no response within {limit_seconds:g} s", late[1])])
    ]


def _runnable() -> int:
    """Processes and threads of this machine that run or wait for a core (proc(5), loadavg): not those that hang."""
    try:
        return int(read_text(Path("/proc/loadavg"), 200).split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0
