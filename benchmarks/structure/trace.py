"""Run the smallest study of a checkout and list the product's files that take part in one measurement.

    found = trace_run(Path("."))
    found.way, found.helpers

One cell is measured once: a synthetic model of a million parameters, generate, two ranks with tensor parallelism. The
run uses the checkout's own `rankwise` and folders of its own for data, cache and locks. The rule, the same for every
checkout:

way        a file whose function is on the call stack when the measurement moves on: a file of the run folder is opened,
           renamed or linked, a process is started or replaced by exec, or a rank reads the clock. These are the files
           that one reads to follow a measurement from `rankwise run` to report.md
nouns      a file that is not on the way, of which functions are called by two files or more on the way: what one has to
           look up while reading. Both together are the files to read (a reader counted about 85 by hand where this
           rule gives 97)
helpers    every other file of which a function is called: it computes something for one of the others, or for one place

Calls made while modules are imported do not count, nor do modules without a called function.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.structure import call_recorder
from benchmarks.structure.graph import Import

STUDY = """\
study: structure
models:
  - id: synthetic:llama-1m@0
workload: {kind: generate, prompt_tokens: 8, new_tokens: 4, num_prompts: 2}
experiments:
  two:
    kind: sweep
    base: {layout: {tp: 2}}
    over: {batch_size: [1]}
measuring: {repeats: 1, warmup: 1, min_seconds: 0, min_passes: 2, cell_timeout_seconds: 120}
"""
_LIMIT_SECONDS = 1800
ENTRIES = ("flows.cli.run", "slurm.launch", "engine.worker")
"""What runs on this machine: the command, each job's launcher, each rank. The same before and after a move."""


@dataclass(frozen=True)
class Trace:
    """Files that took part in a run, by their part; paths relative to the checkout."""

    way: tuple[str, ...]
    nouns: tuple[str, ...]
    helpers: tuple[str, ...]

    @property
    def files(self) -> int:
        return len(self.way) + len(self.nouns) + len(self.helpers)


def trace_run(root: Path) -> Trace:
    """Run the study under the recorder. Raises RuntimeError, with the end of its output, if the run fails."""
    with tempfile.TemporaryDirectory(prefix="rankwise-structure-") as folder:
        here = Path(folder)
        (here / "hook").mkdir()
        (here / "calls").mkdir()
        shutil.copy(call_recorder.__file__, here / "hook" / "sitecustomize.py")
        study = here / "structure.yaml"
        study.write_text(_words_of(root, STUDY), encoding="utf-8")
        own = root / ".venv" / "bin" / "rankwise"
        command = [str(own if own.exists() else Path(sys.executable).with_name("rankwise")), "run", str(study)]
        try:
            done = subprocess.run(
                [*command, "--runs", str(here / "runs")],
                env=os.environ | _environment(root, here),
                capture_output=True,
                text=True,
                timeout=_LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"rankwise run of {root} did not end within {_LIMIT_SECONDS} s") from error
        if done.returncode:
            raise RuntimeError(f"rankwise run of {root} failed:\n{(done.stdout + done.stderr)[-2000:]}")
        lines = [line for file in (here / "calls").glob("*.calls") for line in file.read_text().splitlines()]
    return sorted_out(lines)


def _environment(root: Path, here: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(here / "hook"),
        "RANKWISE_TRACE_ROOT": f"{root.resolve()}{os.sep}",
        "RANKWISE_TRACE_FOLDER": str(here / "calls"),
        "RANKWISE_TRACE_RUNS": str(here / "runs"),
        "RANKWISE_DATA": str(here / "data"),
        "RANKWISE_CACHE": str(here / "cache"),
        "RANKWISE_LOCKS": str(here),
        "RANKWISE_CALIBRATE": "0",
    }


def _words_of(root: Path, study: str) -> str:
    """The study with the field names of the checkout: `least_` and `most_` became `min_` and `max_`."""
    shipped = (root / "configs" / "studies" / "quickstart.yaml").read_text(encoding="utf-8")
    return study if "least_" in shipped else study.replace("least_", "min_").replace("most_", "max_")


def sorted_out(lines: Iterable[str]) -> Trace:
    """Return the parts that files had in a run, from the recorder's lines."""
    way: set[str] = set()
    callers: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        kind, file, _, caller = line.split("\t")
        if not file.endswith(".py"):
            continue  # Jinja compiles templates to functions of their own
        if kind == "way":
            way.add(file)
        else:
            callers[file].add(caller)
    called = callers.keys() - way
    nouns = {file for file in called if len((callers[file] & way) - {file}) > 1}
    return Trace(tuple(sorted(way)), tuple(sorted(nouns)), tuple(sorted(called - nouns)))


def reachable(imports: list[Import], entries: Iterable[str] = ENTRIES) -> set[str]:
    """Return the modules that the entries may import, at any time, themselves included."""
    following: dict[str, set[str]] = defaultdict(set)
    for one in imports:
        if one.kind != "type":
            following[one.importer].add(one.imported)
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += following[module]
    return found
