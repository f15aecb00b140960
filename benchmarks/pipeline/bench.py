"""What the pipeline itself costs, on this machine, now: python -m benchmarks.pipeline.bench

Runs the shipped 24-cell study packed and with a launch for each cell, then a thousand noop cells in
one launch, each as `rankwise run` in a process of its own, and prints wall seconds, seconds inside
measured cells, and the resident memory of the process that holds Prefect while cells are measured and
collected; then seconds by phase. Every run starts the local Prefect server itself, on a database that exists: to make
a new one takes some seconds once in a user's life, and is timed apart.

    python -m benchmarks.pipeline.bench --against ../before --pairs 5      # runs a study with two checkouts in turn
    python -m benchmarks.pipeline.bench --phases runs/quickstart           # seconds by phase of a run that there is
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.pipeline.pairs import compare
from benchmarks.pipeline.phases import Phases, phases_of, print_phases
from configs.plans.paths import RunPaths
from configs.records.record import Status
from flows.server.local import lease_server
from flows.server.settings import api_named_by_environment, data_folder
from tasks.campaign.ledger import read_ledger

QUICKSTART = Path("configs/studies/quickstart.yaml")
STUDIES = Path(__file__).parents[1] / "studies"
_SAMPLE_SECONDS = 0.25
_SERVER_END_SECONDS = 30.0


@dataclass(frozen=True)
class Timing:
    """One `rankwise run`."""

    name: str
    cells: int
    launches: int
    wall_seconds: float
    inside_seconds: float
    measuring_memory_bytes: list[int]
    phases: Phases

    @property
    def outside_seconds(self) -> float:
        return self.wall_seconds - self.inside_seconds


def time_run(name: str, study: Path, runs: Path, assignments: list[str]) -> Timing:
    """Run a study to its end in a fresh folder. Raises RuntimeError if a cell has no figure."""
    command = [str(Path(sys.executable).with_name("rankwise")), "run", str(study), "--runs", str(runs / name)]
    for assignment in assignments:
        command += ["--set", assignment]
    run = RunPaths(runs / name / study.stem.replace("_", "-"))
    await_no_server()
    began = time.monotonic()
    memory: list[int] = []
    with (runs / f"{name}.log").open("w") as log:
        process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if len(list(run.jobs.glob("*/launcher.json"))) > len(list(run.jobs.glob("*/collected"))):
                memory.append(_resident_bytes(process))
            time.sleep(_SAMPLE_SECONDS)
    wall = time.monotonic() - began
    entries = [entry for found in read_ledger(run).entries.values() for entry in found]
    if process.returncode != 0 or any(entry.status is not Status.COMPLETED for entry in entries):
        raise RuntimeError(f"{name}: exit code {process.returncode}\n{(runs / f'{name}.log').read_text()}")
    inside = sum(float(entry.record.figures["measurement_seconds"] or 0.0) for entry in entries)
    launches, sizes = len(list(run.jobs.iterdir())), [size for size in memory if size]
    return Timing(name, len(entries), launches, wall, inside, sizes, phases_of(run.folder, wall))


def _resident_bytes(process: psutil.Popen) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def make_database() -> float | None:
    """Start the local Prefect server once and let it end. Seconds until it answered; None for a named API."""
    if api_named_by_environment():
        return None
    began = time.monotonic()
    with lease_server() as lease:
        lease.wait_until_healthy()
        seconds = time.monotonic() - began
    await_no_server()
    return seconds


def await_no_server() -> None:
    """Return when no local server is up any more, so that the next run must start its own."""
    deadline = time.monotonic() + _SERVER_END_SECONDS
    while (data_folder() / "server.json").exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def print_timings(packed: Timing, unpacked: Timing, noop: Timing) -> None:
    """The figures, and beside them what they are held against."""
    row = "{:<10} {:>6} {:>9} {:>9.1f} {:>9.1f} {:>9.1f}"
    print(f"{'':<10} {'cells':>6} {'launches':>9} {'wall s':>9} {'inside s':>9} {'outside s':>9}")
    for timing in (packed, unpacked, noop):
        values = (timing.wall_seconds, timing.inside_seconds, timing.outside_seconds)
        print(row.format(timing.name, timing.cells, timing.launches, *values))
    print_phases((timing.name, timing.phases) for timing in (packed, unpacked, noop))
    allowed = 0.1 * packed.wall_seconds + 10.0
    print(f"packed, outside cells: {packed.outside_seconds:.1f} s (at most 10 % of wall + 10 s = {allowed:.1f} s)")
    ratio = unpacked.wall_seconds / packed.wall_seconds
    print(f"packed is {ratio:.2f} times as fast as a launch for each cell (at least 4)")
    print(f"noop: {1000 * noop.outside_seconds / noop.cells:.1f} ms of pipeline for each of {noop.cells} cells")
    memory = noop.measuring_memory_bytes
    if memory:
        first, last, peak = memory[0] / 2**20, memory[-1] / 2**20, max(memory) / 2**20
        print(f"noop: the Prefect process held {first:.0f} MiB at first, {last:.0f} at last, {peak:.0f} at most")


def main() -> None:
    """Run all three and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    parser.add_argument("--phases", type=Path, metavar="RUN", help="print the phases of this run folder, and no more")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="run a study with this checkout, too, in turn")
    parser.add_argument("--pairs", type=int, default=5, help="with --against: runs of each of both")
    parser.add_argument("--study", type=Path, default=QUICKSTART, help="with --against: relative to each checkout")
    arguments = parser.parse_args()
    if arguments.phases:
        print_phases([(arguments.phases.name, phases_of(arguments.phases))])
        return
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as scratch:
        runs = arguments.runs or Path(scratch)
        runs.mkdir(parents=True, exist_ok=True)
        seconds = make_database()
        if seconds is not None:
            print(f"local Prefect server: {seconds:.1f} s until it answered, before any run")
        if arguments.against:
            here = Path(__file__).parents[2]
            compare(arguments.against, here, arguments.study, arguments.pairs, runs, await_no_server)
            return
        study = STUDIES / "bench_pipeline.yaml"
        packed = time_run("packed", study, runs, [])
        unpacked = time_run("unpacked", study, runs, ["pack=false"])
        noop = time_run("noop", STUDIES / "bench_noop.yaml", runs, [])
        print_timings(packed, unpacked, noop)


if __name__ == "__main__":
    main()
