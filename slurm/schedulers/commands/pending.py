"""Why jobs wait, or are not taken: what passes, what a person must do, and what will never pass.

    field_to_correct("QOSMaxNodePerJobLimit")            # nodes: such a job never starts
    is_held("JobHeldUser")                               # until somebody releases it
    refusal_reason("sbatch: error: QOSMaxNodePerJobLimit\\nsbatch: error: Batch job ...")

Reasons as in "JOB REASON CODES" of squeue(1) and `job_reason_string` of src/common/slurm_protocol_defs.c, Slurm 22.05
to 24.11. Limits of a QOS and of an association bear the same names; sbatch prints them where the QOS has the flag
DenyOnLimit, which looks at the job by itself (sacctmgr(1)).
"""

import re

from slurm.schedulers.commands.calls import on_cluster

_NEVER = {
    "PartitionTimeLimit": "time_limit_minutes",
    "PartitionNodeLimit": "nodes",
    "InvalidAccount": "account",
    "AccountNotAllowed": "account",
    "InvalidQOS": "qos",
    "QOSNotAllowed": "qos",
    "BadConstraints": "constraint",
    "ReservationDeleted": "reservation",
    "DependencyNeverSatisfied": "extra",
    "QOSTimeLimit": "time_limit_minutes",
    "DeadLine": "extra",
}
_OF_ONE_JOB = re.compile(r"(?:QOS|Assoc)(?:Max(\w+?)Per(?:Job|Node)(?:Limit)?|Min(\w+?)(?:NotSatisfied)?)$")
_LIMIT = re.compile(r"(QOS|Assoc)[A-Z]\w+$")
_SUBMISSIONS = re.compile(r"Submit|JobsLimit|JobsPer")  # so many jobs at once: it passes when others end
_FIELDS = (
    (r"WallDuration|Minutes|Time", "time_limit_minutes"),
    (r"Node", "nodes"),
    (r"Cpu|CPU", "cores_per_rank"),
    (r"Mem", "memory_per_node"),
    (r"GRES", "gpus_per_node"),
)
_HELD = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "RESV_DEL_HOLD")
_ORDINARY = ("", "None", "Priority", "Resources", "BeginTime", "Cleaning", "JobArrayTaskLimit", "Prolog")
# Beginnings of the comments that PBS gives such jobs.
_PBS_ORDINARY = ("Insufficient amount of resource", "Not enough free nodes available")


def field_to_correct(reason: str) -> str | None:
    """The target's field to blame where a job waits for a reason that will not pass; None where it may."""
    if reason in _NEVER:
        return _NEVER[reason]
    return limited_field(reason) if _OF_ONE_JOB.match(reason) else None


def limited_field(reason: str) -> str:
    """The target's field that a limit of a QOS or an association is about."""
    resource = re.sub(r"Per[A-Z]\w*$", "", reason)
    about = next((name for pattern, name in _FIELDS if re.search(pattern, resource)), None)
    return about or ("qos" if reason.startswith("QOS") else "account")


def is_held(reason: str) -> bool:
    """Whether the job waits until a person releases it."""
    return reason in _HELD or "held" in reason.lower()


def is_ordinary(reason: str) -> bool:
    """Whether the job only waits for its turn, so that nobody need be told at once."""
    return reason in _ORDINARY or reason.startswith(_PBS_ORDINARY)


def waits_for_own_jobs(reason: str) -> bool:
    """Whether the job waits for others of its array, as the target's `max_running` asks for."""
    return reason == "JobArrayTaskLimit"


def pending_note(job_id: str, reason: str, cluster: str | None = None) -> str:
    """One line on a job that waits; of another cluster than the user's own where one is named."""
    if not reason or reason == "None":
        return f"job {job_id} pending"
    if is_held(reason):
        release = " ".join(on_cluster(["scontrol", "release", job_id], cluster))
        return f"job {job_id} held: {reason}. `{release}` lets it start"
    return f"job {job_id} pending: {reason}"


def refusal_reason(words: str) -> str | None:
    """The limit that sbatch names among its words; None where it names none."""
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ").strip() for line in words.splitlines()]
    return next((line for line in lines if _LIMIT.match(line)), None)


def is_submission_limit(reason: str) -> bool:
    """Whether a limit counts jobs, so that it passes when others end or fewer are submitted together."""
    return _SUBMISSIONS.search(reason) is not None
