"""Job folders for a real scheduler, and what became of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.common.execution import Layout
from configs.plans.job import Job, JobEnd, Launcher, Measurement, Submission
from configs.plans.paths import JobPaths
from configs.records.record import Accounting, Status
from configs.spec.cell import Cell
from configs.spec.measuring import Measuring
from configs.targets.resources import ClusterTarget
from configs.targets.target import SlurmTarget
from configs.workloads.noop import NoopWorkload
from slurm.schedulers import cluster
from tests.support.cluster.launches import read_end, wait_until


def made(
    run: Path, number: int = 1, nodes: int = 1, seconds: float = 0.01, under: ClusterTarget | None = None, **target: Any
) -> JobPaths:
    """A job folder of a noop cell with a rank on each node; under Slurm, or the target that is given."""
    workload = NoopWorkload(seconds=seconds, label=str(number))
    measurement = Measurement(cell=Cell(workload=workload, layout=Layout(dp=nodes), nodes=nodes), repeat=0, attempt=1)
    paths = JobPaths(run / "jobs" / f"{number:04d}-timed")
    paths.parts.mkdir(parents=True)
    fields = {"nodes": 2, "partition": "lab", "poll_seconds": 1.0} | target
    job = Job(
        name=paths.folder.name,
        study="test",
        measuring_pass="timed",
        measuring=Measuring(),
        target=under or SlurmTarget.model_validate(fields),  # type: ignore[arg-type]
        measurements=(measurement,),
        ranks_per_node=1,
        timeout_seconds=90,
        inputs=str(run / "inputs"),
        cache=str(run / "cache"),
    )
    paths.job.write_text(job.model_dump_json())
    return paths


def measurement_of(paths: JobPaths) -> Measurement:
    return Job.model_validate_json(paths.job.read_bytes()).measurements[0]


def job_id(paths: JobPaths) -> str:
    return Submission.model_validate_json(paths.submission.read_bytes()).job_id


def accounting(paths: JobPaths) -> Accounting:
    return Accounting.model_validate_json(paths.accounting.read_bytes())


def finished(jobs: Sequence[JobPaths], limit_seconds: float = 120) -> list[JobEnd]:
    """How the jobs ended, when all have."""
    wait_until(lambda: all(cluster.poll(paths.folder) == "ended" for paths in jobs), "the jobs to end", limit_seconds)
    return [read_end(paths) for paths in jobs]


def begin(paths: JobPaths) -> None:
    """The launchers of both nodes come up."""
    for rank, host in enumerate(("n1", "n2")):
        launcher = Launcher(node_rank=rank, pid=1, pid_started=1, host=host, started_at="2026-11-01T12:00:00Z")
        paths.node_launcher(rank).write_text(launcher.model_dump_json())


def node_ends(paths: JobPaths, status: Status) -> None:
    """The launchers of both nodes write how the job ended."""
    for rank in (0, 1):
        end = JobEnd(status=status, return_code=0, finished_at="2026-11-01T12:00:00Z")
        paths.node_end(rank).write_text(end.model_dump_json())
