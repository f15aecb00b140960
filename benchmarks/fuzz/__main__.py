"""Fuzz all readers, or some: cases and faults of each, and the inputs that found them as files.

    python -m benchmarks.fuzz --minutes 30 --target study.file --target models.header

Exit code 1 where a fault was found. Each target runs in a process of its own, which hypothesis and atheris get in turn.
The printed seed repeats a run of hypothesis.
"""

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.fuzz.registry import registered

_GRACE_SECONDS = 120


def main() -> int:
    """Run every engine on every target and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="in all")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("fuzz-finds"), help="folder of the found inputs")
    parser.add_argument("--target", action="append", metavar="NAME", help="only this one; may be repeated")
    options = parser.parse_args()
    known = registered()
    unknown = set(options.target or ()) - set(known)
    if unknown:
        parser.error(f"unknown target {', '.join(sorted(unknown))}; use one of: {', '.join(known)}")
    engines = ["hypothesis"]
    if importlib.util.find_spec("atheris") is not None:
        engines.append("atheris")
    else:
        print("atheris is not installed (pip install 'rankwise[fuzz]'): hypothesis alone", flush=True)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1, 2**31)
    names = options.target or list(known)
    seconds = options.minutes * 60 / (len(names) * len(engines))
    print(f"seed {seed}, {len(names)} targets, {seconds:.0f} s each with {' and '.join(engines)}", flush=True)
    rows = []
    for name in names:
        for engine in engines:
            row = _run(engine, name, seconds, seed, options.out)
            rows.append(row)
            print(f"{name:<20} {engine:<11} {row['cases']:>9,} cases  {len(row['finds'])} faults", flush=True)
            for cause in row["finds"]:
                print(f"    {cause}", flush=True)
    cases, faults = sum(row["cases"] for row in rows), sum(len(row["finds"]) for row in rows)
    hours = sum(row["seconds"] for row in rows) / 3600
    print(f"{hours:.2f} hours, {cases:,} cases, {faults} faults{f'; inputs in {options.out}' if faults else ''}")
    return 1 if faults else 0


def _run(engine: str, name: str, seconds: float, seed: int, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.fuzz.worker", "--engine", engine, "--target", name]
    command += ["--seconds", str(seconds), "--seed", str(seed), "--out", str(out)]
    ended: dict[str, Any] = {"cases": 0, "seconds": seconds}
    # libFuzzer ends a worker without a chance to remove its files.
    with tempfile.TemporaryDirectory(prefix="rankwise-fuzz-") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds + _GRACE_SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            return ended | {"finds": [f"hangs for more than {_GRACE_SECONDS} s"]}
    lines = done.stdout.decode(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith('{"target"'):
            return dict(json.loads(line))
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
    return ended | {"finds": [f"the process ended with code {done.returncode}: {last[0][:300]}"]}


if __name__ == "__main__":
    sys.exit(main())
