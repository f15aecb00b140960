"""Run the command lines and write docs/walkthrough.md; what a step printed is kept, so an interrupted run goes on.

    python -m benchmarks.walkthrough [--quick] [--minutes 7] [--again] [--folder FOLDER] [--out FILE]

As root, with sshd and Slurm installed. The page is written when every step has ended as expected and nothing is left.
"""

import argparse
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.walkthrough.hub_models import hub_models
from benchmarks.walkthrough.page import Result, page
from benchmarks.walkthrough.steps import Need, Step, all_steps
from configs.common.base import write_atomically
from slurm.lab import cluster
from slurm.lab.commands import why_no_lab
from slurm.lab.plan import LabRequest
from tests.support.clouds import hosts
from tests.support.clouds.aws import FakeAws
from tests.support.clouds.azure import FakeAzure
from tests.support.clouds.gcp import FakeGcp
from tests.support.servers.hub_server import HubServer

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 900
LAB = "walk"
_CONFIG = """{
  "nodes": [{"id": "local", "type": "local"},
            {"id": "aws-g4dn-xlarge", "type": "aws", "instance_type": "g4dn.xlarge", "region": "us-west-2"}],
  "benchmark_defaults": {"repeats": 3, "batch_sizes": [1, 2, 4, 8], "timeout_seconds": 600},
  "cloud_defaults": {"aws": {"region": "us-west-2", "instance_type": "g4dn.xlarge"},
                     "gcp": {"zone": "us-central1-a", "machine_type": "n1-standard-4"},
                     "azure": {"location": "eastus", "vm_size": "Standard_NC6s_v3"}}
}
"""
_NODES = """{"cloud_defaults": {"aws": {"region": "us-east-1", "ssh_from": "203.0.113.7/32", "python": "PYTHON"}}}
"""


