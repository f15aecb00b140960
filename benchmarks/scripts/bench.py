"""Run the six shipped studies of scripts end to end, on two ranks of this machine and over two nodes of a lab.

    python -m benchmarks.scripts.bench [--where ranks|lab|both] [--only ddp,jax] [--launcher srun] [--keep FOLDER]

Each study is copied by `rankwise examples` and run by `rankwise run`, as a user would. Prints a table; exit code 1
where a cell is not completed or a script has more than five lines for Rankwise. The lab needs root rights. --launcher:
instead of the studies' own, for scripts that read RANK and WORLD_SIZE; mpirun must be installed.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from configs.common.files.project_files import shipped_studies
from configs.plans.paths import RunPaths
from reports.reading.load import load_run
from reports.reading.run_figures import run_figures
from slurm.lab import cluster
from slurm.lab.plan import LabRequest

LIBRARIES = {
    "ddp": "torch",
    "hf-trainer": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "deepspeed": "deepspeed",
    "jax": "jax",
}
"""Shipped study `script-<name>` -> distribution whose version is told."""
MARK = "# Rankwise"
MAX_LINES = 5
_RANKWISE = str(Path(sys.executable).with_name("rankwise"))
_LIMIT_SECONDS = 1200.0
_TARGET = {
    "kind": "slurm", "name": "lab", "partition": "lab", "nodes": 2, "ranks_per_node": 1, "max_running": 1,
    "poll_seconds": 1, "preflight": False,
}  # fmt: skip

_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Row:
    """One cell of one study."""

    study: str
    version: str
    lines: int
    where: str
    cell: str
    hosts: int
    status: str
    step_milliseconds: float | None
    seconds: float

    def text(self) -> str:
        """The row in Markdown."""
        step = "–" if self.step_milliseconds is None else f"{self.step_milliseconds:.3g}"
        cells = (self.study, self.version, self.lines, self.where, self.cell, self.hosts, self.status, step)
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEAD = (
    "| study | version | lines for Rankwise | where | cell | hosts | status | median step, ms |\n"
    "| --- | --- | ---: | --- | --- | ---: | --- | ---: |"
)


def added_lines(study: Path) -> int:
    """Lines of the study's script that are there for Rankwise."""
    scripts = list((study.parent / "scripts").glob("*.py"))
    assert len(scripts) == 1, f"{study} has one script, not {scripts}"
    return sum(MARK in line for line in scripts[0].read_text().splitlines())


def run_study(
    name: str, folder: Path, where: str, repeats: int, environment: dict[str, str], launcher: str | None
) -> list[Row]:
    """Copy a shipped study, run it, and return a row for each cell. Raises RuntimeError where it leaves no records."""
    place = folder / f"{name}-{where}{'' if launcher is None else f'-{launcher}'}"
    arguments = ["--set", f"measuring.repeats={repeats}", "--set", "measuring.memory=false"]
    if launcher is not None:
        arguments += ["--set", f"workload.launcher={launcher}"]
    if launcher == "mpirun":
        arguments += ["--set", f"workload.environment={json.dumps(_MPI_AS_ROOT)}"]
    if where == "lab":
        arguments += ["--set", f"targets={json.dumps([_TARGET])}"]
    subprocess.run([_RANKWISE, "examples", f"script-{name}", "--out", str(place)], check=True, capture_output=True)
    study = place / shipped_studies()[f"script-{name}"].name
    command = [_RANKWISE, "run", str(study), "--runs", str(place / "runs"), *arguments]
    began = time.monotonic()
    with (place / "out.log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=_LIMIT_SECONDS, cwd=place)
    seconds = time.monotonic() - began
    run = RunPaths(place / "runs" / f"script-{name}")
    if not run.plan.exists():
        raise RuntimeError(f"{name}: `rankwise run` ended with {done.returncode}:\n{(place / 'out.log').read_text()}")
    version = f"{LIBRARIES[name]} {importlib.metadata.version(LIBRARIES[name])}"
    rows = []
    for cell in run_figures(load_run(run), name).cells.values():
        step = cell.estimate("step_seconds")
        milliseconds = None if step is None else 1000 * step.median
        status = f"{cell.status} ({cell.failed} of {cell.planned} failed)" if cell.failed else cell.status
        rows.append(
            Row(
                name,
                version,
                added_lines(study),
                f"{where}{'' if launcher is None else f', {launcher}'}",
                cell.title,
                len(cell.hosts),
                status,
                milliseconds,
                seconds,
            )
        )
    return rows


@contextmanager
def environment_of(where: str, folder: Path) -> Iterator[dict[str, str]]:
    """The environment of `rankwise run`: this one, or one that names a lab, which is taken down afterwards."""
    if where != "lab":
        yield dict(os.environ)
        return
    request = LabRequest(name="scripts", folder=folder / "lab", nodes=2)
    try:
        cluster.up(request)
        yield os.environ | {"SLURM_CONF": str(cluster.find_lab(request.name, request.folder).slurm_conf)}
    finally:
        with suppress(OSError):
            cluster.down(request.name, request.folder)


def main() -> int:
    """Run the studies. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=("ranks", "lab", "both"), default="both")
    parser.add_argument("--only", default=",".join(LIBRARIES), help="studies, without script-")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--launcher", choices=("torchrun", "srun", "mpirun"))
    parser.add_argument("--keep", type=Path, help="keep studies and runs here; a short absolute path")
    asked = parser.parse_args()
    names = asked.only.split(",")
    wheres = ("ranks", "lab") if asked.where == "both" else (asked.where,)
    wrong = []
    with tempfile.TemporaryDirectory(prefix="rankwise-scripts-", dir="/tmp") as scratch:
        folder = (asked.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        print(HEAD, flush=True)
        for where in wheres:
            with environment_of(where, folder) as environment:
                for name in names:
                    rows = run_study(name, folder, where, asked.repeats, environment, asked.launcher)
                    print("\n".join(row.text() for row in rows), flush=True)
                    wrong += [row for row in rows if row.status != "completed" or row.lines > MAX_LINES]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
