"""Meaning of Slurm's job states, and the combined end of a job over all its nodes.

A table of all job states, and a pure function that combines the nodes' ends and the scheduler's state into the
job's `end.json`:

    standing("NODE_FAIL")                                         # ended, node_failed
    composed(job, [end of node 0, None], Word("NODE_FAIL", failed=("n2",)), nodes=("n1", "n2"))

States as in "JOB STATE CODES" of squeue(1) and sacct(1), Slurm 20.11 to 24.11 (https://slurm.schedmd.com/squeue.html,
https://slurm.schedmd.com/sacct.html), and `job_state_string` in src/common/slurm_protocol_defs.c.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from configs.common.base import utc_now
from configs.common.failure_kinds import HEAD_LOST, NODE_LOST, OTHER_NODE, PEER_LOST
from configs.common.printable import some_of
from configs.plans.job import Job, JobEnd
from configs.records.record import Status
from configs.targets.resources import ClusterTarget, ScheduledTarget
from slurm.launcher.containers import interpreter

REQUEUED = "REQUEUED"
"""State of a job that Slurm would run a second time."""

SUSPENDED = ("SUSPENDED", "STOPPED")
"""States of a job whose processes are stopped, to go on later."""

NEVER_BEGAN = "NeverBegan"
"""Kind of an end without a sign of life from any node."""

_SEEN_OF_OTHERS = (PEER_LOST, OTHER_NODE, NODE_LOST, HEAD_LOST)
"""Kinds of ends that only saw another rank or node go: never the first cause."""

_KILLED = ("SIGKILL", "SIGTERM")


@dataclass(frozen=True)
class StateMeaning:
    """What a state of Slurm means: where the job stands and, where it ended, how."""

    place: Literal["waiting", "running", "requeued", "ended"]
    """`requeued`: Slurm would run it a second time in the same folder, which is refused: it must be cancelled."""
    status: Status | None = None
    specific: bool = False
    """The scheduler knows the cause; FAILED and COMPLETED only say what the wrapper returned."""


def _ended(status: Status, specific: bool = True) -> StateMeaning:
    return StateMeaning("ended", status, specific)


_WAITING, _RUNNING = StateMeaning("waiting"), StateMeaning("running")
_REQUEUED = StateMeaning("requeued", Status.PREEMPTED, specific=True)

STANDINGS: dict[str, StateMeaning] = {
    "PENDING": _WAITING,
    "CONFIGURING": _WAITING,  # nodes are allotted and boot
    "RESV_DEL_HOLD": _WAITING,  # held, since its reservation was deleted
    "POWER_UP_NODE": _WAITING,
    "RUNNING": _RUNNING,
    "COMPLETING": _RUNNING,  # something of it is still there
    "SUSPENDED": _RUNNING,
    "STOPPED": _RUNNING,  # by SIGSTOP, its cores kept
    "SIGNALING": _RUNNING,
    "RESIZING": _RUNNING,
    "STAGE_OUT": _RUNNING,
    "UPDATE_DB": _RUNNING,
    "COMPLETED": _ended(Status.COMPLETED, specific=False),
    "FAILED": _ended(Status.FAILED, specific=False),
    "CANCELLED": _ended(Status.CANCELLED),
    "TIMEOUT": _ended(Status.TIMEOUT),
    "DEADLINE": _ended(Status.TIMEOUT),
    "OUT_OF_MEMORY": _ended(Status.OUT_OF_MEMORY),
    "PREEMPTED": _ended(Status.PREEMPTED),
    "NODE_FAIL": _ended(Status.NODE_FAILED),
    "BOOT_FAIL": _ended(Status.NODE_FAILED),
    "LAUNCH_FAILED": _ended(Status.NODE_FAILED),  # a prolog that failed, for one
    "RECONFIG_FAIL": _ended(Status.NODE_FAILED),
    "REVOKED": _ended(Status.LOST),  # another cluster of a federation took it
    REQUEUED: _REQUEUED,
    "REQUEUE_FED": _REQUEUED,
    "REQUEUE_HOLD": _REQUEUED,
    "SPECIAL_EXIT": _REQUEUED,
}

UNKNOWN_JOB = {"Slurm": "job in neither `squeue` nor `sacct`", "PBS": "job unknown to `qstat -x`"}
"""What is said, by scheduler, of a job that it does not know."""

_FOR_A_PERSON = {
    Status.CANCELLED: "cancelled through {scheduler}",
    Status.TIMEOUT: "{scheduler} ended the job at its time limit",
    Status.OUT_OF_MEMORY: "the job exceeded its memory limit in {scheduler}. Increase targets[].memory_per_node",
    Status.PREEMPTED: "{scheduler} preempted the job for one of higher priority",
    Status.NODE_FAILED: "{scheduler} reports a node failure",
    Status.LOST: "job unknown to {scheduler}",
}
_REQUEUE = "{scheduler} requeued the job, which was cancelled: a measurement is not begun twice in one job"
_ELSEWHERE = (
    "{scheduler} started the job on another cluster, where it is not watched, and it was cancelled. Set "
    "targets[].cluster (PBS: targets[].server) to the one that is to run it"
)
_FOR_A_STATE = {"DEADLINE": "the job's deadline had passed", "REVOKED": _ELSEWHERE} | dict.fromkeys(
    (state for state, meaning in STANDINGS.items() if meaning.place == "requeued"), _REQUEUE
)


def standing(word: str) -> StateMeaning:
    """The meaning of a state as squeue and sacct write it: `CANCELLED by 0`, `NODE_FAIL`, `COMPLETED+`.

    A word that a newer Slurm may have is taken for a job that is still there.
    """
    return STANDINGS.get(bare(word), _RUNNING)


def bare(word: str) -> str:
    """The state alone: `CANCELLED` of `CANCELLED by 1000`."""
    return word.split()[0].rstrip("+").upper() if word.split() else ""


@dataclass(frozen=True)
class FinalState:
    """What the scheduler says at last."""

    state: str
    failed: tuple[str, ...] = ()
    """Nodes that it names as the cause."""
    reason: str = ""


def composed(
    job: Job,
    ends: Sequence[JobEnd | None],
    word: FinalState | None,
    nodes: Sequence[str] = (),
    began: Sequence[bool] | None = None,
    measurement: str | None = None,
) -> JobEnd:
    """How a job ended that is over on all its nodes.

    ends: what each node said, by node rank; None: nothing. word: of the scheduler; None: it does not know the job.
    nodes: their names by node rank, () where unknown. began: on which of them the launcher came up (by default
    those that have an end). measurement: what some rank was doing when it last said something.

    1. Where every node says that its ranks ended by themselves, that holds.
    2. Where every node has an end and none was cancelled, the first cause among them holds, unless they only saw
       others go, or a rank was killed for lack of memory: Slurm knows why.
    3. Else the scheduler's word, where it names a cause.
    4. Else the nodes' own words, and without any the job is lost, or never began.
    """
    end = _composed(job, ends, word, nodes, began, measurement)
    return end if end.nodes else end.model_copy(update={"suspects": _suspects(end, ends, word, nodes)})


def _suspects(
    end: JobEnd, ends: Sequence[JobEnd | None], word: FinalState | None, nodes: Sequence[str]
) -> tuple[str, ...]:
    """Nodes that a retry leaves out where nobody names one to blame: the job was lost, or nothing was measured.

    Those that say nothing, else those whose ranks failed by themselves. A requeue or a preemption is no node's fault,
    nor is what a measurement did.
    """
    lost = end.status in (Status.LOST, Status.NODE_FAILED) or (end.status is Status.FAILED and not end.measurement)
    if not lost or len(nodes) != len(ends) or (word is not None and standing(word.state).status is Status.CANCELLED):
        return ()
    named = list(zip(nodes, ends, strict=True))
    silent = tuple(name for name, own in named if own is None)
    failed = tuple(
        name for name, own in named if own and own.status is Status.FAILED and own.kind not in _SEEN_OF_OTHERS
    )
    return silent or failed


def _composed(
    job: Job,
    ends: Sequence[JobEnd | None],
    word: FinalState | None,
    nodes: Sequence[str],
    began: Sequence[bool] | None,
    measurement: str | None,
) -> JobEnd:
    said = [end for end in ends if end is not None]
    own = [end for end in said if end.status not in (Status.COMPLETED, Status.CANCELLED)]
    settled = len(said) == len(ends) and all(end.status is not Status.CANCELLED for end in said)
    meaning = standing(word.state) if word else None
    if settled and not own:
        return _first(said, measurement)
    if settled and not (meaning and meaning.specific and _knows_better(meaning, own)):
        return _first(own, measurement)
    if word and meaning and meaning.specific:
        return _by_scheduler(meaning, word, ends, nodes, measurement, _scheduler(job))
    if own or said:
        return _first(own or [end for end in said if end.status is Status.CANCELLED] or said, measurement)
    return _without_a_word(job, word, nodes, any(began or ()), measurement)


def _knows_better(meaning: StateMeaning, own: list[JobEnd]) -> bool:
    """Whether the scheduler's cause lies before what the nodes saw of it."""
    killed = _KILLED if meaning.status is Status.OUT_OF_MEMORY else ()
    return all(end.kind in (*_SEEN_OF_OTHERS, *killed) for end in own)


