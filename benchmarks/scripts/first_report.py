"""From `rankwise init` to the first report, as a new user goes: run the commands, write docs/tutorial/your-script.md.

    python -m benchmarks.scripts.first_report [--out FILE]

The commands run in an empty folder with docs/examples/first_script/train.py in it. Exit code 1 where one of them fails,
or there are more than six, or they take more than ten minutes.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "first_script" / "train.py"
MAX_COMMANDS, MAX_SECONDS = 6, 600.0
STEPS = (
    (
        "rankwise init --from train.py",
        "`init` parses the script without running it: its arguments, its framework, and the lines that it prints.",
    ),
    (
        "cat study.yaml",
        "The study is a YAML file. Correct what was guessed wrongly, such as what a step counts (`items_per_step`).",
    ),
    ("rankwise validate study.yaml", "`validate` starts nothing."),
    (
        "rankwise run study.yaml",
        "`run` starts the script by torchrun on one and on two ranks, three times each, and writes the report.",
    ),
    ("head -n 12 runs/train/report.md", "The report opens with its answers."),
    ("rankwise status runs/train", "Each measurement has a record, those that failed too."),
)
_LINES = 40
_WIDTH = 150


def main() -> int:
    """Run the commands and write the page. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "tutorial" / "your-script.md")
    asked = parser.parse_args()
    sections, failed, total, load = [], [], 0.0, os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rankwise-first-") as name:
        folder = Path(name)
        shutil.copy(SCRIPT, folder)
        for command, said in STEPS:
            text, code, seconds = _run(command, folder)
            total += seconds
            failed += [command] if code else []
            print(f"{code} {seconds:6.1f} s  {command}", flush=True)
            sections.append(f"{said}\n\n```\n$ {command}\n{text}\n```\n")
    print(f"{len(STEPS)} commands, {total:.0f} s")
    if failed or len(STEPS) > MAX_COMMANDS or total > MAX_SECONDS:
        return 1
    asked.out.write_text(_page(sections, total, load))
    return 0


def _run(command: str, folder: Path) -> tuple[str, int, float]:
    """(output as the page shows it, exit code, seconds)."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, text=True, timeout=MAX_SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    seconds = time.monotonic() - began
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(str(folder), ".").replace(str(ROOT), "rankwise")
    text = re.sub(r" *\(\[[^\]]*\]\([^)]*\)\)", "", text)  # links of the report lead nowhere from the page
    lines = [line.rstrip()[:_WIDTH] for line in text.strip().splitlines()]
    shown = lines if len(lines) <= _LINES else [*lines[: _LINES // 2], "...", *lines[-_LINES // 2 :]]
    return "\n".join(shown), done.returncode, seconds


def _page(sections: list[str], total: float, load: float) -> str:
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    head = (
        "# Your script: from `rankwise init` to the first report\n\n"
        "You have a training script that runs under torchrun, and [Rankwise installed](../how-to/install.md). This\n"
        "page measures how the script scales from one rank to two. The script is\n"
        "[train.py](../examples/first_script/train.py): plain PyTorch that prints a line for each step, without\n"
        "a line for Rankwise.\n\n"
        f"Written by `make first-report` on {day}, on a machine with {os.cpu_count()} cores and a load average of\n"
        f"{load:.1f} at the start: {len(STEPS)} commands took {total:.0f} s.\n\n"
    )
    tail = (
        "\nNext: [other ways to measure a script](../how-to/own-program.md), more ranks (`to: 8`), a sweep over\n"
        "`params`, or a [performance gate](../how-to/gate.md) for continuous integration.\n"
    )
    return head + "\n".join(sections) + tail


if __name__ == "__main__":
    sys.exit(main())
