"""Our engine against its peers and against what the machine can do: python -m benchmarks.inference.bench

Writes the model of 200 million parameters as two safetensors files, runs the study `bench_inference.yaml` on
them as `rankwise run` in a process of its own, and prints the table: each figure with its interval, its bar, and
whether that is met. Half an hour on two cores, which should have nothing else to do. `--table RUN` prints the
table of a run that there is already.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.inference.rows import inference_rows, read_measured, table_text
from configs.plans.paths import RunPaths

STUDY = Path(__file__).parents[2] / "benchmarks" / "studies" / "bench_inference.yaml"
_ARCHITECTURE, _SEED = "llama-200m", "0"


def run_study(runs: Path, assignments: list[str]) -> RunPaths:
    """Run the study on a model written beside it; as `run_shipped`."""
    model = runs / f"{_ARCHITECTURE}-files"
    if not model.exists():
        command = [sys.executable, "-m", "engine.peers.checkpoint", _ARCHITECTURE, _SEED, str(model)]
        subprocess.run(command, check=True)
    return run_shipped(STUDY, runs, [f"models.0.id={model.absolute()}", *assignments])


def run_shipped(study: Path, runs: Path, assignments: list[str], *options: str) -> RunPaths:
    """Run a shipped study as `rankwise run` in a process of its own, whose output goes to this one's.

    A cell that failed is no error: its row says so. Raises RuntimeError where nothing was measured at all.
    """
    rankwise = str(Path(sys.executable).with_name("rankwise"))
    command = [rankwise, "run", str(study), "--runs", str(runs), *options]
    for assignment in assignments:
        command += ["--set", assignment]
    finished = subprocess.run(command)
    run = RunPaths(runs / study.stem.replace("_", "-"))
    if not run.records.is_dir():
        raise RuntimeError(f"{run.folder}: holds no records; rankwise run ended with exit code {finished.returncode}")
    return run


def main() -> None:
    """Run and print, or print only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="keep the model's files and the run folder here")
    parser.add_argument("--table", type=Path, metavar="RUN", help="print the table of this run folder; measure nothing")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of rankwise run")
    arguments = parser.parse_args()
    if arguments.table:
        print(table_text(inference_rows(read_measured(RunPaths(arguments.table)))))
        return
    with tempfile.TemporaryDirectory(prefix="rankwise-bench-") as scratch:
        runs = arguments.runs or Path(scratch)
        runs.mkdir(parents=True, exist_ok=True)
        run = run_study(runs, arguments.set)
        print(table_text(inference_rows(read_measured(run))))


if __name__ == "__main__":
    main()
