"""Jobs on a cluster under Slurm, as an adapter (`slurm.schedulers.adapter`).

    submit_many(folders)      # one sbatch for each shape of job, an array where there are several of it
    poll(folder)              # from the shared look at the queue (slurm.schedulers.queue)

All that is known of a job lies in its folder, so that any later process goes on with it: `submitting.json`, written
before sbatch is asked, names the job; `submission.json` has the id that sbatch gave; each node leaves an
`end_<n>.json`. When Slurm says that the job is over, `poll` makes of these and of Slurm's word the `end.json`
(`slurm.schedulers.states.composed`), with what the accounts say beside it in `accounting.json`.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from threading import Lock

from configs.common.base import utc_now, write_atomically
from configs.plans.job import Job, JobEnd, Launcher, Submission, Submitting
from configs.plans.paths import JobPaths
from configs.plans.record import Accounting, Status
from slurm.launcher.job_files import measurement_under_way, reserve_end, write_end
from slurm.schedulers.accounting import Account, read_accounts, sacct_named_command
from slurm.schedulers.queue import Queue, Sight, named_command, read_squeue, run_slurm, shared_queue
from slurm.schedulers.refusals import REFUSED, JobState, Refused, Unavailable
from slurm.schedulers.states import HOPELESS_REASONS, FinalState, bare, composed, standing
from slurm.schedulers.submission import sbatch, slurm_target
from slurm.staging.packages import run_digest

ACCOUNTS_SECONDS = 10.0
"""How long after a job's end its accounts are waited for; and its nodes' ends, where a file system is slow to show."""

LOST_SECONDS = 20.0
"""After this long without a word from Slurm, and without the nodes' ends, a job is lost."""

_SUBMITTING_SECONDS = 90.0  # sbatch may take so long; until then a job that nobody knows can still appear
_HOPELESS_SECONDS = 15.0  # a reason to wait for ever that is still there then is believed
_CANCEL_SECONDS = 7.5
_CANCEL_LOOK_SECONDS = 0.4
_CALL_SECONDS = 10.0

_lock = Lock()
_searched: dict[Path, float] = {}  # job folder -> when its job was last looked for by name
_hopeless: dict[str, float] = {}  # job id -> since when it waits for a reason that will not pass


def submit(folder: Path) -> None:
    """Submit one job."""
    submit_many([folder])


def submit_many(folders: Sequence[Path]) -> None:
    """Submit jobs of one target, those of one shape as an array. Raises Refused, Unavailable, OSError."""
    groups: dict[tuple[object, ...], list[Path]] = {}
    for folder in folders:
        groups.setdefault(_job(folder).shape, []).append(folder)
    for group in groups.values():
        _submit_group(group)


def _submit_group(folders: list[Path]) -> None:
    run_folder = folders[0].parents[1].absolute()
    seen_by_nodes = [folder.resolve() for folder in folders]
    name = f"rw-{run_digest(run_folder)}-{folders[0].name}"
    for index, folder in enumerate(folders):
        paths = JobPaths(folder)
        reserve_end(paths)
        intent = Submitting(name=name, index=index if len(folders) > 1 else None)
        write_atomically(paths.submitting, intent.model_dump_json())
    work = seen_by_nodes[0].parents[1] / "submitit"
    try:
        job_ids = sbatch(seen_by_nodes, name, str(run_folder), work)
    except Refused:
        for folder in folders:
            JobPaths(folder).submitting.unlink(missing_ok=True)
        raise
    for folder, job_id in zip(folders, job_ids, strict=True):
        _submitted(JobPaths(folder), job_id)


def _submitted(paths: JobPaths, job_id: str) -> None:
    """Keep a job's id, and let its folder show what Slurm's programs say on each node."""
    write_atomically(paths.submission, Submission(job_id=job_id, submitted_at=utc_now()).model_dump_json())
    for node_rank in range(_job(paths.folder).cell.nodes):
        link = paths.scheduler_log(node_rank)
        with suppress(FileExistsError):
            link.symlink_to(Path("..", "..", "submitit", f"{job_id}_{node_rank}_log.out"))


def poll(folder: Path) -> JobState:
    """Where the job stands. One that is over on all nodes is given an `end.json`. Slurm is asked by a thread."""
    paths = JobPaths(folder)
    if paths.end.exists():
        return "ended"
    job_id = _job_id(paths) or _searched_for(paths)
    if job_id is None:
        return "ended" if paths.end.exists() else "waiting"
    queue, target = shared_queue(), slurm_target(_job(folder))
    queue.watch(job_id, target.poll_seconds)
    sight = queue.sight(job_id)
    if sight is None:
        return "waiting"
    if sight.ended:
        return "ended" if _finish(paths, job_id, sight, queue) else "running"
    if standing(sight.state).place == "running":
        return "running"
    if field := _hopeless_field(job_id, sight):
        _give_up(paths, job_id, f"target.{field} of {target.name}: Slurm cannot start the job: {sight.reason}")
        return "ended"
    return "waiting"


