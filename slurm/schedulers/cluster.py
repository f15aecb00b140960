"""Jobs on a cluster under Slurm or PBS, as an adapter (`slurm.schedulers.adapter`).

    submit_many(folders)      # under Slurm one sbatch for each shape of job, an array where there are several of it
    poll(folder)              # from the shared look at the queue (slurm.schedulers.queue, slurm.schedulers.pbs.queue)

All that is known of a job lies in its folder, so that any later process goes on with it: `submitting.json`, written
before the scheduler is asked, names the job; `submission.json` has the id that it gave; `queue.json` says why it waits,
or that it is suspended; each node leaves an `end_<n>.json`. When the scheduler says that the job is over, `poll` makes
of these and of its word the `end.json` (`slurm.schedulers.ending`), with what the accounts say beside it in
`accounting.json`.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from threading import Lock

from configs.common.base import utc_now, write_atomically
from configs.common.files.reading import read_model
from configs.common.printable import some_of
from configs.plans.job import JobEnd, Submission, Submitting
from configs.plans.paths import JobPaths
from configs.records.record import Status
from configs.targets.resources import ClusterTarget
from configs.targets.target import PbsTarget, SlurmTarget
from slurm.launcher.job_files import reserve_end, stamp, write_unlaunched_end
from slurm.schedulers.commands.states import SUSPENDED, UNKNOWN_JOB, bare, standing
from slurm.schedulers.ending import conclude, give_up
from slurm.schedulers.job_files import cluster_target, job_in, name_of_submission
from slurm.schedulers.job_queue import JobQueue, Sight
from slurm.schedulers.pbs.queue import shared_pbs_queue
from slurm.schedulers.queue import shared_queue
from slurm.schedulers.refusals import REFUSED, JobState, Limited, Refused, Unavailable
from slurm.schedulers.waiting import note_pause, note_waiting, overdue

_SUBMITTING_SECONDS = 90.0  # sbatch or qsub may take so long; until then a job that nobody knows can still appear
_SEARCHES = 2  # so many looks for a job by its name must find nothing
_HOPELESS_SECONDS = 15.0  # a reason to wait for ever that is still there then is believed
_CANCEL_SECONDS = 7.5
_CANCEL_LOOK_SECONDS = 0.4

_lock = Lock()
_searched: dict[Path, tuple[float, float, int]] = {}
"""Job folder -> when its job was first and last looked for by name (`time.monotonic`), and how often."""
_blocked: dict[Path, float] = {}  # job folder -> since when it waits for a reason that will not pass
_begun: dict[Path, float] = {}  # job folder -> when a launcher of it was first seen
_ending: dict[Path, float] = {}  # job folder -> when it was last asked to end
_unanswered: dict[Path, tuple[float, int]] = {}  # job folder -> when it was given without an answer, looks since


def submit(folder: Path) -> None:
    """Submit one job."""
    submit_many([folder])


def submit_many(folders: Sequence[Path]) -> None:
    """Submit jobs of one target, those of one shape as an array. Raises Refused, Unavailable, OSError."""
    groups: dict[tuple[object, ...], list[Path]] = {}
    for folder in folders:
        job = job_in(folder)
        groups.setdefault(job.shape if cluster_target(job).has_arrays else (folder,), []).append(folder)
    for group in groups.values():
        _submit_group(group)


def _submit_group(folders: list[Path]) -> None:
    """One submission. A group that was not taken before is looked for first: sbatch may have timed out too early."""
    if all(JobPaths(folder).submitting.exists() and _found_by_name(JobPaths(folder), sure=True) for folder in folders):
        return
    run_folder = folders[0].parents[1].absolute()
    before = _name_before(folders)
    if before is not None and _late_ones_ended(folders, before):
        before = None  # one that was ended would be found by its name
    name = before or name_of_submission(folders[0], cluster_target(job_in(folders[0])).job_name)
    for index, folder in enumerate(folders):
        paths = JobPaths(folder)
        reserve_end(paths)
        intent = Submitting(name=name, index=index if len(folders) > 1 else None)
        write_atomically(paths.submitting, intent.model_dump_json())
        stamp(paths.submitting)
    queue, began = _queue_of(folders[0]), time.monotonic()
    try:
        job_ids = queue.submit(folders, name, run_folder)
    except (Refused, Limited):
        for folder in folders:
            JobPaths(folder).submitting.unlink(missing_ok=True)
        raise
    except Unavailable as error:
        if error.may_have_taken:
            _unanswered.update(dict.fromkeys(folders, (began, 0)))
        raise
    for folder, job_id in zip(folders, job_ids, strict=True):
        _submitted(JobPaths(folder), job_id, queue)


def _late_ones_ended(folders: Sequence[Path], name: str) -> bool:
    """End what the scheduler took late of jobs that it was given under a name, so that they are not measured twice.

    False: there was no doubt whether it took them. Raises Unavailable while it may yet do so: one look does not show
    that it has none, it may take them after its program gave up, and has shown nothing while jobs ran.
    """
    given = [folder for folder in folders if folder in _unanswered]
    if not given:
        return False
    scheduler = cluster_target(job_in(folders[0])).scheduler
    began, looks = max(_unanswered[folder] for folder in given)
    _unanswered.update(dict.fromkeys(given, (began, looks + 1)))
    if time.monotonic() - began < _SUBMITTING_SECONDS or looks + 1 < _SEARCHES:
        raise Unavailable(f"{scheduler} did not say whether it took {given[0].name}, and may yet take it")
    if not _queue_of(given[0]).end_named(name):
        raise Unavailable(f"{scheduler} does not respond; whether it took {given[0].name} is unknown")
    for folder in given:
        del _unanswered[folder]
    return True


def _name_before(folders: Sequence[Path]) -> str | None:
    """The name under which a scheduler may yet take these jobs, so that it is known by it; None where there is none."""
    names = set()
    for folder in folders:
        try:
            names.add(read_model(JobPaths(folder).submitting, Submitting).name)
        except (FileNotFoundError, ValueError):
            return None
    return names.pop() if len(names) == 1 else None


def _submitted(paths: JobPaths, job_id: str, queue: JobQueue) -> None:
    """Keep a job's id, and let its folder show what the scheduler's programs say of it."""
    write_atomically(paths.submission, Submission(job_id=job_id, submitted_at=utc_now()).model_dump_json())
    queue.show_logs(paths, job_id)


def poll(folder: Path) -> JobState:
    """Where the job stands. One that is over on all nodes is given an `end.json`. A thread asks the scheduler."""
    paths = JobPaths(folder)
    if paths.end.exists():
        return "ended"
    job_id = _job_id(paths) or _searched_for(paths)
    if job_id is None:
        return "ended" if paths.end.exists() else "waiting"
    queue, target = _queue_of(folder), cluster_target(job_in(folder))
    queue.watch(job_id, target.poll_seconds)
    sight = queue.sight(job_id)
    if sight is None:
        return "waiting"
    if sight.ended:
        if conclude(paths, job_id, sight, queue):
            return "ended"
        return "waiting" if standing(sight.state).place == "waiting" else "running"
    if _is_requeued(paths, sight):
        _refuse_requeue(paths, job_id, queue)
        return "running"
    if standing(sight.state).place == "running":
        suspended = bare(sight.state) in SUSPENDED
        note_pause(paths, sight.state, suspended)
        return "suspended" if suspended else "running"
    note_waiting(paths, sight.state, "" if sight.reason == "None" else sight.reason)
    end = _hopeless(folder, sight, target, queue) or overdue(
        folder, target, sight.reason, queue.any_running() or queue.waits_for_own_jobs(sight.reason)
    )
    if end is None or not queue.end([job_id]):
        return "waiting"
    give_up(paths, job_id, end)
    queue.forget(job_id)
    return "ended"


def _is_requeued(paths: JobPaths, sight: Sight) -> bool:
    """Whether the scheduler put a job that had begun back into its queue, or runs it again.

    A job that waits has no launcher, unless it is the second time: one that was seen before the look began.
    """
    # One look, not one for each node: a job of a thousand nodes may wait for hours.
    if paths.folder not in _begun and next(paths.folder.glob("launcher_*.json"), None) is not None:
        _begun[paths.folder] = time.monotonic()
    begun = _begun.get(paths.folder)
    waits_again = sight.state == "PENDING" and begun is not None and begun < sight.asked_at
    return waits_again or standing(sight.state).place == "requeued" or paths.requeued.exists()


def _refuse_requeue(paths: JobPaths, job_id: str, queue: JobQueue) -> None:
    """Cancel a requeued job, again and again until it is seen to have ended: only then another is submitted."""
    with suppress(OSError):
        paths.requeued.touch()
    every = max(2.0, cluster_target(job_in(paths.folder)).poll_seconds)
    if time.monotonic() - _ending.get(paths.folder, -every) >= every:
        _ending[paths.folder] = time.monotonic()
        queue.end([job_id])


def await_end(folder: Path, seconds: float) -> None:
    """Sleep: the scheduler tells nobody by itself."""
    time.sleep(seconds)


def note(folder: Path) -> str:
    """One line on a job that has not ended: its id, why it waits, or its nodes. Asks nobody."""
    job_id = _job_id(JobPaths(folder))
    if job_id is None:
        return ""
    sight = _queue_of(folder).seen(job_id)
    if sight is None or sight.ended:
        return f"job {job_id}"
    if standing(sight.state).place == "waiting":
        return _queue_of(folder).pending_note(job_id, sight.reason)
    return f"job {job_id} on {some_of(sight.nodes)}"


def cancel(folder: Path) -> None:
    """End one job."""
    cancel_many([folder])


def cancel_many(folders: Sequence[Path]) -> None:
    """End jobs, and return when none is left in the queue, within 8 s for each cluster.

    Raises Unavailable where a scheduler does not answer, when all have been asked.
    """
    groups: dict[int, tuple[JobQueue, list[Path]]] = {}
    for folder in folders:
        if JobPaths(folder).job.exists() and not JobPaths(folder).end.exists():
            queue = _queue_of(folder)
            groups.setdefault(id(queue), (queue, []))[1].append(folder)
    problems = []
    for queue, group in groups.values():
        try:
            _cancel_on(queue, group)
        except Unavailable as error:
            problems.append(str(error))
    if problems:
        raise Unavailable("; ".join(problems))


def _cancel_on(queue: JobQueue, folders: Sequence[Path]) -> None:
    """End jobs of one cluster."""
    ids: dict[Path, str] = {}
    scheduler = cluster_target(job_in(folders[0])).scheduler
    for folder in folders:
        paths = JobPaths(folder)
        job_id = _job_id(paths) or _found_by_name(paths)
        if job_id is None and paths.submitting.exists() and not _none_of_that_name(paths):
            raise Unavailable(f"{scheduler} does not respond; job of {folder.name} not cancelled")
        if job_id is None:
            write_unlaunched_end(paths, Status.CANCELLED, f"cancelled on request, before submission to {scheduler}")
        else:
            queue.watch(job_id, cluster_target(job_in(folder)).poll_seconds)
            ids[folder] = job_id
    deadline = time.monotonic() + _CANCEL_SECONDS
    told = False
    while ids:
        told = told or queue.end(list(ids.values()))
        queue.look()
        last = time.monotonic() > deadline
        for folder, job_id in list(ids.items()):
            sight = queue.seen(job_id)
            if sight is not None and sight.ended and conclude(JobPaths(folder), job_id, sight, queue, cancelled=True):
                del ids[folder]
        if ids and last:
            break
        time.sleep(_CANCEL_LOOK_SECONDS if ids else 0)
    if ids and not told:
        raise Unavailable(f"{scheduler} does not respond; jobs not cancelled: {some_of(list(ids.values()))}")
    for folder in ids:
        write_unlaunched_end(
            JobPaths(folder), Status.CANCELLED, f"cancelled on request; {scheduler} is still ending it"
        )


def _hopeless(folder: Path, sight: Sight, target: ClusterTarget, queue: JobQueue) -> JobEnd | None:
    """The end of a job that waits for a reason that will not pass; None while it can still start."""
    field = queue.field_to_correct(sight.reason)
    if field is None:
        _blocked.pop(folder, None)
        return None
    if time.monotonic() - _blocked.setdefault(folder, time.monotonic()) <= _HOPELESS_SECONDS:
        return None
    message = f"target.{field} of {target.name}: {target.scheduler} cannot start the job: {sight.reason}"
    return JobEnd(status=Status.FAILED, return_code=None, kind=REFUSED, message=message, finished_at=utc_now())


def _searched_for(paths: JobPaths) -> str | None:
    """A job that has no id yet: looked for by its name now and then; given an end when it can no longer appear.

    Two that poll at once would both look; that is harmless.
    """
    if not paths.submitting.exists():
        write_unlaunched_end(paths, Status.LOST, "the job was never submitted")
        return None
    every = cluster_target(job_in(paths.folder)).poll_seconds
    with _lock:
        now = time.monotonic()
        first, last, times = _searched.get(paths.folder, (now, -math.inf, 0))
        if now - last < every:
            return None
        _searched[paths.folder] = (first, now, times + 1)
    job_id = _found_by_name(paths)
    # By its file it may be younger than it is, where the clock was set back or is another machine's.
    age = max(time.time() - paths.submitting.stat().st_mtime, time.monotonic() - first)
    if job_id is None and age > _SUBMITTING_SECONDS and times + 1 >= _SEARCHES and _none_of_that_name(paths):
        why = f"{UNKNOWN_JOB[cluster_target(job_in(paths.folder)).scheduler]}: the submitting process ended too early"
        write_unlaunched_end(paths, Status.LOST, why)
    return job_id


def _queue_of(folder: Path) -> JobQueue:
    """The queue of the cluster that the job's target names."""
    target = job_in(folder).target
    if isinstance(target, PbsTarget):
        return shared_pbs_queue(target.server)
    assert isinstance(target, SlurmTarget)
    return shared_queue(target.cluster)


