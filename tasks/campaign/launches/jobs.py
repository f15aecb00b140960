"""Write, submit, await and collect the job of a launch. Does not import Prefect.

    job = write_job(launch, plan, run, cache)              # jobs/<name>/job.json
    collected = run_job(job, run, notice)                  # submitted, waited for, collected

A study makes of each of these steps a Prefect task; a command without Prefect calls `run_job`.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.files.reading import read_model
from configs.plans.job import Job, JobEnd
from configs.plans.packing import Launch
from configs.plans.paths import JobPaths, RunPaths, job_order
from configs.plans.plan import Plan
from configs.records.record import Status
from configs.targets.target import LocalTarget
from slurm.launcher.machine_lock import machine_holder
from slurm.schedulers.adapter import Adapter, adapter_for
from slurm.schedulers.refusals import JobState, Unavailable
from tasks.campaign.launches.staging import placed_job
from tasks.campaign.records import Collected, collect_job

_START_SECONDS = 180.0
"""Time limit of a launch's overhead before the first and after the last cell: imports, rendezvous, loading."""
_BETWEEN_CELLS_SECONDS = 5.0
_MIN_POLL_SECONDS = 0.05
_MAX_POLL_SECONDS = 0.2
_NOTICE_SECONDS = 1.0
_GRACE_SECONDS = 30.0
"""The launcher enforces the job's time limit; this much later the job is considered lost."""
_last_names: dict[Path, str] = {}
"""Folder of jobs -> the name of the last one that was made in it."""


def write_job(launch: Launch, plan: Plan, run: RunPaths, cache: Path, exclude: Sequence[str] = ()) -> Job:
    """Make the job folder with everything that the nodes need to know.

    exclude: nodes of a cluster that the job is kept from. Raises OSError.
    """
    job = placed_job(job_of(launch, plan, run, cache, exclude), run)
    write_atomically(run.job(job.name).job, job.model_dump_json())
    return job


def job_of(launch: Launch, plan: Plan, run: RunPaths, cache: Path, exclude: Sequence[str] = ()) -> Job:
    """The job of a launch; nothing is written."""
    cell = launch.measurements[0].cell
    manifests = {model.identity: model.manifest for model in plan.models}
    least = max(one.cell.workload.min_timeout_seconds for one in launch.measurements)
    measuring = plan.measuring
    if least > measuring.cell_timeout_seconds:
        measuring = measuring.model_copy(update={"cell_timeout_seconds": least})
    per_measurement = measuring.cell_timeout_seconds + _BETWEEN_CELLS_SECONDS
    return Job(
        name=_job_name(launch, run),
        study=plan.study,
        measuring_pass=launch.measuring_pass,
        measuring=measuring,
        target=next(target for target in plan.targets if target.name == cell.target),
        exclude=tuple(exclude),
        measurements=launch.measurements,
        ranks_per_node=cell.processes // cell.nodes,
        engines=plan.engines,
        timeout_seconds=_START_SECONDS + len(launch.measurements) * per_measurement,
        manifest=manifests.get(cell.model or ""),
        inputs=str(run.inputs),
        cache=str(cache),
        checkpoints=str(run.checkpoints)
        if any(measurement.keeps_checkpoints for measurement in launch.measurements)
        else None,
    )


