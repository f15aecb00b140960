"""Real launches of tiny noop jobs, for the tests of the engine and of slurm."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from configs.common.execution import Layout
from configs.plans.job import Job, JobEnd, Measurement, Progress
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from configs.records.record import RankPart, read_part
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.workloads.noop import NoopWorkload
from slurm.forking import parents
from tests.support.patience import wait_for

# Started for each rank: reads the context's parts from a file, runs the measurements, leaves their samples.
RANK_PROGRAM = """
import importlib, json, os, sys
from datetime import timedelta
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from configs.plans.job import Job
from configs.plans.model_manifest import ModelManifest
from configs.plans.paths import JobPaths
from engine.context import Context

rank, folder, run = int(sys.argv[1]), Path(sys.argv[2]), importlib.import_module(sys.argv[3]).run
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
                        timeout=timedelta(seconds=40))
job = Job.model_validate_json((folder / "job.json").read_bytes())
manifest = ModelManifest.model_validate_json((folder / "manifest.json").read_bytes())
context = Context(job, JobPaths(folder), rank, 2, torch.device("cpu"), manifest, dist.barrier)
for number, measurement in enumerate(job.measurements):
    try:
        outcome = run(measurement, context)
        np.savez(folder / f"{rank}-{number}.npz", **outcome.samples)
        left = outcome.figures
    except ValueError as error:
        left = {"error": str(error)}
    (folder / f"{rank}-{number}.json").write_text(json.dumps(left))
sys.stdout.flush()
os._exit(0)
"""


def noop_measurement(
    label: str, ranks: int = 1, env: dict[str, str] | None = None, attempt: int = 1, **work: Any
) -> Measurement:
    """A measurement of a noop cell that takes a few milliseconds unless told otherwise."""
    workload = NoopWorkload(label=label, **{"seconds": 0.005, **work})
    return Measurement(cell=Cell(workload=workload, layout=Layout(dp=ranks), env=env or {}), repeat=0, attempt=attempt)


def write_job(
    run_folder: Path,
    measurements: Iterable[Measurement],
    name: str = "job",
    memory: bool = False,
    timeout_seconds: float = 90,
    **rules: float,
) -> JobPaths:
    """A job folder in a run folder, with `job.json` in it."""
    measurements = tuple(measurements)
    paths = JobPaths(run_folder / "jobs" / name)
    paths.folder.mkdir(parents=True)
    job = Job(
        name=name,
        study="test",
        measuring_pass="memory" if memory else "timed",
        measuring=Measuring.model_validate(rules),
        measurements=measurements,
        ranks_per_node=measurements[0].cell.layout.ranks,
        timeout_seconds=timeout_seconds,
        inputs=str(run_folder / "inputs"),
        cache=str(run_folder / "cache"),
    )
    paths.job.write_text(job.model_dump_json())
    return paths


def launch(paths: JobPaths, limit_seconds: float = 120) -> JobEnd:
    """Run the job to its end through the launcher, without a scheduler.

    It is forked as a run forks it on this machine: to import torch in each launch takes longer than most of them.
    """
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # a parent serves one environment
    launcher = parents.launch(Job.model_validate_json(paths.job.read_bytes()), paths.job)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(launcher).wait(timeout=limit_seconds)
    return read_end(paths)


def launch_alone(paths: JobPaths) -> JobEnd:
    """The same, the launcher started as a program of its own, as schedulers start it."""
    subprocess.run([sys.executable, "-m", "slurm.launch", str(paths.job)], check=True, timeout=600)
    return read_end(paths)


def read_end(paths: JobPaths) -> JobEnd:
    """How the launcher says that the job ended."""
    return JobEnd.model_validate_json(paths.end.read_bytes())


def told(paths: JobPaths) -> str:
    """What the ranks wrote last: of one that hung, where it was."""
    return "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(paths.folder.glob("rank_*.log")))


def read_progress(paths: JobPaths, rank: int = 0) -> Progress:
    """What the rank said last."""
    return Progress.model_validate_json(paths.progress(rank).read_bytes())


def part(paths: JobPaths, measurement: Measurement, rank: int = 0) -> RankPart:
    """A rank's part of a measurement."""
    return read_part(paths.part(measurement.name, rank))


def in_measurement(paths: JobPaths, measurement: Measurement, rank: int = 0) -> Callable[[], bool]:
    """A condition: this rank is making this measurement."""

    def condition() -> bool:
        try:
            progress = read_progress(paths, rank)
        except (FileNotFoundError, ValueError):
            return False
        return (progress.phase, progress.measurement) == ("measurement", measurement.name)

    return condition


def wait_until(condition: Callable[[], bool], what: str, limit_seconds: float = 60) -> float:
    """Seconds until the condition held; AssertionError if it did not in time."""
    return wait_for(condition, what, limit_seconds, pause=0.02)


def leftovers(folder: Path) -> list[str]:
    """Living processes that name this folder in their command line or environment, but this one and its parents."""
    mine = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in mine or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = process.cmdline()
            named = [*command, *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(folder) in text for text in named):
            found.append(f"{process.pid}: {' '.join(command)}")
    return found


def assert_nothing_left(folder: Path, limit_seconds: float = 2) -> None:
    """Every process of the job is gone, at the latest after the limit."""
    deadline = time.monotonic() + limit_seconds
    while left := leftovers(folder):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def run_on_two_ranks(folder: Path, job: Job, manifest: ModelManifest | None, module: str) -> list[list[dict[str, Any]]]:
    """Figures of both ranks for each measurement of a job, run by `module`'s `run`; samples lie in
    `<rank>-<measurement>.npz`.

    A measurement that raised ValueError has the figure `error` alone.
    """
    assert manifest is not None
    (folder / "job.json").write_text(job.model_dump_json())
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    program = folder / "rank.py"
    program.write_text(RANK_PROGRAM)
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, str(program), str(rank), str(folder), module], env=environment)
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=600) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [
        [json.loads((folder / f"{rank}-{number}.json").read_text()) for rank in (0, 1)]
        for number in range(len(job.measurements))
    ]


def read_job(folder: Path) -> Job:
    return Job.model_validate_json((folder / "job.json").read_bytes())
