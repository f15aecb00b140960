"""Does the verdict tell noise from defects? Clean and defective runs of our engine, judged, printed as Markdown.

    python -m benchmarks.correctness                          # or make bench-correctness: some minutes
    python -m benchmarks.correctness --clean 20 --defects 2 --seed 3 --json runs.json

Clean runs are of random models of the Llama family in layouts with dp, tp and pp, batches of different lengths, in
float32 and bfloat16, and of the shipped tiny model; defects are planted on the same (tests/support/planted_defects),
each also in bfloat16 beside its float32 twin, as in a study. Bars: no clean run is called a defect, and every
defect that a float32 run can have is found there. A missed bar is named at the end, and the exit status is 1.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.common.execution import Dtype
from reports.text import UNKNOWN, Table, number

SCRIPT = Path(__file__).parents[1] / "tests" / "support" / "answers" / "correctness_campaign.py"
MODEL = Path(__file__).parents[1] / "configs" / "models" / "tiny-stdlib"
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
_LONGEST_SECONDS = 3600

Run = dict[str, Any]


def campaign(clean: int, defects: int, seed: int, models: Sequence[Path] = (MODEL,)) -> list[Run]:
    """Every judged run. Raises RuntimeError with the end of what the script said where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        wanted = ["--clean", str(clean), "--defects", str(defects), "--seed", str(seed)]
        wanted += [part for model in models for part in ("--model", str(model))]
        done = subprocess.run(
            [sys.executable, str(SCRIPT), str(answers), *wanted],
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(f"{SCRIPT.name} failed:\n{done.stderr[-3000:]}")
        return [json.loads(line) for line in answers.read_text().splitlines()]


def clean_table(runs: Sequence[Run]) -> Table:
    """One row for each dtype: how many, how many of them called a defect, and how near to a limit they came."""
    rows = []
    for dtype in DTYPES:
        mine = [run for run in runs if run["defect"] is None and run["dtype"] == dtype]
        excesses = sorted(run["excess"] for run in mine if run["excess"] is not None)
        called = sum(run["word"] != "agrees" for run in mine)
        middle = number(excesses[len(excesses) // 2], 2) if excesses else UNKNOWN
        rows.append((dtype, str(len(mine)), str(called), middle, number(excesses[-1], 2) if excesses else UNKNOWN))
    columns = ("clean runs in", "runs", "called a defect", "worst statistic over its limit, median", "largest")
    return Table(columns, tuple(rows))


def defect_table(runs: Sequence[Run]) -> Table:
    """One row for each defect: found by dtype, and by what. Runs in which it had no effect do not count."""
    rows = []
    for name in dict.fromkeys(run["defect"] for run in runs if run["defect"] is not None):
        cells = []
        for dtype in DTYPES:
            mine = [run for run in _effective(runs) if run["defect"] == name and run["dtype"] == dtype]
            found = [run for run in mine if run["word"] == "defect"]
            cells.append(f"{len(found)} of {len(mine)}" if mine else UNKNOWN)
        excesses = [run["excess"] for run in _effective(runs) if run["defect"] == name and run["dtype"] == "float32"]
        known = [excess for excess in excesses if excess is not None]
        rows.append((name, *cells, number(min(known), 2) if known else UNKNOWN))
    columns = ("planted defect", "found in float32", "found in bfloat16 alone", "least excess in float32")
    return Table(columns, tuple(rows))


def _effective(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run["word"] != "without effect"]


def missed_bars(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run that was called wrongly."""
    missed = []
    for run in _effective(runs):
        what = f"{run['case']}, {run['setting']}"
        if run["defect"] is None and run["word"] != "agrees":
            missed.append(f"clean, yet {run['word']}: {what} ({run['statistic']}, {number(run['excess'])} times)")
        if run["defect"] is not None and run["dtype"] == "float32" and run["word"] != "defect":
            missed.append(f"not found: {run['defect']} in {what} ({number(run['excess'])} of the limit)")
    return missed


def main() -> int:
    """Run, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean", type=int, default=100, help="clean runs of each dtype")
    parser.add_argument("--defects", type=int, default=8, help="models that every defect is planted on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write every run there")
    asked = parser.parse_args()
    runs = campaign(asked.clean, asked.defects, asked.seed)
    if asked.json is not None:
        asked.json.write_text(json.dumps(runs, indent=1) + "\n")
    print(f"{clean_table(runs).markdown()}\n\n{defect_table(runs).markdown()}\n")
    missed = missed_bars(runs)
    print("\n".join(missed) if missed else "Every clean run agrees; every defect is found in float32.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
