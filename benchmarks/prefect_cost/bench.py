"""What Prefect costs this project, on this machine, now: python -m benchmarks.prefect_cost.bench

Times the local server's start and rest, ways to do a cell in Prefect, the shipped pipeline with and
without Prefect, and single calls of the API, and prints the tables of docs/measurements/prefect.md.
Works in a temporary data folder; takes about nine minutes, in which the machine should do nothing else.

What is compared is measured in turn, in random order, and once more in each repetition. What needs a
process of its own is in `benchmarks.prefect_cost.parts`. `--parts launches` measures a part, `--against CHECKOUT` also
what a launch costs in another checkout, installed in its `.venv`.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.prefect_cost.parts import Samples, ask, server_cpu_seconds, server_processes
from benchmarks.prefect_cost.tables import (
    COUNTS,
    LAUNCHES,
    SIZES,
    cells_table,
    launches_table,
    memory_line,
    run_table,
    seams_table,
    share_table,
    start_table,
)
from configs.plans.paths import RunPaths
from configs.records.record import Status
from flows.server.local import lease_server
from flows.server.process import prefect_version, read_server
from flows.server.settings import api_named_by_environment, data_folder
from tasks.checks.environment import machine_fingerprint

STUDY = Path(__file__).parents[2] / "benchmarks" / "studies" / "bench_noop.yaml"
THOUSANDS = 2
"""So many repetitions have a thousand cells, which take half a minute each; the others end at a hundred."""

SEAM_CALLS = 50
_ASSIGNMENTS = {
    10: ["experiments.grid.over.items=[1]", "experiments.grid.over.allocate_bytes=[0]"],
    100: ["experiments.grid.over.items=[1]"],
    1000: [],
}
_SAMPLES = {"start": "start", "cells": "cells", "pipeline": "run", "launches": "launches"}
"""First part of the names of samples, by the part that takes them."""
_SETTLE_SECONDS = 3.0
_SERVER_END_SECONDS = 30.0
_LONGEST_PART_SECONDS = 600.0


def time_start_up(repeats: int, idle_seconds: float, scratch: Path) -> Samples:
    """Seconds to a first finished flow run, in a new data folder, then with its database, then with its server.

    Then the memory of the server, and their CPU in a minute in which nobody asks them anything,
    from a window of `idle_seconds`. Leaves the last data folder in the environment.
    """
    samples: Samples = {}
    for repeat in range(repeats):
        os.environ["RANKWISE_DATA"] = str(scratch / f"data_{repeat}")
        add(samples, _part("import"), "start/")
        add(samples, {"cold": [_seconds_to_first_flow()]}, "start/")
        end_server()
        add(samples, {"warm": [_seconds_to_first_flow()]}, "start/")
        with lease_server() as lease:
            lease.wait_until_healthy()
            add(samples, {"up": [_seconds_to_first_flow()]}, "start/")
            time.sleep(_SETTLE_SECONDS)
            cpu = server_cpu_seconds()
            time.sleep(idle_seconds)
            per_minute = (server_cpu_seconds() - cpu) * 60 / idle_seconds
            add(samples, {"idle_cpu": [per_minute], "memory": [_server_bytes()]}, "start/")
        end_server()
    return samples


def time_cells(repeats: int) -> Samples:
    """Every way to do a cell at every size, the server's memory after each repetition, and the seams."""
    samples: Samples = {}
    with lease_server() as lease:
        lease.wait_until_healthy()
        for repeat in range(repeats):
            sizes = {way: _counts(repeat, counts) for way, counts in SIZES.items()}
            add(samples, _part("cells", str(repeat), json.dumps(sizes)))
            add(samples, {"cells/memory": [_server_bytes()]})
        add(samples, _part("seams", str(SEAM_CALLS)))
    end_server()
    return samples


