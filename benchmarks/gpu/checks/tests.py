"""Every test marked `gpu`, by pytest in processes of its own; only files that bear the mark are collected.

Most of the time goes into compiling kernels, so several processes share the device where pytest-xdist is installed.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.running.runner import ROOT

_MARK = "mark.gpu"
_PROCESSES = 8
_OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")


def run(bench: Bench) -> None:
    """Report how many tests passed, and the name of each that did not."""
    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if _MARK in path.read_text()]
    if not marked:
        bench.seen("tests marked gpu", 0.0)
        return
    report, output = bench.folder / "tests.xml", bench.folder / "tests.txt"
    try:
        with output.open("w") as written:
            subprocess.run(
                _command(report, marked, 2 if bench.rehearsal else _PROCESSES),
                cwd=ROOT,
                # Plugins that happen to be there may warn, which is an error in our tests.
                env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                check=False,
                timeout=max(1.0, bench.seconds_left - 2),
                stdout=written,
                stderr=subprocess.STDOUT,
            )
    except subprocess.TimeoutExpired:
        bench.seen("tests marked gpu until the time was up", outcomes(output))
        raise
    finally:
        print(output.read_text(errors="replace"))
    if not report.exists():
        raise RuntimeError(f"pytest ended early: {output.read_text(errors='replace').strip().splitlines()[-1:]}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    for case in failed:
        bench.judged(f"{case.get('classname')}::{case.get('name')}", "failed", "passed", "is")
    note = f"{len(cases)} of {len(marked)} files, {len(skipped)} skipped"
    passed = len(cases) - len(failed) - len(skipped)
    bench.figure("tests marked gpu that passed", [float(passed)], "", float(len(cases)), note=note)


def _command(report: Path, files: list[str], processes: int) -> list[str]:
    """Return the command of pytest with what it needs of plugins, in several processes where they can be had."""
    options = ["-v", "--durations=10", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    options += ["-p", "pytest_timeout"]
    if find_spec("xdist") is not None:
        options += ["-p", "xdist", "-n", str(processes)]
    return [sys.executable, "-m", "pytest", *options, *files]


def outcomes(output: Path) -> str:
    """Return how many tests pytest's output, with -v, says to have passed, failed and so on."""
    found = [match[1] for line in output.read_text(errors="replace").splitlines() if (match := _OUTCOME.search(line))]
    return ", ".join(f"{found.count(word)} {word.lower()}" for word in dict.fromkeys(found)) or "none"
