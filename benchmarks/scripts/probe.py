"""What a call of the probe costs, and whether its figures are those of the library that trains.

    python -m benchmarks.scripts.probe [--calls 200000] [--pairs 200]

1. Each of so many calls `step(tokens=4096, loss=1.5)` is timed by perf_counter_ns: p50, p99. The bar is 50 us at p99.
2. A step of about 5 ms of arithmetic, with and without the call, interleaved in pairs of random order in one process:
   the median of the pairs' differences with its 95 % interval.
3. The shipped study of transformers.Trainer on one rank: step time and last loss of the record against those that the
   Trainer itself logs at its end (train_runtime over its steps) and prints.

Exit code 1 where p99 is over the bar.
"""

import argparse
import ast
import importlib
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from configs.common.files.project_files import shipped_studies
from configs.plans.paths import RunPaths
from reports.numbers.statistics import median_interval
from reports.reading.load import load_run

ROOT = Path(__file__).parents[2]
P99_SECONDS = 50e-6
_RANKWISE = str(Path(sys.executable).with_name("rankwise"))
_CHILD = "--in-child"


def call_seconds(calls: int) -> np.ndarray:
    """Seconds of each call."""
    step = importlib.import_module("rankwise_probe").step  # on PYTHONPATH of the child alone

    clock, found = time.perf_counter_ns, np.empty(calls)
    for number in range(calls):
        began = clock()
        step(tokens=4096, loss=1.5)
        found[number] = clock() - began
    return found / 1e9


def differences(pairs: int) -> tuple[np.ndarray, float]:
    """(seconds that a step with the call takes longer, by pair; median seconds of a step without it)."""
    step = importlib.import_module("rankwise_probe").step  # on PYTHONPATH of the child alone

    matrix = np.random.default_rng(0).standard_normal((160, 160))

    def work(rounds: int) -> None:
        product = matrix
        for _ in range(rounds):
            product = np.tanh(product @ matrix)

    rounds = max(1, round(40 * 5e-3 / min(_seconds(lambda: work(40)) for _ in range(20))))
    with_call, without = np.empty(pairs), np.empty(pairs)
    order = random.Random(0)
    for number in range(pairs):
        for called in order.sample((True, False), 2):
            began = time.perf_counter()
            work(rounds)
            if called:
                step(tokens=4096, loss=1.5)
            (with_call if called else without)[number] = time.perf_counter() - began
    return with_call - without, float(np.median(without))


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def child(calls: int, pairs: int) -> int:
    """Print the figures of the first two parts. Returns the exit code."""
    seconds = call_seconds(calls)
    p50, p99, p999 = np.quantile(seconds, (0.5, 0.99, 0.999))
    print(f"{calls:,} calls: p50 {1e6 * p50:.1f} us, p99 {1e6 * p99:.1f} us, p99.9 {1e6 * p999:.1f} us")
    longer, bare = differences(pairs)
    bounds = median_interval(longer)
    assert bounds is not None, "pairs are enough for an interval"
    shares = [100 * value / bare for value in (float(np.median(longer)), *bounds)]
    print(
        f"{pairs} pairs of a step of {1000 * bare:.2f} ms: {1e6 * np.median(longer):+.1f} us "
        f"(95 % CI {1e6 * bounds[0]:+.1f} to {1e6 * bounds[1]:+.1f}), "
        f"{shares[0]:+.2f} % ({shares[1]:+.2f} to {shares[2]:+.2f})"
    )
    return 0 if p99 <= P99_SECONDS else 1


def against_trainer(folder: Path) -> str:
    """Compare the record of the shipped study with what transformers.Trainer prints of the same process."""
    name = "script-hf-trainer"
    subprocess.run([_RANKWISE, "examples", name, "--out", str(folder)], check=True, capture_output=True)
    study = folder / shipped_studies()[name].name
    more = ("measuring.repeats=1", "measuring.memory=false", "experiments.weak.to=1", "workload.warmup_steps=0")
    sets = [word for each in more for word in ("--set", each)]
    done = subprocess.run(
        [_RANKWISE, "run", str(study), "--runs", str(folder / "runs"), "--no-calibrate", *sets],
        cwd=folder, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    run = RunPaths((folder / "runs" / name).absolute())
    read = load_run(run)
    (cell,) = read.cells.values()
    samples = read.samples(cell.completed[0], ("step_seconds", "loss"))
    steps, losses = samples["0/step_seconds"], samples["0/loss"]
    (log,) = run.jobs.glob("*/rank_0.log")
    dicts = [ast.literal_eval(text) for text in re.findall(r"^\{.*\}$", log.read_text(), re.M)]
    told = next(float(each["train_runtime"]) for each in dicts if "train_runtime" in each)
    printed = [float(each["loss"]) for each in dicts if "loss" in each]
    theirs = printed[-len(steps) :]
    same = sum(math.isclose(one, other, rel_tol=1e-3) for one, other in zip(losses, theirs, strict=True))
    return (
        f"transformers.Trainer: its train_runtime is {told:.4g} s for {len(printed)} steps; the record has "
        f"{steps.sum():.4g} s for the {len(steps)} steps after the first, "
        f"median {1000 * median(steps.tolist()):.1f} ms; "
        f"{same} of {len(steps)} losses are those that it prints"
    )


def main() -> int:
    """Run all parts. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument(_CHILD, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_child:
        return child(asked.calls, asked.pairs)
    with tempfile.TemporaryDirectory(prefix="rankwise-probe-") as name:
        variables = {"RANKWISE_PROBE": name, "RANK": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        path = os.pathsep.join((str(ROOT / "engine" / "probe"), str(ROOT)))
        command = [sys.executable, "-m", "benchmarks.scripts.probe", _CHILD, "--calls", str(asked.calls)]
        done = subprocess.run(
            [*command, "--pairs", str(asked.pairs)], env=os.environ | variables | {"PYTHONPATH": path}, cwd=ROOT
        )
        print(against_trainer(Path(name)), flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
