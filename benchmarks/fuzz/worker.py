"""Fuzz one target for some seconds and print what came of it as a line of JSON.

    python -m benchmarks.fuzz.worker --engine hypothesis --target study.file --seconds 60 --seed 1 --out fuzz-finds

Engines: `hypothesis` changes valid inputs by rules; `atheris` (libFuzzer) is guided by the branches that an input
reaches.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

_MAX_INPUT_BYTES = 16_384
_HANG_SECONDS = 60
_PACKAGES = ["configs", "engine.planner", "engine.models", "reports.reading", "slurm", "tasks", "yaml"]


def main(arguments: list[str] | None = None) -> int:
    """Run the engine and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("hypothesis", "atheris"), required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.engine == "atheris":
        return _atheris(options)
    return _hypothesis(options)


def _hypothesis(options: argparse.Namespace) -> int:
    from hypothesis import HealthCheck, given, seed, settings

    from benchmarks.fuzz.finds import Finds
    from benchmarks.fuzz.mutations import inputs
    from benchmarks.fuzz.oracle import judge, warm_up
    from benchmarks.fuzz.registry import registered

    target = registered()[options.target]
    warm_up(target.function)
    finds, cases = Finds(options.out, target.name), 0
    began = time.monotonic()
    for data in target.seeds:
        fault = judge(target.function, data)
        if fault is not None:
            finds.add(target.function, data, fault)
    number = options.seed
    while time.monotonic() - began < options.seconds:

        @seed(number)
        @settings(
            max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
        )
        @given(inputs(target.seeds))
        def attempt(data: bytes) -> None:
            nonlocal cases
            if time.monotonic() - began >= options.seconds:
                return
            cases += 1
            fault = judge(target.function, data)
            if fault is not None:
                finds.add(target.function, data, fault)

        attempt()
        number += 1
    _print(options, cases, sorted(finds.causes), time.monotonic() - began)
    return 0


def _atheris(options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=_PACKAGES, enable_loader_override=False):
        from benchmarks.fuzz.registry import registered

        target = registered()[options.target]
    from benchmarks.fuzz.finds import Finds
    from benchmarks.fuzz.oracle import judge, warm_up

    warm_up(target.function)
    finds, cases = Finds(options.out, target.name), 0
    began = time.monotonic()
    corpus = Path(tempfile.mkdtemp(prefix="rankwise-fuzz-"))

    def attempt(data: bytes) -> None:
        nonlocal cases
        cases += 1
        fault = judge(target.function, data)
        if fault is not None:
            finds.add(target.function, data, fault)
        if time.monotonic() - began >= options.seconds:
            # libFuzzer ends by _exit(), which runs nothing of ours.
            _print(options, cases, sorted(finds.causes), time.monotonic() - began)
            shutil.rmtree(corpus, ignore_errors=True)
            os._exit(0)

    for number, data in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(data)
    options.out.mkdir(parents=True, exist_ok=True)
    limits = [
        f"-max_len={_MAX_INPUT_BYTES}",
        f"-timeout={_HANG_SECONDS}",
        "-rss_limit_mb=4096",
        f"-seed={options.seed}",
    ]
    artifacts = f"-artifact_prefix={options.out / options.target}-"
    atheris.Setup([sys.argv[0], *limits, artifacts, "-print_final_stats=0", "-verbosity=0", str(corpus)], attempt)
    atheris.Fuzz()
    return 0


def _print(options: argparse.Namespace, cases: int, causes: list[str], seconds: float) -> None:
    told: dict[str, Any] = {"target": options.target, "engine": options.engine, "seed": options.seed}
    told |= {"cases": cases, "seconds": round(seconds, 1), "finds": causes}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main())
