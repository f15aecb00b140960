"""How a job under a scheduler ended: of what its nodes left and the scheduler says, `end.json` and `accounting.json`.

    conclude(paths, job_id, sight, queue)      # False while something is still worth to wait for

Nothing is called lost before it is cancelled: a job that the scheduler has only failed to mention would start later,
in a folder that has an end already, and beside its own second attempt.
"""

from collections.abc import Sequence
from contextlib import suppress

from configs.common.base import write_atomically
from configs.plans.job import Job, JobEnd, Launcher
from configs.plans.paths import JobPaths
from configs.records.record import Accounting, Status
from slurm.launcher.job_files import measurement_under_way, write_end
from slurm.schedulers.commands.accounting import Account
from slurm.schedulers.commands.states import REQUEUED, FinalState, bare, composed
from slurm.schedulers.job_files import cluster_target, job_in, node_end, node_launcher
from slurm.schedulers.job_queue import JobQueue, Sight

ACCOUNTS_SECONDS = 10.0
"""How long after a job's end its accounts are waited for; and its nodes' ends, where a file system is slow to show."""

LOST_SECONDS = 20.0
"""After this long without a word from the scheduler, and without the nodes' ends, a job is cancelled and lost."""

STALE_SECONDS = 600.0
"""So long sacct is believed that a job is there which slurmctld denies: the database may never hear of its end."""


def conclude(paths: JobPaths, job_id: str, sight: Sight, queue: JobQueue, cancelled: bool = False) -> bool:
    """Write `end.json` for a job that is over for its scheduler; False while something is still worth to wait for."""
    job = job_in(paths.folder)
    account = queue.account(job_id)
    ends = [node_end(paths, rank) for rank in range(job.cell.nodes)]
    requeued = paths.requeued.exists()
    word = FinalState(REQUEUED) if requeued else _word(sight, account)
    if not cancelled and _worth_waiting(job, job_id, queue, account, word, ends):
        return False
    launchers = [node_launcher(paths, rank) for rank in range(job.cell.nodes)]
    nodes = _node_names(launchers, () if requeued else (account.accounting.nodes if account else (), sight.nodes))
    began = [launcher is not None for launcher in launchers]
    end = composed(job, ends, word, nodes, began, measurement_under_way(paths))
    if end.status is Status.LOST and not cancelled and not queue.end([job_id]):
        return False
    # A job that waited may be known no more once it is cancelled, and has left no word.
    if cancelled and (end.status is Status.CANCELLED or (end.status is Status.LOST and not any(began))):
        end = end.model_copy(update={"status": Status.CANCELLED, "message": "cancelled on request"})
    if requeued or account is None:  # the accounts of a requeued job are those of its second time in the queue
        accounting = Accounting(job_id=job_id, state=bare(word.state) if word else "", nodes=nodes)
    else:
        accounting = _with_nodes(account.accounting, nodes)
    with suppress(OSError):  # a full disk: the end has its place reserved
        write_atomically(paths.accounting, accounting.model_dump_json())
    queue.bring_logs(paths, job_id)
    write_end(paths, end)
    queue.forget(job_id)
    return True


def _worth_waiting(
    job: Job, job_id: str, queue: JobQueue, account: Account | None, word: FinalState | None, ends: list[JobEnd | None]
) -> bool:
    """Whether more may yet be heard of the job's end, from the scheduler or from its nodes."""
    waited, every = queue.seconds_since_end(job_id), cluster_target(job).poll_seconds
    if account is None and queue.account_expected(job_id) and waited < max(ACCOUNTS_SECONDS, 2 * every):
        return True
    if None not in ends:
        return False
    if word is None and queue.active_by_accounts(job_id):
        return waited < STALE_SECONDS
    if word is None:
        return waited < LOST_SECONDS
    return bare(word.state) == "COMPLETED" and waited < ACCOUNTS_SECONDS


def _word(sight: Sight, account: Account | None) -> FinalState | None:
    """The scheduler's final state of a job, from the accounting, else from the queue; None if unknown."""
    if account is not None:
        return FinalState(account.accounting.state, account.failed_nodes, account.reason)
    return None if sight.gone else FinalState(sight.state, reason=sight.reason)


def _node_names(launchers: Sequence[Launcher | None], told: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The nodes' names by rank, of the first that tells of all: accounts have named one of two. Else those that began.

    told: names by the scheduler.
    """
    began = tuple(launcher.host for launcher in launchers if launcher)
    return next((names for names in told if len(names) == len(launchers)), began)


def _with_nodes(accounting: Accounting, seen: tuple[str, ...]) -> Accounting:
    """With the nodes that were seen where those are more: of a job of two nodes sacct has named a single one."""
    return accounting.model_copy(update={"nodes": seen}) if len(seen) > len(accounting.nodes) else accounting


def give_up(paths: JobPaths, job_id: str, end: JobEnd) -> None:
    """Keep the end of a job that never started, and was cancelled."""
    with suppress(OSError):
        write_atomically(paths.accounting, Accounting(job_id=job_id, state="CANCELLED").model_dump_json())
    write_end(paths, end)
