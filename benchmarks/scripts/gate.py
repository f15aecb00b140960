"""How often the performance gate of docs/examples/gate is right: a script slowed by 10 %, and an equal one.

    python -m benchmarks.scripts.gate --results gate.jsonl [--slowed 20] [--equal 40] [--minutes 7]

Each study is run by `rankwise run` and judged by `rankwise compare --within gate --undisturbed --junit`, as in CI,
in an empty folder with the two versions of the script. A trial that is in the results file is not repeated, so that the
campaign can be made in parts: it ends after --minutes. Exit code 1 where, once all trials are made, fewer than 19 of 20
slowed scripts close the gate, or more than 2 of 40 equal ones do.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

from flows.server.local import lease_server
from flows.server.settings import api_named_by_environment

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "gate"
NORMAL, SLOWED = "ROUNDS = 40", "ROUNDS = 44"
REGRESSION = 4
MIN_DETECTED, MAX_FALSE_ALARMS = 0.95, 0.05
_RANKWISE = str(Path(sys.executable).with_name("rankwise"))
_LIMIT_SECONDS = 900.0


def trial(slowed: bool, repeats: int | None) -> dict[str, object]:
    """Run one study and judge it. Raises RuntimeError where a command ends otherwise than it should."""
    with tempfile.TemporaryDirectory(prefix="rankwise-gate-") as name:
        folder = Path(name)
        source = (EXAMPLE / "train.py").read_text()
        assert NORMAL in source, "the example has the line that is changed"
        for version, text in (("base", source), ("new", source.replace(NORMAL, SLOWED) if slowed else f"{source}\n")):
            (folder / version).mkdir()
            (folder / version / "train.py").write_text(text)
        shutil.copy(EXAMPLE / "gate.yaml", folder)
        began = time.monotonic()
        more = [] if repeats is None else ["--set", f"measuring.repeats={repeats}"]
        _command(folder, 0, "run", "gate.yaml", "--runs", "runs", "--no-calibrate", *more)
        compare = ["compare", "runs/gate", "--within", "gate", "--undisturbed", "--junit", "gate.xml", "--json"]
        done = _command(folder, REGRESSION, *compare)
        (cell,) = json.loads(done.stdout)["cells"]
        failures = int(ElementTree.parse(folder / "gate.xml").getroot().get("failures", "-1"))
        if failures != (done.returncode == REGRESSION):
            raise RuntimeError(f"exit code {done.returncode}, but the JUnit file has {failures} failures")
        return {
            "slowed": slowed,
            "exit_code": done.returncode,
            "verdict": cell["verdict"],
            "figures": cell.get("figures"),
            "seconds": round(time.monotonic() - began, 1),
            "load": os.getloadavg()[0],
        }


def _command(folder: Path, other_code: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([_RANKWISE, *arguments], cwd=folder, capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    if done.returncode not in (0, other_code):
        raise RuntimeError(f"rankwise {arguments[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def _trials(missing: list[bool], repeats: int | None, results: Path, until: float) -> list[dict[str, object]]:
    """Make the trials that fit in the time, and keep each."""
    made: list[dict[str, object]] = []
    longest = 0.0
    for slowed in missing:
        if time.monotonic() + longest > until:
            break
        began = time.monotonic()
        made.append(trial(slowed, repeats))
        longest = max(longest, time.monotonic() - began)
        with results.open("a") as file:
            file.write(json.dumps(made[-1]) + "\n")
        print(json.dumps(made[-1]), flush=True)
    return made


def main() -> int:
    """Make the trials that are missing, and print what came of all. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gate.jsonl"))
    parser.add_argument("--slowed", type=int, default=20)
    parser.add_argument("--equal", type=int, default=40)
    parser.add_argument("--repeats", type=int, help="of the study; none: its own")
    parser.add_argument("--minutes", type=float, default=60.0)
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    known = [json.loads(line) for line in asked.results.read_text().splitlines()] if asked.results.exists() else []
    missing = [True] * (asked.slowed - sum(each["slowed"] for each in known))
    missing += [False] * (asked.equal - sum(not each["slowed"] for each in known))
    random.Random(len(known)).shuffle(missing)
    with ExitStack() as leases:
        if not api_named_by_environment():
            leases.enter_context(lease_server()).wait_until_healthy()  # one server for all studies, as a team has
        known += _trials(missing, asked.repeats, asked.results, until)
    counts = {
        slowed: [each["exit_code"] == REGRESSION for each in known if each["slowed"] is slowed]
        for slowed in (True, False)
    }
    print("| script | studies | gate closed (exit code 4, JUnit failure) |\n| --- | ---: | ---: |")
    print(f"| slowed by 10 % | {len(counts[True])} | {sum(counts[True])} |")
    print(f"| equal | {len(counts[False])} | {sum(counts[False])} |")
    enough = len(counts[True]) >= asked.slowed and len(counts[False]) >= asked.equal
    right = sum(counts[True]) >= MIN_DETECTED * len(counts[True])
    return 0 if enough and right and sum(counts[False]) <= MAX_FALSE_ALARMS * len(counts[False]) else 1


if __name__ == "__main__":
    sys.exit(main())