def _first(ends: list[JobEnd], measurement: str | None) -> JobEnd:
    """The first node's own end, else what it saw of another; nodes to blame are of all of them.

    Nodes that can reach each other have agreed on a cause. `finished_at` would compare clocks of hosts.
    """
    first = min(ends, key=lambda end: end.kind in _SEEN_OF_OTHERS)
    measurement = first.measurement or next((end.measurement for end in ends if end.measurement), measurement)
    measurement = None if first.status is Status.COMPLETED else measurement
    return first.model_copy(update={"nodes": _blamed(ends), "measurement": measurement})


def _blamed(ends: Sequence[JobEnd | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for end in ends if end for name in end.nodes))


def _by_scheduler(
    meaning: StateMeaning,
    word: FinalState,
    ends: Sequence[JobEnd | None],
    nodes: Sequence[str],
    measurement: str | None,
    scheduler: str,
) -> JobEnd:
    assert meaning.status is not None
    blamed = word.failed or _blamed(ends)
    if meaning.status is Status.NODE_FAILED and not blamed and len(nodes) == len(ends):
        # The nodes that could still speak were told to end; those that say nothing have failed.
        silent = [name for name, end in zip(nodes, ends, strict=True) if end is None]
        blamed = tuple(silent) if silent else tuple(nodes if len(nodes) == 1 else ())
    message = (_FOR_A_STATE.get(bare(word.state)) or _FOR_A_PERSON[meaning.status]).format(scheduler=scheduler)
    details = [bare(word.state), word.reason if word.reason != "None" else ""]
    details += [f"nodes {some_of(blamed)}" if blamed else ""]
    return JobEnd(
        status=meaning.status,
        return_code=None,
        measurement=measurement or next((end.measurement for end in ends if end and end.measurement), None),
        nodes=blamed if meaning.status is Status.NODE_FAILED or meaning.place == "requeued" else (),
        kind=bare(word.state),
        message=f"{message} ({'; '.join(detail for detail in details if detail)})",
        finished_at=utc_now(),
    )


