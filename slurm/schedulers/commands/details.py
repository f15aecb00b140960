"""Parse `scontrol --oneliner show job`: what slurmctld itself says of one job, or of an array's tasks.

    read_details(text)["12_3"].state                 # PENDING

It is asked where squeue does not show a job, and where nobody keeps accounts. Its fields are those of
`slurm_sprint_job_info` in src/api/job_info.c; none that is read here holds a blank, but the reason.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from configs.records.record import Accounting
from slurm.schedulers.commands.accounting import duration_seconds, listed_hosts, seconds_since_epoch
from slurm.schedulers.commands.states import bare

_NONE = ("", "(null)", "None", "N/A", "Unknown")
_REASON = re.compile(r" Reason=(.*?) Dependency=")
_MAX_TASKS = 100_000


@dataclass(frozen=True)
class JobDetails:
    """One job, or task of an array, as slurmctld has it."""

    state: str
    nodes: tuple[str, ...]
    reason: str
    accounting: Accounting


def details_command(job_id: str, *options: str) -> list[str]:
    """The call for a job, or for all tasks of an array; with further options of scontrol."""
    return ["scontrol", *options, "--oneliner", "show", "job", job_id]


def read_details(text: str) -> dict[str, JobDetails]:
    """Job id -> details; tasks of an array by `<array>_<task>`, as squeue writes them."""
    found: dict[str, JobDetails] = {}
    for line in text.splitlines():
        state = _field(line, "JobState")
        if line.startswith("JobId=") and state:
            with suppress(ValueError):  # a list of hosts that is none: the line is damaged
                found |= {job_id: _details(job_id, bare(state), line) for job_id in _ids(line)}
    return found


def _details(job_id: str, state: str, line: str) -> JobDetails:
    nodes = listed_hosts(_field(line, "NodeList"))
    submitted, started = (seconds_since_epoch(_field(line, name)) for name in ("SubmitTime", "StartTime"))
    queued = None if submitted is None or started is None or not nodes else max(0.0, started - submitted)
    reason = _REASON.search(line)
    accounting = Accounting(
        job_id=job_id,
        state=state,
        nodes=nodes,
        queued_seconds=queued,
        elapsed_seconds=duration_seconds(_field(line, "RunTime")) if nodes else None,
    )
    return JobDetails(state, nodes, reason[1] if reason and reason[1] not in _NONE else "", accounting)


def _field(line: str, name: str) -> str:
    match = re.search(rf"(?:^| ){name}=(\S*)", line)
    return match[1] if match and match[1] not in _NONE else ""


def _ids(line: str) -> Iterator[str]:
    array, tasks = _field(line, "ArrayJobId"), _field(line, "ArrayTaskId")
    if not array or not tasks:
        yield _field(line, "JobId")
        return
    yield from (f"{array}_{task}" for task in _tasks(tasks))


def _tasks(text: str) -> Iterator[int]:
    """`1-3,7%2` -> 1, 2, 3, 7; `0-8:4` -> 0, 4, 8; nothing of what cannot be read."""
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match:
            first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            yield from range(first, min(last, first + _MAX_TASKS) + 1, max(1, step))