def main() -> int:
    """Run the steps. Returns the exit code, 1: a step ended otherwise or something is left; 2: out of time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="only the steps that measure nothing; no page")
    parser.add_argument("--minutes", type=float, help="begin no step after them; the next call goes on")
    parser.add_argument("--needs", choices=("none", "clouds", "cluster", "hub"), help="only steps that need this")
    parser.add_argument("--partial", action="store_true", help="write the page whatever has been run so far")
    parser.add_argument("--again", action="store_true", help="forget what was kept")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "walkthrough")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "walkthrough.md")
    asked = parser.parse_args()
    steps = [step for step in all_steps() if step.quick or not asked.quick]
    if asked.again:
        shutil.rmtree(asked.folder, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    walk = Walk(asked.folder.resolve())
    with walk.surroundings:
        asked_for = [step for step in steps if asked.needs in (None, *(step.needs or ["none"]))]
        code = walk.run(asked_for, None if asked.minutes is None else 60 * asked.minutes)
    whole = code == 0 and not asked.quick and asked.needs is None
    if whole or asked.partial:
        asked.out.write_text(page([(step, walk.kept(step)) for step in all_steps()], datetime.now(UTC)))
    return code


class Walk:
    """The steps in their folder. A plain class: what is brought up lives over the steps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work, self._kept = folder, folder / "work", folder / "steps"
        self.results: dict[str, Result] = {}
        self.surroundings = ExitStack()
        self._clouds: list[Any] = []
        self._without_clouds = dict(os.environ)
        self._environment = {
            "RANKWISE_DATA": str(folder / "data"),
            "RANKWISE_CACHE": str(folder / "cache"),
            "RANKWISE_LOCKS": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHON_ENV": sys.prefix,
            "ROOT": str(ROOT),
            "COLUMNS": "120",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "RANKWISE_CALIBRATE": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._up: set[Need] = set()
        self._prepare()

    def _prepare(self) -> None:
        self._kept.mkdir(parents=True, exist_ok=True)
        if not self.work.exists():
            self.work.mkdir()
            (self.work / "my_config.json").write_text(_CONFIG)
            (self.work / "nodes_of_tests.json").write_text(_NODES.replace("PYTHON", sys.prefix))
            for name in ("studies", "models"):
                shutil.copytree(ROOT / "configs" / name, self.work / "configs" / name)
        for name in ("pipeline.yaml", "cluster.yaml"):
            shutil.copy(Path(__file__).with_name(name), self.work / name)

    def run(self, steps: list[Step], seconds: float | None) -> int:
        """Run what has no kept result. Returns the exit code."""
        began, wrong, late = time.monotonic(), [], 0
        for group in _groups(steps):
            kept = [self.kept(step) for step in group]
            if None not in kept:
                self.results |= {step.id: result for step, result in zip(group, kept, strict=True) if result}
                continue
            if seconds is not None and time.monotonic() - began > seconds:
                late += len(group)
                continue
            for step in group:
                wrong += self._one(step)
        left = [item for cloud in self._clouds for item in cloud.left()]
        if left:
            print(f"left in the clouds: {left}")
        if late:
            print(f"{late} steps are left for the next call")
        return 1 if wrong or left else 2 if late else 0

    def _one(self, step: Step) -> list[str]:
        """Run a step; returns it where it ended otherwise than expected."""
        for need in step.needs:
            if (why := self._bring_up(need)) is not None:
                print(f"BAD {step.written[:90]}: {why}", flush=True)
                return [step.written]
        result = self._run(step)
        right = result.code == step.code and step.text in result.text
        print(f"{'ok ' if right else 'BAD'} {result.code} {result.seconds:5.1f} s  {step.written[:90]}", flush=True)
        if not right:
            print(result.text, flush=True)
            return [step.written]
        self.results[step.id] = result
        write_atomically(self._kept / f"{step.id}.json", result.model_dump_json(indent=1))
        return []

    def kept(self, step: Step) -> Result | None:
        """What a step printed in this call or an earlier one."""
        path = self._kept / f"{step.id}.json"
        return Result.model_validate_json(path.read_text()) if path.exists() else None

    def _bring_up(self, need: Need) -> str | None:
        """Start what a step runs against. Returns what is missing here."""
        if need in self._up:
            return None
        if need == "clouds":
            if (why := hosts.why_not()) is not None:
                return why
            for name, kind in (("aws", FakeAws), ("gcp", FakeGcp), ("azure", FakeAzure)):
                shutil.rmtree(self.folder / name, ignore_errors=True)
                (self.folder / name).mkdir()
                self._clouds.append(self.surroundings.enter_context(kind(self.folder / name)))
        elif need == "cluster":
            if (why := why_no_lab()) is not None:
                return why
            self.surroundings.callback(cluster.down, LAB, self.folder / "lab")
            cluster.up(LabRequest(name=LAB, folder=self.folder / "lab"))
            self._environment["SLURM_CONF"] = str(cluster.find_lab(LAB, self.folder / "lab").slurm_conf)
        else:
            hub = self.surroundings.enter_context(HubServer(hub_models(self.folder / "hub")))
            self._environment["HF_ENDPOINT"] = hub.endpoint
        self._up.add(need)
        return None

    def _run(self, step: Step) -> Result:
        # The clouds here put their credentials into this process's environment.
        environment = (os.environ if "clouds" in step.needs else self._without_clouds) | self._environment
        began = time.monotonic()
        with subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", step.run], cwd=self.work, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                text, code = process.communicate(timeout=LIMIT_SECONDS)[0], process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                text, code = f"{process.communicate()[0]}\nnot ended within {LIMIT_SECONDS} s", -signal.SIGKILL
        return Result(text=self._readable(text), code=code, seconds=time.monotonic() - began)

    def _readable(self, text: str) -> str:
        """Without colours and without the folders of this machine."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
        shown = (
            (self.work, "."),
            (self.folder, "~"),
            (sys.prefix, "$VIRTUAL_ENV"),
            (ROOT, "$ROOT"),
            (platform.release(), "..."),
            (socket.gethostname(), "this-machine"),
        )
        for path, name in shown:
            text = text.replace(str(path), name)
        return text


def _groups(steps: list[Step]) -> Iterator[list[Step]]:
    """Steps that depend on each other together, even with others between them; the rest one by one."""
    done: set[str] = set()
    for name, found in groupby(steps, lambda step: step.group):
        if not name:
            yield from ([step] for step in found)
        elif name not in done:
            done.add(name)
            yield [step for step in steps if step.group == name]


if __name__ == "__main__":
    sys.exit(main())
