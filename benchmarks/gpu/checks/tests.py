"""Every test marked `gpu`, by pytest in processes of its own; only files that bear the mark are collected.

Most of the time goes into compiling kernels, so several processes share the device where pytest-xdist is installed.
"""

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
    report = bench.folder / "tests.xml"
    together = ["-n", str(_PROCESSES)] if find_spec("xdist") is not None and not bench.rehearsal else []
    options = ["-v", "--durations=10", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    output = bench.folder / "tests.txt"
    try:
        with output.open("w") as written:
            subprocess.run(
                [sys.executable, "-m", "pytest", *options, *together, *marked],
                cwd=ROOT,
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
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    for case in failed:
        bench.judged(f"{case.get('classname')}::{case.get('name')}", "failed", "passed", "is")
    note = f"{len(cases)} of {len(marked)} files, {len(skipped)} skipped"
    passed = len(cases) - len(failed) - len(skipped)
    bench.figure("tests marked gpu that passed", [float(passed)], "", float(len(cases)), note=note)


def outcomes(output: Path) -> str:
    """Return how many tests pytest's output, with -v, says to have passed, failed and so on."""
    found = [match[1] for line in output.read_text(errors="replace").splitlines() if (match := _OUTCOME.search(line))]
    return ", ".join(f"{found.count(word)} {word.lower()}" for word in dict.fromkeys(found)) or "none"