def time_pipeline(repeats: int, scratch: Path) -> Samples:
    """The noop study at every size, as shipped and without Prefect; each run starts its own server."""
    samples: Samples = {}
    before = _count_runs()
    for repeat in range(repeats):
        arms = [(count, arm) for count in _counts(repeat, COUNTS) for arm in ("with", "without")]
        random.Random(repeat).shuffle(arms)
        for count, arm in arms:
            wall = time_run(arm, count, scratch / f"{arm}_{count}_{repeat}", _ASSIGNMENTS[count])
            add(samples, {f"run/{count}/{arm}": [wall]})
            if arm == "with":
                after = _count_runs()
                task_runs, flow_runs = after[0] - before[0], after[1] - before[1]
                add(samples, {f"run/{count}/tasks": [task_runs], f"run/{count}/flows": [flow_runs]})
                before = after
    return samples


def time_launches(repeats: int, scratch: Path, against: Path | None) -> Samples:
    """The noop study with a launch for each cell, few and many, as shipped and without Prefect; CPU of run and server.

    The server is up beforehand: what is asked for is the price of a launch. against: a checkout, installed in its
    `.venv`, that is measured too, with the same server.
    """
    samples: Samples = {}
    kinds = ["with", "without", *(("before", "before_without") if against else ())]
    for repeat in range(repeats):
        arms = [(count, arm) for count in LAUNCHES for arm in kinds]
        random.Random(repeat).shuffle(arms)
        for count, arm in arms:
            with lease_server() as lease:
                lease.wait_until_healthy()
                time.sleep(_SETTLE_SECONDS)
                cpu, run_cpu = server_cpu_seconds(), _children_cpu_seconds()
                wall = time_run(arm, count, scratch / f"launches_{arm}_{count}_{repeat}", LAUNCHES[count], against)
                run_cpu = _children_cpu_seconds() - run_cpu
                time.sleep(_SETTLE_SECONDS)
                added = {"wall": [wall], "run_cpu": [run_cpu], "server_cpu": [server_cpu_seconds() - cpu]}
            add(samples, added, f"launches/{count}/{arm}/")
            _say(json.dumps(added))
            end_server()
    return samples


def _children_cpu_seconds() -> float:
    """CPU of all processes that this one started and that have ended, with their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _counts(repeat: int, counts: Sequence[int]) -> list[int]:
    return [count for count in counts if count < 1000 or repeat < THOUSANDS]


def time_run(arm: str, count: int, runs: Path, assignments: Sequence[str], against: Path | None = None) -> float:
    """Wall seconds of one `rankwise run`. Raises RuntimeError if a cell has no figure."""
    commands = {
        "with": [str(Path(sys.executable).with_name("rankwise"))],
        "without": [sys.executable, "-m", "benchmarks.prefect_cost.parts", "without"],
    }
    if against:
        python = against / ".venv" / "bin" / "python"
        commands["before"] = [str(python.with_name("rankwise"))]
        commands["before_without"] = [str(python), "-m", "benchmarks.prefect_cost.parts", "without"]
    command = [*commands[arm], "run", str(STUDY), "--runs", str(runs)]
    for assignment in assignments:
        command += ["--set", assignment]
    runs.mkdir()
    _say(f"{count} cells, {arm}")
    began = time.monotonic()
    folder = against if arm == "before_without" else None  # its own `benchmarks` are found there
    finished = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_PART_SECONDS, cwd=folder)
    wall = time.monotonic() - began
    # Read as plain JSON: another checkout's records may have another schema.
    records = [json.loads(path.read_bytes()) for path in RunPaths(runs / "bench-noop").records.rglob("*.json")]
    measured = sum(record["status"] == Status.COMPLETED for record in records)
    if finished.returncode != 0 or measured != count:
        output = finished.stdout + finished.stderr
        raise RuntimeError(f"{count} cells {arm}: {measured} measured, {finished.returncode=}\n{output}")
    return wall


def end_server() -> None:
    """End the local server of the current data folder without its usual wait for another run."""
    server = read_server(data_folder())
    deadline = time.monotonic() + _SERVER_END_SECONDS
    while server is not None and server.alive and time.monotonic() < deadline:
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.1)


def add(samples: Samples, more: dict[str, list[float]], prefix: str = "") -> None:
    """Append to each list of samples."""
    for name, values in more.items():
        samples.setdefault(prefix + name, []).extend(values)


def _seconds_to_first_flow() -> float:
    began = time.monotonic()
    return _part("first-flow")["finished"][0] - began


def _part(*arguments: str) -> Samples:
    """Run a part in a process of its own. Raises RuntimeError with its output if it fails."""
    _say(" ".join(arguments))
    command = [sys.executable, "-m", "benchmarks.prefect_cost.parts", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_PART_SECONDS)
    if finished.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {finished.returncode=}\n{finished.stderr}")
    answer: Samples = json.loads(finished.stdout.splitlines()[-1])
    return answer


def _say(what: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {what}", file=sys.stderr, flush=True)


def _server_bytes() -> int:
    return sum(int(process.memory_info().rss) for process in server_processes())


def _count_runs() -> tuple[int, int]:
    """How many task runs and flow runs the data folder's server knows, then end it."""
    with lease_server() as lease:
        lease.wait_until_healthy()
        known, before = _known(lease.url), (-1, -1)
        while known != before:  # it records what a run sent at its end within moments
            time.sleep(0.5)
            known, before = _known(lease.url), known
    end_server()
    return known