def _none_of_that_name(paths: JobPaths) -> bool:
    """Cancel whatever bears the job's name. Returns whether that was answered: what was not found is not there."""
    intent = read_model(paths.submitting, Submitting)
    return _queue_of(paths.folder).end_named(intent.name)


def _found_by_name(paths: JobPaths, sure: bool = False) -> str | None:
    """The id of a job whose submitter did not come to write it down; kept in the folder. None: nobody knows it.

    sure: raise Unavailable where the scheduler does not answer: what it may have taken is not submitted again.
    """
    try:
        intent = read_model(paths.submitting, Submitting)
    except (FileNotFoundError, ValueError):
        return None
    queue = _queue_of(paths.folder)
    ids = queue.find(intent.name, datetime.fromtimestamp(paths.submitting.stat().st_mtime))
    if ids is None and sure:
        scheduler = cluster_target(job_in(paths.folder)).scheduler
        raise Unavailable(f"{scheduler} does not respond; whether it took {paths.folder.name} is unknown")
    if not ids:
        return None
    # A task of an array whose end was forgotten has siblings by which its id is known.
    newest = max((name.partition("_")[0] for name in ids), key=lambda name: int(name.partition(".")[0]))
    job_id = newest if intent.index is None else f"{newest}_{intent.index}"
    _submitted(paths, job_id, queue)
    return job_id


def _job_id(paths: JobPaths) -> str | None:
    """The id that the scheduler gave the job; None before."""
    try:
        return read_model(paths.submission, Submission).job_id
    except FileNotFoundError:
        return None
