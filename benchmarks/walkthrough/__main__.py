"""Run the command lines and write docs/walkthrough.md; without root, those that need machines are left out.

python -m benchmarks.walkthrough [--quick] [--out FILE]
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.walkthrough.steps import Step, all_steps
from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.azure import FakeAzure
from tests.support.clouds.gcp import FakeGcp

ROOT = Path(__file__).parents[2]
_LIMIT_SECONDS = 420
_CONFIG = """{
  "nodes": [{"id": "local", "type": "local"},
            {"id": "aws-g4dn-xlarge", "type": "aws", "instance_type": "g4dn.xlarge", "region": "us-west-2"}],
  "benchmark_defaults": {"repeats": 1, "batch_sizes": [1, 2], "timeout_seconds": 600},
  "cloud_defaults": {"aws": {"region": "us-east-1", "ssh_from": "203.0.113.7/32", "python": "PYTHON"}}
}
"""


def main() -> int:
    """Run the steps. Returns the exit code: 1 where one ended otherwise than expected, or something is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only the steps that measure nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "walkthrough.md")
    asked = parser.parse_args()
    steps = [step for step in all_steps() if step.quick or not asked.quick]
    without = hosts.why_not()
    wrong, texts = [], []
    with tempfile.TemporaryDirectory(prefix="rankwise-walkthrough-") as name, ExitStack() as stack:
        folder = Path(name)
        clouds: list[Any] = []
        if without is None and not asked.quick:
            for each, kind in (("aws", FakeAws), ("gcp", FakeGcp), ("azure", FakeAzure)):
                (folder / each).mkdir()
                clouds.append(stack.enter_context(kind(folder / each)))
        work = folder / "work"
        work.mkdir()
        (work / "my_config.json").write_text(_CONFIG.replace("PYTHON", sys.prefix))
        shutil.copytree(ROOT / "configs" / "studies", work / "configs" / "studies")
        shutil.copytree(ROOT / "configs" / "models", work / "configs" / "models")
        for step in steps:
            if step.clouds and not clouds:
                continue
            text, code, seconds = _run(step, work, folder)
            expected = step.code in (-1, code)
            print(f"{'ok ' if expected else 'BAD'} {code} {seconds:5.1f} s  {step.written[:90]}", flush=True)
            wrong += [] if expected else [step.written]
            texts.append(_section(step, text, code))
        left = [item for cloud in clouds for item in cloud.left()]
    if left:
        print(f"left in the clouds: {left}")
    if not wrong and not left and not asked.quick:
        asked.out.write_text(_page(steps, texts))
    return 1 if wrong or left else 0


def _run(step: Step, work: Path, folder: Path) -> tuple[str, int, float]:
    environment = os.environ | {
        "RANKWISE_DATA": str(folder / "data"),
        "RANKWISE_CACHE": str(folder / "cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON_ENV": sys.prefix,
        "COLUMNS": "120",
    }
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", step.run], cwd=work, env=environment, text=True, timeout=_LIMIT_SECONDS,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    text = done.stdout
    for path, shown in ((str(work), "."), (str(folder), "~"), (sys.prefix, "$VIRTUAL_ENV"), (str(ROOT), "rankwise")):
        text = text.replace(path, shown)
    return text, done.returncode, time.monotonic() - began


def _section(step: Step, text: str, code: int) -> str:
    lines = [line.rstrip()[:150] for line in text.strip().splitlines()]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    shown = lines if len(lines) <= step.lines else [*lines[: step.lines // 2], "...", *lines[-(step.lines // 2) :]]
    command = step.run.replace("$PYTHON_ENV", "$VIRTUAL_ENV")
    against = f"Run against: {step.against}.\n\n" if step.against else ""
    ended = f"\nExit code {code}.\n" if code else ""
    return f"`{step.written}`\n\n{against}```\n$ {command}\n" + "\n".join(shown) + f"\n```\n{ended}"


def _page(steps: list[Step], texts: list[str]) -> str:
    parts, before = [], ""
    for step, text in zip(steps, texts, strict=False):
        if step.part != before:
            parts.append(f"## {step.part}\n")
            before = step.part
        parts.append(text)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    head = (
        "# Walk-through\n\n"
        f"Written by `make walkthrough` on {day}: command lines of the project's first documents, in order, with\n"
        "`rankwise` for the scripts' names, and what each printed. Long outputs are cut in the middle (`...`).\n"
    )
    return head + "\n" + "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
