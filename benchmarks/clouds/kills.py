"""Kill a study on rented nodes again and again: python -m benchmarks.clouds.kills [--kills 20] [--cloud aws]

`rankwise run` of a study on two rented nodes is ended with SIGKILL and resumed each time; in the end it finishes. Every
other kill comes at a random moment after the start (seeded), the rest at one after a measurement has begun. Exit code
0 only if every measurement has exactly one completed record, none was made twice, and nothing is left in the provider.
The cost of the time lost is in the report.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.clouds import bench
from benchmarks.clouds import places as places_module
from benchmarks.resume import findings
from configs.plans.paths import RunPaths
from configs.plans.rentals import Rentals
from tests.support.run_folders.studies import under_measurement

STUDY = {
    "study": "killed",
    "workload": {"kind": "noop", "seconds": 1.5},
    "experiments": {
        "pairs": {"kind": "sweep", "over": {"label": ["a", "b", "c"]}, "base": {"dp": 2, "items": 2}},
    },
    "measuring": {"repeats": 4, "memory": False, "cell_timeout_seconds": 60},
}  # fmt: skip
_LATEST_KILL_SECONDS = 30.0
_LATEST_WHILE_MEASURING_SECONDS = 6.0
_BEGIN_LIMIT_SECONDS = 240.0
_LIMIT_SECONDS = 600.0


def kill_and_resume(study: Path, runs: Path, kills: int, seed: int) -> int:
    """Start the study `kills` times and kill it each time, then run it to its end. Returns the last exit code."""
    command = [str(Path(sys.executable).with_name("rankwise")), "run", str(study), "--runs", str(runs)]
    generator = random.Random(seed)
    run = RunPaths(runs / "killed")
    for number in range(1, kills + 1):
        while_measuring = number % 2 == 0
        moment = generator.uniform(0.0, _LATEST_WHILE_MEASURING_SECONDS if while_measuring else _LATEST_KILL_SECONDS)
        began = time.monotonic()
        with (runs / f"kill_{number}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            if while_measuring:
                _await_measurement(run, process)
            time.sleep(moment)
            ended = process.poll()
            process.kill()
            process.wait()
        how = "killed" if ended is None else f"had ended with {ended}"
        where = "while measuring" if while_measuring else "on its way"
        seconds = time.monotonic() - began
        print(f"run {number}: {how} {where} after {seconds:5.1f} s, {len(bench.records(run))} records", flush=True)
    with (runs / "last.log").open("w") as log:
        return subprocess.run(command, stdout=log, stderr=log, timeout=_LIMIT_SECONDS).returncode


def _await_measurement(run: RunPaths, process: "subprocess.Popen[bytes]") -> None:
    """Return when a rank of this run is inside a measurement, when the run has ended, or after the limit."""
    deadline = time.monotonic() + _BEGIN_LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < deadline and not under_measurement(run.folder):
        time.sleep(0.05)


def main() -> int:
    """Kill, resume, judge."""
    places_module.end_hosts_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cloud", choices=("aws", "gcp", "azure"), default="aws")
    parser.add_argument("--keep", type=Path, help="folder for the run folder and the logs")
    arguments = parser.parse_args()
    missing = places_module.why_not()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="rankwise-kills-") as scratch:
        runs = arguments.keep or Path(scratch) / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        with places_module.all_places(Path(scratch) / "clouds", (arguments.cloud,), lab=False) as places:
            study = places_module.write_study(Path(scratch), places, STUDY)
            code = kill_and_resume(study, runs, arguments.kills, arguments.seed)
            run = RunPaths(runs / "killed")
            found = bench.wrong(run, places.left())
        found += findings(run)
        (rental,) = Rentals.model_validate_json(run.rentals.read_bytes()).rentals
        print(f"last run: exit code {code}; rented {len(rental.attempts)} times, {rental.usd or 0:.4f} USD in all")
        print("\n".join(found) or "every measurement completed once; nothing is left in the provider")
    return 1 if found or code else 0


if __name__ == "__main__":
    sys.exit(main())
