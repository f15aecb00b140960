"""The process of one check: runs it and sends each figure to the runner at once.

    python -m benchmarks.gpu.running.child CHECK --to DESCRIPTOR --seconds 60 --folder DIR [--rehearse] [--plant KIND]

Every line on the descriptor is one JSON object: {"surroundings": {...}}, {"figure": {...}} or {"failed": "cause"}. The
runner alone writes files, so that a check that crashes loses nothing.
"""

import argparse
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.catalog import CHECKS
from benchmarks.gpu.reporting.results import Figure
from benchmarks.gpu.running.plants import PLANTS
from configs.common.system.proc import end_with_parent

_CAUSE_CHARACTERS = 600


def main() -> int:
    """Run the check. Returns the exit code: 0, or 1 if it raised."""
    asked = _arguments()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    end_with_parent(signal.SIGKILL)
    deadline = time.monotonic() + asked.seconds
    check = next(one for one in CHECKS if one.name == asked.check)
    asked.folder.mkdir(parents=True, exist_ok=True)

    def tell(line: dict[str, Any]) -> None:
        os.write(asked.to, json.dumps(line).encode() + b"\n")

    try:
        if asked.plant:
            PLANTS[asked.plant]()
        hide_unusable("torchao")
        bench = importlib.import_module("benchmarks.gpu.bench")
        here = bench.Bench(
            report=lambda figure: _report(figure, tell),
            rehearsal=asked.rehearse,
            deadline=deadline,
            folder=asked.folder,
            out=asked.folder.parents[1],
        )
        tell({"surroundings": here.surroundings()})
        importlib.import_module(check.module).run(here)
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_CAUSE_CHARACTERS]
        tell({"failed": text})
        return _leave(1)
    return _leave(0)


def hide_unusable(name: str) -> None:
    """Have a package that cannot be imported here taken for absent.

    transformers imports torchao wherever it finds it, and torchao 0.18 cannot be imported with torch 2.9: without this
    no model of transformers could be loaded there.
    """
    if importlib.util.find_spec(name) is None:
        return
    try:
        importlib.import_module(f"{name}.quantization")
    except ImportError as error:
        print(f"{name} is left out: {error}", flush=True)
        for module in [found for found in sys.modules if found.split(".")[0] == name]:
            del sys.modules[module]
        sys.modules[name] = None  # type: ignore[assignment]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.running.child")
    parser.add_argument("check")
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--plant", choices=list(PLANTS))
    return parser.parse_args()


def _report(figure: Figure, tell: Any) -> None:
    print(figure, flush=True)
    tell({"figure": asdict(figure)})


def _leave(code: int) -> int:
    """End without the teardown of libraries, which is slow and may abort: all figures have been sent."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
