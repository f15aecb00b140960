"""What Prefect costs this project, on this machine, now: python -m benchmarks.prefect_cost.bench

Times the local server's start and rest, ways to do a cell in Prefect, the shipped pipeline with and
without Prefect, and single calls of the API, and prints the tables of docs/measurements/prefect.md.
Works in a temporary data folder; takes about nine minutes, in which the machine should do nothing else.

What is compared is measured in turn, in random order, and once more in each repetition. What needs a
process of its own is in `benchmarks.prefect_cost.parts`.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.prefect_cost.parts import Samples, ask, server_cpu_seconds, server_processes
from configs.plans.paths import RunPaths
from configs.plans.record import Status
from flows.server.local import lease_server
from flows.server.process import prefect_version, read_server
from flows.server.settings import api_named_by_environment, data_folder
from tasks.campaign.ledger import read_ledger
from tasks.checks.machine import machine_fingerprint

STUDY = Path(__file__).parents[2] / "benchmarks" / "studies" / "bench_noop.yaml"
COUNTS = (10, 100, 1000)
WAYS = {
    "plain": "plain function call",
    "sequential": "task per cell, called in turn",
    "submitted": "task per cell, `.submit()`",
    "subflow": "subflow per cell",
}
# Subflows last a second each: a thousand are twenty minutes.
SIZES = {"plain": [*COUNTS], "sequential": [*COUNTS], "submitted": [*COUNTS], "subflow": [10]}
THOUSANDS = 2
"""So many repetitions have a thousand cells, which take half a minute each; the others end at a hundred."""

SEAM_CALLS = 50
_ASSIGNMENTS = {
    10: ["experiments.grid.over.items=[1]", "experiments.grid.over.allocate_bytes=[0]"],
    100: ["experiments.grid.over.items=[1]"],
    1000: [],
}
LAUNCHES = {
    count: ["pack=false", f"experiments.grid.over.items={items}", "experiments.grid.over.allocate_bytes=[0]"]
    for count, items in ((10, [1]), (60, [1, 2, 3, 4, 5, 6]))
}
"""Ten launches are drawn side by side, sixty in groups."""
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


def time_launches(repeats: int, scratch: Path) -> Samples:
    """The noop study with a launch for each cell, few and many, as shipped and without Prefect; and the server's CPU.

    The server is up beforehand: what is asked for is the price of a launch.
    """
    samples: Samples = {}
    for repeat in range(repeats):
        arms = [(count, arm) for count in LAUNCHES for arm in ("with", "without")]
        random.Random(repeat).shuffle(arms)
        for count, arm in arms:
            with lease_server() as lease:
                lease.wait_until_healthy()
                time.sleep(_SETTLE_SECONDS)
                cpu = server_cpu_seconds()
                wall = time_run(arm, count, scratch / f"launches_{arm}_{count}_{repeat}", LAUNCHES[count])
                time.sleep(_SETTLE_SECONDS)
                added = {"wall": [wall], "server_cpu": [server_cpu_seconds() - cpu]}
            add(samples, added, f"launches/{count}/{arm}/")
            end_server()
    return samples


def _counts(repeat: int, counts: Sequence[int]) -> list[int]:
    return [count for count in counts if count < 1000 or repeat < THOUSANDS]


def time_run(arm: str, count: int, runs: Path, assignments: Sequence[str]) -> float:
    """Wall seconds of one `rankwise run`. Raises RuntimeError if a cell has no figure."""
    rankwise = [str(Path(sys.executable).with_name("rankwise"))]
    command = rankwise if arm == "with" else [sys.executable, "-m", "benchmarks.prefect_cost.parts", "without"]
    command = [*command, "run", str(STUDY), "--runs", str(runs)]
    for assignment in assignments:
        command += ["--set", assignment]
    runs.mkdir()
    _say(f"{count} cells, {arm} Prefect")
    began = time.monotonic()
    finished = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_PART_SECONDS)
    wall = time.monotonic() - began
    ledger = read_ledger(RunPaths(runs / "bench-noop"))
    measured = [entry for found in ledger.entries.values() for entry in found if entry.status is Status.COMPLETED]
    if finished.returncode != 0 or len(measured) != count:
        output = finished.stdout + finished.stderr
        raise RuntimeError(f"{count} cells {arm} Prefect: {len(measured)} measured, {finished.returncode=}\n{output}")
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


def figure(values: list[float], scale: float = 1.0, digits: int = 1) -> str:
    """`median (least..most)`; the bare value where there is one or all look the same."""
    shown = [f"{scale * value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} ({shown[1]}..{shown[2]})"


def table(header: str, rows: list[list[str]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    names = header.split("|")
    rule = ["---", *(["---:"] * (len(names) - 1))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([name.strip() for name in names], rule, *rows))


def start_table(samples: Samples) -> str:
    """What it takes until a first flow run has ended, and what the server takes at rest."""
    rows = [
        ("first flow run, new data folder: database made", "cold", 1.0, "s"),
        ("first flow run, database there", "warm", 1.0, "s"),
        ("first flow run, server up", "up", 1.0, "s"),
        ("`import prefect`", "import", 1.0, "s"),
        ("`from prefect import flow, task`", "import_used", 1.0, "s"),
        ("server, resident", "memory", 2**-20, "MiB"),
        ("server at rest, CPU in a minute", "idle_cpu", 1.0, "s"),
    ]
    lines = [
        [what, figure(samples[f"start/{name}"], scale, 0 if unit == "MiB" else 2), unit]
        for what, name, scale, unit in rows
    ]
    return table("what | median (least..most) | unit", lines)


def cells_table(samples: Samples) -> str:
    """Ways to do a cell."""
    rows = []
    for way, counts in SIZES.items():
        for count in counts:
            found = {
                name: samples[f"cells/{way}/{count}/{name}"] for name in ("body", "flow", "recorded", "server_cpu")
            }
            per_cell = figure(found["body"], 1000 / count, 2 if way != "plain" else 4)
            cpu = figure(found["server_cpu"], 1000 / count, 0)
            rows.append([WAYS[way], f"{count:,}", per_cell, figure(found["flow"]), figure(found["recorded"]), cpu])
    return table(
        "way | cells | ms per cell | whole flow run, s | recorded after, s | CPU of the server, ms per cell", rows
    )


def added_seconds(samples: Samples, count: int) -> list[float]:
    """What Prefect adds to a run, repetition by repetition."""
    return [a - b for a, b in zip(samples[f"run/{count}/with"], samples[f"run/{count}/without"], strict=True)]


def run_table(samples: Samples) -> str:
    """The pipeline with and without Prefect."""
    rows = []
    for count in COUNTS:
        run, added = f"run/{count}", added_seconds(samples, count)
        rows.append(
            [
                f"{count:,}",
                *(figure(samples[f"{run}/{arm}"]) for arm in ("with", "without")),
                figure(added),
                figure(added, 1000 / count, 0 if count < 1000 else 1),
                *(figure(samples[f"{run}/{kind}"], 1, 0) for kind in ("flows", "tasks")),
            ]
        )
    return table(
        "cells | as shipped, s | without Prefect, s | difference, s | per cell, ms | flow runs | task runs", rows
    )


def launches_table(samples: Samples) -> str:
    """The price of a launch: with Prefect less without, sixty less ten."""
    few, many = LAUNCHES

    def of(count: int, kind: str) -> list[float]:
        found = (samples[f"launches/{count}/{arm}/{kind}"] for arm in ("with", "without"))
        return [a - b for a, b in zip(*found, strict=True)]

    rows = [
        [
            f"{count} launches",
            *(figure(samples[f"launches/{count}/{arm}/wall"]) for arm in ("with", "without")),
            figure(of(count, "wall")),
            figure(of(count, "server_cpu"), 1.0, 2),
        ]
        for count in LAUNCHES
    ]
    per = [
        [(b - a) / (many - few) for a, b in zip(of(few, kind), of(many, kind), strict=True)]
        for kind in ("wall", "server_cpu")
    ]
    rows.append(["each launch more", "", "", f"{figure(per[0], 1000, 0)} ms", figure(per[1], 1.0, 3)])
    return table("run | as shipped, s | without Prefect, s | difference, s | CPU of the server, s", rows)


def share_table(samples: Samples) -> str:
    """Per cent of a cell of one second: medians."""

    def row(what: str, seconds_per_cell: Callable[[int], float | None]) -> list[str]:
        shares = [seconds_per_cell(count) for count in COUNTS]
        return [what, *("not measured" if share is None else f"{100 * share:.2f} %" for share in shares)]

    def body(way: str, count: int) -> float | None:
        found = samples.get(f"cells/{way}/{count}/body")
        return None if found is None else statistics.median(found) / count

    def stages(count: int) -> float:
        price = body("sequential", 10)
        assert price is not None
        return price * statistics.median(samples[f"run/{count}/tasks"]) / count

    rows = [row(name, lambda count, way=way: body(way, count)) for way, name in WAYS.items()]  # type: ignore[misc]
    rows.append(row("as shipped, task per stage of a launch", stages))
    rows.append(
        row("as shipped, start-up and all", lambda count: statistics.median(added_seconds(samples, count)) / count)
    )
    return table(" | ".join(["way", *(f"{count:,} cells" for count in COUNTS)]), rows)


def seams_table(samples: Samples) -> str:
    """Single calls."""
    names = {
        "artifact": "an artifact created",
        "poll": "the flow run's state read",
    }
    rows = [[what, figure(samples[f"seams/{name}"], 1000)] for name, what in names.items()]
    return table("call | ms", rows)


def tables(samples: Samples) -> str:
    """All of them, and what they were measured on."""
    here = machine_fingerprint()
    machine = (
        f"{datetime.now(UTC):%Y-%m-%d}, {here['cores']} cores of {here['cpu_model']}, {here['memory_gib']} GiB, "
        f"Python {here['python']}, Prefect {prefect_version()}"
    )
    held = samples["cells/memory"]
    memory = f"Guard and server after {len(held)} such repetitions, resident: {held[-1] / 2**20:.0f} MiB"
    sections = [
        each(samples) for each in (start_table, cells_table, run_table, launches_table, share_table, seams_table)
    ]
    return "\n\n".join([machine, *sections[:2], memory, *sections[2:]])


def main() -> int:
    """Measure everything and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of everything (default: %(default)s)")
    parser.add_argument("--idle-seconds", type=float, default=15.0, help="how long to watch the server do nothing")
    arguments = parser.parse_args()
    if url := api_named_by_environment():
        print(f"the Prefect API {url} is named; unset PREFECT_API_URL or the profile: this measures the local server")
        return 2
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as folder:
        scratch, samples = Path(folder), {}
        began, load = time.monotonic(), os.getloadavg()[0]
        samples = time_start_up(arguments.repeats, arguments.idle_seconds, scratch)
        samples |= time_cells(arguments.repeats)
        samples |= time_pipeline(arguments.repeats, scratch)
        samples |= time_launches(arguments.repeats, scratch)
        print(tables(samples))
        seconds = time.monotonic() - began
        print(f"\n{arguments.repeats} repetitions in {seconds:.0f} s; load average at the start {load:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