def run_job(
    job: Job, run: RunPaths, notice: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Collected:
    """Submit a job, wait for its end, make records of what its ranks left.

    notice: is told what the job waits for, be it another launch on this machine or a scheduler's queue: once each.
    check: is called again and again, and raises where the waiting shall end.
    Whatever ends the waiting ends the job. Raises Refused for a job that the scheduler will never take.
    """
    adapter, here = adapter_for(job.target.adapter), isinstance(job.target, LocalTarget)
    told: set[str] = set()

    def look(state: JobState, waited_seconds: float) -> None:
        check()
        if state == "waiting" and waited_seconds > _NOTICE_SECONDS and not (here and told):
            said = f"waiting {waits_for()}" if here else adapter.note(run.job(job.name).folder)
            if said not in told:
                notice(said)
            told.add(said)

    try:
        adapter.submit(run.job(job.name).folder)
    except BaseException:
        with contextlib.suppress(OSError):
            adapter.cancel(run.job(job.name).folder)
        raise
    follow_job(job, run, look)
    return collect_job(run, job.name)


def follow_job(job: Job, run: RunPaths, look: Callable[[JobState, float], None]) -> None:
    """Poll a submitted job until it has ended; end it past its time limit, and when the waiting ends otherwise.

    look: called after each poll with the job's state and the seconds that it has waited so far, for this machine or in
    a scheduler's queue; it raises where the waiting shall end.
    """
    paths, adapter = run.job(job.name), adapter_for(job.target.adapter)
    deadline = time.monotonic() + job.timeout_seconds + _GRACE_SECONDS
    waited_seconds, pause, looked_at = 0.0, _MIN_POLL_SECONDS, time.monotonic()
    try:
        while (state := adapter.poll(paths.folder)) != "ended":
            since_look, looked_at = time.monotonic() - looked_at, time.monotonic()
            if state == "suspended":
                deadline += since_look
            if state == "waiting" and (not isinstance(job.target, LocalTarget) or paths.launcher.exists()):
                deadline += since_look  # perhaps for hours: no limit counts meanwhile
                waited_seconds += since_look
            look(state, waited_seconds)
            if time.monotonic() > deadline:
                with contextlib.suppress(Unavailable):  # asked again at the next look
                    end_overdue(job, paths, adapter)
            adapter.await_end(paths.folder, pause)
            pause = min(pause * 1.1, _MAX_POLL_SECONDS)
    except BaseException:
        with contextlib.suppress(OSError):
            adapter.cancel(paths.folder)
        raise


def end_overdue(job: Job, paths: JobPaths, adapter: Adapter) -> None:
    """End a job that outlives its time limit: what its launcher could not say is a time-out, and nobody's request.

    Raises Unavailable where the scheduler does not answer.
    """
    adapter.cancel(paths.folder)
    with contextlib.suppress(OSError, ValueError):  # of a full disk: it is called cancelled then
        end = read_model(paths.end, JobEnd)
        if end.status is Status.CANCELLED:
            message = f"time-out of the job after {job.timeout_seconds:g} s, which its launcher did not end"
            told = {"status": Status.TIMEOUT, "kind": "JobTimeout", "message": message}
            write_atomically(paths.end, end.model_copy(update=told).model_dump_json())


def waits_for() -> str:
    """Say what a job of this machine waits for while another launch is measured."""
    return f"for another launch on this machine: {machine_holder()}"


def measured_so_far(job: Job, run: RunPaths, known: int = 0) -> int:
    """Count the job's measurements of which rank 0 has left its part; `known`: how many were counted before.

    Ranks make them in the job's order. To list the parts at each look would take a share of the machine that is
    measured, where thousands of cells on many ranks are one launch.
    """
    paths, count = run.job(job.name), known
    while count < len(job.measurements) and paths.part(job.measurements[count].name, 0).exists():
        count += 1
    return count


def _job_name(launch: Launch, run: RunPaths) -> str:
    """Unique in the run folder, sorts by time: `0007-timed-1a2b3c4d`.

    Only this process makes jobs there, which it has locked: to list thousands of folders for each job of as many would
    take minutes.
    """
    last = _last_names.get(run.jobs)
    if last is not None and run.job(last).job.exists():
        number = job_order(last)[0]
    else:
        number = max((job_order(folder.name)[0] for folder in run.jobs.glob("[0-9]*-*")), default=0)
    _last_names[run.jobs] = name = f"{number + 1:04d}-{launch.measuring_pass}-{launch.pack_key}"
    return name