def await_end(folder: Path, seconds: float) -> None:
    """Sleep: the scheduler tells nobody by itself."""
    time.sleep(seconds)


def note(folder: Path) -> str:
    """One line on a job that has not ended: its id, why it waits, or its nodes. Asks nobody."""
    job_id = _job_id(JobPaths(folder))
    if job_id is None:
        return ""
    sight = shared_queue().seen(job_id)
    if sight is None or sight.ended:
        return f"job {job_id}"
    if standing(sight.state).place == "waiting":
        return f"job {job_id} pending: {sight.reason}" if sight.reason not in ("", "None") else f"job {job_id} pending"
    return f"job {job_id} on {', '.join(sight.nodes)}"


def cancel(folder: Path) -> None:
    """End one job."""
    cancel_many([folder])


def cancel_many(folders: Sequence[Path]) -> None:
    """End jobs, and return when none is left in the queue, within 8 s. Raises OSError where Slurm does not answer."""
    queue, ids = shared_queue(), {}
    for folder in folders:
        paths = JobPaths(folder)
        if paths.end.exists() or not paths.job.exists():
            continue
        job_id = _job_id(paths) or _found_by_name(paths)
        if job_id is None:
            _write(paths, Status.CANCELLED, "cancelled on request, before submission to Slurm")
        else:
            queue.watch(job_id, slurm_target(_job(folder)).poll_seconds)
            ids[folder] = job_id
    deadline = time.monotonic() + _CANCEL_SECONDS
    told = False
    while ids:
        told = told or _scancel(queue, list(ids.values()))
        queue.look()
        last = time.monotonic() > deadline
        for folder, job_id in list(ids.items()):
            sight = queue.seen(job_id)
            if sight is not None and sight.ended and _finish(JobPaths(folder), job_id, sight, queue, cancelled=True):
                del ids[folder]
        if ids and last:
            break
        time.sleep(_CANCEL_LOOK_SECONDS if ids else 0)
    if ids and not told:
        raise Unavailable(f"Slurm does not respond; jobs not cancelled: {', '.join(ids.values())}")
    for folder in ids:
        _write(JobPaths(folder), Status.CANCELLED, "cancelled on request; Slurm is still ending it")


def _with_nodes(accounting: Accounting, seen: tuple[str, ...]) -> Accounting:
    """With the nodes that were seen where those are more: of a job of two nodes sacct has named a single one."""
    return accounting.model_copy(update={"nodes": seen}) if len(seen) > len(accounting.nodes) else accounting


def _finish(paths: JobPaths, job_id: str, sight: Sight, queue: Queue, cancelled: bool = False) -> bool:
    """Write `end.json` for a job that Slurm no longer runs; False while something is still worth to wait for."""
    job, target = _job(paths.folder), slurm_target(_job(paths.folder))
    account, waited = queue.account(job_id), queue.seconds_since_end(job_id)
    ends = [_node_end(paths, rank) for rank in range(job.cell.nodes)]
    word = _word(sight, account)
    if not cancelled:
        if account is None and queue.keeps_accounts and waited < max(ACCOUNTS_SECONDS, 2 * target.poll_seconds):
            return False
        if word and bare(word.state) == "COMPLETED" and None in ends and waited < ACCOUNTS_SECONDS:
            return False
        if word is None and None in ends and waited < LOST_SECONDS:
            return False
    launchers = [_node_launcher(paths, rank) for rank in range(job.cell.nodes)]
    nodes = (account.accounting.nodes if account else ()) or sight.nodes
    if len(nodes) != job.cell.nodes:
        nodes = tuple(launcher.host for launcher in launchers if launcher)
    began = [launcher is not None for launcher in launchers]
    end = composed(job, ends, word, nodes, began, measurement_under_way(paths))
    if cancelled and end.status is Status.CANCELLED:
        end = end.model_copy(update={"message": "cancelled on request"})
    if account:
        accounting = _with_nodes(account.accounting, nodes)
    else:
        accounting = Accounting(job_id=job_id, state=bare(sight.state), nodes=nodes)
    with suppress(OSError):  # a full disk: the end has its place reserved
        write_atomically(paths.accounting, accounting.model_dump_json())
    _bring_logs(paths, job_id)
    write_end(paths, end)
    if standing(sight.state).again:
        run_slurm(["scancel", job_id], queue.environment, _CALL_SECONDS)
    queue.forget(job_id)
    return True


def _word(sight: Sight, account: Account | None) -> FinalState | None:
    """Return Slurm's final state of a job, from the accounting, else from the queue; None if unknown."""
    if account is not None:
        return FinalState(account.accounting.state, account.failed_nodes, account.reason)
    return None if sight.gone else FinalState(sight.state, reason=sight.reason)