def _scheduler(job: Job) -> str:
    assert isinstance(job.target, ClusterTarget), f"{job.name} is of target kind {job.target.kind}"
    return job.target.scheduler


def _without_a_word(
    job: Job, word: FinalState | None, nodes: Sequence[str], began: bool, measurement: str | None
) -> JobEnd:
    """No node said how it ended, and the scheduler knows no cause."""
    where = some_of(nodes) or "the nodes"
    if began:
        message = f"the launchers on {where} exited without a result; see slurm_0.log and launcher_0.log"
        return JobEnd(
            status=Status.LOST, return_code=None, measurement=measurement, message=message, finished_at=utc_now()
        )
    if word is None:
        message = f"{UNKNOWN_JOB[_scheduler(job)]}, and no launcher started"
        return JobEnd(status=Status.LOST, return_code=None, kind=NEVER_BEGAN, message=message, finished_at=utc_now())
    assert isinstance(job.target, ScheduledTarget)
    python = interpreter(job.target)
    message = (
        f"no launcher started on {where}, which may not see the job's folder or {python}. Set targets[].shared to a "
        f"folder shared by all nodes. See slurm_0.log for {_scheduler(job)}'s output"
    )
    return JobEnd(status=Status.FAILED, return_code=None, kind=NEVER_BEGAN, message=message, finished_at=utc_now())