def _known(url: str) -> tuple[int, int]:
    return int(ask(url, "/task_runs/count")), int(ask(url, "/flow_runs/count"))


def tables(samples: Samples) -> str:
    """Those of the parts that were measured, and what they were measured on."""
    here = machine_fingerprint()
    machine = (
        f"{datetime.now(UTC):%Y-%m-%d}, {here['cores']} cores of {here['cpu_model']}, {here['memory_gib']} GiB, "
        f"Python {here['python']}, Prefect {prefect_version()}"
    )
    of_parts = {
        "start": [start_table],
        "cells": [cells_table, memory_line, seams_table],
        "pipeline": [run_table],
        "launches": [launches_table],
    }
    measured = {name.split("/")[0] for name in samples}
    sections = [each(samples) for part, all_of in of_parts.items() if _SAMPLES[part] in measured for each in all_of]
    if {_SAMPLES["cells"], _SAMPLES["pipeline"]} <= measured:
        sections.append(share_table(samples))
    return "\n\n".join([machine, *sections])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of everything (default: %(default)s)")
    parser.add_argument("--idle-seconds", type=float, default=15.0, help="how long to watch the server do nothing")
    parser.add_argument("--parts", nargs="+", choices=_SAMPLES, default=list(_SAMPLES), help="only these")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="have launches of this checkout measured, too")
    arguments = parser.parse_args()
    if url := api_named_by_environment():
        print(f"the Prefect API {url} is named; unset PREFECT_API_URL or the profile: this measures the local server")
        return 2
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as folder:
        scratch, samples, repeats = Path(folder), Samples(), arguments.repeats
        os.environ["RANKWISE_DATA"] = str(scratch / "data")
        (scratch / "locks").mkdir()
        os.environ["RANKWISE_LOCKS"] = str(scratch / "locks")  # no waiting for launches of other studies
        parts: dict[str, Callable[[], Samples]] = {
            "start": lambda: time_start_up(repeats, arguments.idle_seconds, scratch),
            "cells": lambda: time_cells(repeats),
            "pipeline": lambda: time_pipeline(repeats, scratch),
            "launches": lambda: time_launches(repeats, scratch, arguments.against and arguments.against.absolute()),
        }
        began, load = time.monotonic(), os.getloadavg()[0]
        for part in arguments.parts:
            samples |= parts[part]()
        print(tables(samples))
        seconds = time.monotonic() - began
        print(f"\n{arguments.repeats} repetitions in {seconds:.0f} s; load average at the start {load:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