def _bring_logs(paths: JobPaths, job_id: str) -> None:
    """Put what Slurm's programs said in the place of the links to it; submitit's pickles have served."""
    work = paths.folder.resolve().parents[1] / "submitit"
    with suppress(OSError):
        for node_rank in range(_job(paths.folder).cell.nodes):
            log = work / f"{job_id}_{node_rank}_log.out"
            if log.exists():
                log.replace(paths.scheduler_log(node_rank))
            (work / f"{job_id}_{node_rank}_result.pkl").unlink(missing_ok=True)
        (work / f"{job_id}_submitted.pkl").unlink(missing_ok=True)


def _hopeless_field(job_id: str, sight: Sight) -> str | None:
    """Return the target's field that permanently blocks the job; None if the job can still start."""
    field = HOPELESS_REASONS.get(sight.reason)
    if field is None:
        _hopeless.pop(job_id, None)
        return None
    since = _hopeless.setdefault(job_id, time.monotonic())
    return field if time.monotonic() - since > _HOPELESS_SECONDS else None


def _give_up(paths: JobPaths, job_id: str, message: str) -> None:
    """Cancel a job that can never start."""
    queue = shared_queue()
    run_slurm(["scancel", job_id], queue.environment, _CALL_SECONDS)
    end = JobEnd(status=Status.FAILED, return_code=None, kind=REFUSED, message=message, finished_at=utc_now())
    write_end(paths, end)
    queue.forget(job_id)


def _scancel(queue: Queue, job_ids: Sequence[str]) -> bool:
    """Cancel jobs in Slurm. Returns whether scancel succeeded."""
    return run_slurm(["scancel", *job_ids], queue.environment, _CALL_SECONDS) is not None


def _searched_for(paths: JobPaths) -> str | None:
    """A job that has no id yet: looked for by its name now and then; given an end when it can no longer appear.

    Two that poll at once would both look; that is harmless.
    """
    if not paths.submitting.exists():
        _write(paths, Status.LOST, "the job was never submitted")
        return None
    every = slurm_target(_job(paths.folder)).poll_seconds
    with _lock:
        if time.monotonic() - _searched.get(paths.folder, -every) < every:
            return None
        _searched[paths.folder] = time.monotonic()
    job_id = _found_by_name(paths)
    age = time.time() - paths.submitting.stat().st_mtime
    if job_id is None and age > _SUBMITTING_SECONDS and _slurm_answers():
        _write(paths, Status.LOST, "job in neither `squeue` nor `sacct`: the submitting process ended before sbatch")
    return job_id


def _found_by_name(paths: JobPaths) -> str | None:
    """The id of a job whose submitter did not come to write it down; kept in the folder. None: nobody knows it."""
    try:
        intent = Submitting.model_validate_json(paths.submitting.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    environment = shared_queue().environment
    ids = set(read_squeue(run_slurm(named_command(intent.name), environment, _CALL_SECONDS) or ""))
    if not ids:  # slurmctld may have forgotten it
        day = datetime.fromtimestamp(paths.submitting.stat().st_mtime)
        text = run_slurm(sacct_named_command(intent.name, day), environment, _CALL_SECONDS)
        with suppress(ValueError):
            ids = set(read_accounts(text or ""))
    tail = "" if intent.index is None else f"_{intent.index}"
    mine = [name for name in ids if name.partition("_")[0] + tail == name]
    if not mine:
        return None
    job_id = max(mine, key=lambda name: int(name.partition("_")[0]))
    _submitted(paths, job_id)
    return job_id


def _slurm_answers() -> bool:
    return run_slurm(["scontrol", "ping"], shared_queue().environment, _CALL_SECONDS) is not None


def _job_id(paths: JobPaths) -> str | None:
    """The id that Slurm gave the job; None before."""
    try:
        return Submission.model_validate_json(paths.submission.read_bytes()).job_id
    except FileNotFoundError:
        return None


@lru_cache(maxsize=1024)
def _job(folder: Path) -> Job:
    """A job as it was written; it does not change."""
    return Job.model_validate_json(JobPaths(folder).job.read_bytes())


def _node_end(paths: JobPaths, node_rank: int) -> JobEnd | None:
    try:
        return JobEnd.model_validate_json(paths.node_end(node_rank).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _node_launcher(paths: JobPaths, node_rank: int) -> Launcher | None:
    try:
        return Launcher.model_validate_json(paths.node_launcher(node_rank).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _write(paths: JobPaths, status: Status, message: str) -> None:
    end = JobEnd(
        status=status,
        return_code=None,
        measurement=measurement_under_way(paths),
        message=message,
        finished_at=utc_now(),
    )
    write_end(paths, end)
