"""A launch as a job folder, from that to its records. No Prefect here.

    job = write_job(launch, plan, run, cache)              # jobs/<name>/job.json
    collected = run_job(job, run, notice)                  # submitted, waited for, collected

A study makes of each of these steps a Prefect task; a command without Prefect calls `run_job`.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.base import write_atomically
from configs.job import Job
from configs.packing import Launch
from configs.paths import RunPaths
from configs.plan import Plan
from slurm.adapter import adapter_for
from tasks.merge import Collected, collect_job
from tasks.staging import placed

_START_SECONDS = 180.0
"""What a launch may take before its first cell and after its last: imports, rendezvous, loading."""
_BETWEEN_CELLS_SECONDS = 5.0
_POLL_SECONDS = 0.05
_NOTICE_SECONDS = 1.0
_GRACE_SECONDS = 30.0
"""The launcher keeps the job's time limit itself; this much later it is taken for lost."""


def write_job(launch: Launch, plan: Plan, run: RunPaths, cache: Path, exclude: Sequence[str] = ()) -> Job:
    """Make the job folder with everything that the nodes need to know.

    exclude: nodes of a cluster that the job is kept from. Raises OSError.
    """
    cell = launch.visits[0].cell
    manifests = {model.identity: model.manifest for model in plan.models}
    per_visit = plan.measuring.cell_timeout_seconds + _BETWEEN_CELLS_SECONDS
    job = Job(
        name=_job_name(launch, run),
        study=plan.study,
        measuring_pass=launch.measuring_pass,
        measuring=plan.measuring,
        target=next(target for target in plan.targets if target.name == cell.target),
        exclude=tuple(exclude),
        visits=launch.visits,
        ranks_per_node=cell.layout.ranks // cell.nodes,
        timeout_seconds=_START_SECONDS + len(launch.visits) * per_visit,
        manifest=manifests.get(cell.model or ""),
        inputs=str(run.inputs),
        cache=str(cache),
        checkpoints=str(run.checkpoints) if any(visit.keeps_checkpoints for visit in launch.visits) else None,
    )
    job = placed(job, run)
    write_atomically(run.job(job.name).job, job.model_dump_json())
    return job


def run_job(
    job: Job, run: RunPaths, notice: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Collected:
    """Submit a job, wait for its end, make records of what its ranks left.

    notice: is told once what the job waits for, be it another launch on this machine or a scheduler's queue.
    check: is called again and again, and raises where the waiting shall end.
    Whatever ends the waiting ends the job. Raises Refused for a job that the scheduler will never take.
    """
    paths, adapter = run.job(job.name), adapter_for(job.target.kind)
    here = job.target.kind == "local"
    deadline = time.monotonic() + job.timeout_seconds + _GRACE_SECONDS
    waited_seconds = 0.0
    told = False
    try:
        adapter.submit(paths.folder)
        while (state := adapter.poll(paths.folder)) != "ended":
            check()
            if state == "waiting" and (not here or paths.launcher.exists()):
                deadline += _POLL_SECONDS  # perhaps for hours: no limit counts meanwhile
                waited_seconds += _POLL_SECONDS
                if waited_seconds > _NOTICE_SECONDS and not told:
                    notice("waiting for another launch on this machine" if here else adapter.note(paths.folder))
                    told = True
            if time.monotonic() > deadline:
                adapter.cancel(paths.folder)
            time.sleep(_POLL_SECONDS)
    except BaseException:
        with contextlib.suppress(OSError):
            adapter.cancel(paths.folder)
        raise
    return collect_job(run, job.name)


def _job_name(launch: Launch, run: RunPaths) -> str:
    """Unique in the run folder, sorts by time: `0007-timed-1a2b3c4d`."""
    numbers = [int(folder.name.split("-")[0]) for folder in run.jobs.glob("[0-9]*-*")]
    return f"{max(numbers, default=0) + 1:04d}-{launch.measuring_pass}-{launch.pack_key}"
