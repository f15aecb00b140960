"""Every test marked `gpu`, by pytest in a process of its own; only files that bear the mark are collected."""

import subprocess
import sys
from xml.etree import ElementTree

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.running.runner import ROOT

_MARK = "mark.gpu"


def run(bench: Bench) -> None:
    """Report how many tests passed, and the name of each that did not."""
    marked = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if _MARK in path.read_text()]
    if not marked:
        bench.seen("tests marked gpu", 0.0)
        return
    report = bench.folder / "tests.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        *marked,
    ]
    subprocess.run(command, cwd=ROOT, check=False, timeout=max(1.0, bench.seconds_left - 2))
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    for case in failed:
        bench.judged(f"{case.get('classname')}::{case.get('name')}", "failed", "passed", "is")
    note = f"{len(cases)} of {len(marked)} files, {len(skipped)} skipped"
    passed = len(cases) - len(failed) - len(skipped)
    bench.figure("tests marked gpu that passed", [float(passed)], "", float(len(cases)), note=note)
