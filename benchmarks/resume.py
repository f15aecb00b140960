"""Kill a run again and again, and see whether anything is lost: python -m benchmarks.resume

`rankwise run` is ended with SIGKILL at random moments (seeded) and started again, then left to finish.
Exit code 0 only if every repeat has exactly one completed record at its first attempt, and no process
of the run is left.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.records.record import Status
from tasks.campaign.ledger import planned_repeats, read_ledger

STUDY = Path(__file__).parents[1] / "benchmarks" / "studies" / "bench_resume.yaml"
_LATEST_KILL_SECONDS = 14.0
_LONGEST_RUN_SECONDS = 240.0


def kill_and_resume(runs: Path, kills: int, seed: int) -> RunPaths:
    """Start the study `kills` times and kill it each time, then once more to its end."""
    command = [str(Path(sys.executable).with_name("rankwise")), "run", str(STUDY), "--runs", str(runs)]
    generator = random.Random(seed)
    run = RunPaths(runs / "bench-resume")
    for number in range(1, kills + 1):
        moment = generator.uniform(0.2, _LATEST_KILL_SECONDS)
        with (runs / f"kill_{number}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            time.sleep(moment)
            ended = process.poll()
            process.kill()
            process.wait()
        how = "killed" if ended is None else f"had ended with {ended}"
        print(f"run {number}: {how} after {moment:4.1f} s, {len(list(run.records.glob('*/*.json')))} records")
    with (runs / "last.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=_LONGEST_RUN_SECONDS).returncode
    print(f"last run: exit code {code}")
    return run


def findings(run: RunPaths) -> list[str]:
    """What is wrong with a finished run folder: lost or doubled repeats, processes that are left."""
    plan = Plan.model_validate_json(run.plan.read_bytes())
    ledger = read_ledger(run)
    wrong = list(ledger.set_aside)
    reached = Counter[str]()
    for place in planned_repeats(plan):
        entries = ledger.entries.get(place, [])
        if [entry.status for entry in entries] != [Status.COMPLETED]:
            wrong.append(f"{place}: {[f'{entry.status} at attempt {entry.attempt}' for entry in entries]}")
        for entry in entries:
            reached[f"{entry.record.job}/{entry.record.position}"] += 1
    wrong += [f"{name} gave two records" for name, count in reached.items() if count > 1]
    # A measurement made twice leaves parts that no record took up.
    wrong += [f"{path} was measured a second time" for path in sorted(run.jobs.glob("*/parts/*.json"))]
    wrong += [f"process {process.pid} is left: {' '.join(process.cmdline())[:100]}" for process in processes_of(run)]
    return wrong


def processes_of(run: RunPaths) -> list[psutil.Process]:
    """Processes whose command line names the run folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(run.folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def main() -> int:
    """Run and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="keep the run folder here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rankwise-resume-") as scratch:
        runs = arguments.runs or Path(scratch)
        runs.mkdir(parents=True, exist_ok=True)
        run = kill_and_resume(runs, arguments.kills, arguments.seed)
        wrong = findings(run)
        total = len(planned_repeats(Plan.model_validate_json(run.plan.read_bytes())))
        print("\n".join(wrong) or f"{total} of {total} repeats measured exactly once, no process left")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
