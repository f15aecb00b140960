"""Read `qstat -x -f -w`: what PBS says of jobs, in the words of `slurm.schedulers.commands.states`.

    read_jobs(text)["12.server"].sight          # Sight("RUNNING", ("n1", "n2"))

Letters of job_state and numbers of substate: "Job States and Substates" of the PBS reference guide; negative exit
codes: JOB_EXEC_* of src/include/job.h, OpenPBS 23.06. A job that was deleted has substate 91 whether it ran or not.

The output is the plain one, an attribute in a line: `-F json` shows only the first of several jobs (OpenPBS 23.06.06).
"""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from configs.records.record import MAX_AMOUNT, Accounting
from slurm.schedulers.commands.accounting import Account, duration_seconds
from slurm.schedulers.commands.states import standing
from slurm.schedulers.job_queue import Sight

_STATES = {
    "Q": "PENDING",
    "W": "PENDING",
    "T": "PENDING",
    "H": "PENDING",
    "R": "RUNNING",
    "E": "COMPLETING",
    "S": "SUSPENDED",
    "U": "SUSPENDED",
    "M": "REVOKED",
}
_DELETED = "91"
_FIRST_NODE = -20  # the daemon of the first node is not reached
_EXITS = {
    -29: "TIMEOUT",
    -28: "TIMEOUT",  # of CPU time
    -27: "OUT_OF_MEMORY",
    -26: "OUT_OF_MEMORY",  # of virtual memory
    _FIRST_NODE: "NODE_FAIL",
    -14: "NODE_FAIL",  # another one
}
_WORD_BYTES = 8  # pbs_resources(7B): of the execution host
_SIZES = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
_HEADING = "Job Id: "
_ATTRIBUTE = re.compile(r" {4}([\w.]+) = (.*)$")
_NOT_RUNNING = "Not Running: "
NEVER = "Can Never Run: "


@dataclass(frozen=True)
class PbsJob:
    """One job as qstat shows it."""

    sight: Sight
    account: Account


def read_jobs(text: str, asked_at: float = 0.0) -> dict[str, PbsJob]:
    """Job id -> what is said of it; other lines are passed over, and jobs without a state."""
    found: dict[str, dict[str, str]] = {}
    job: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith(_HEADING):
            job = found.setdefault(line.removeprefix(_HEADING).strip(), {})
        elif match := _ATTRIBUTE.match(line):
            job.setdefault(match[1], match[2])
    return {name: _job(name, job, asked_at) for name, job in found.items() if name and job.get("job_state")}


def _job(name: str, job: dict[str, str], asked_at: float) -> PbsJob:
    state, nodes = _state(job), host_names(job.get("exec_host", ""))
    reason = _reason(job) if state == "PENDING" else ""
    queued, started = (_moment(job.get(field, "")) for field in ("etime", "stime"))
    accounting = Accounting(
        job_id=name,
        state=state,
        nodes=nodes,
        queued_seconds=None if queued is None or started is None else max(0.0, started - queued),
        elapsed_seconds=duration_seconds(job.get("resources_used.walltime", "")),
        cpu_seconds=duration_seconds(job.get("resources_used.cput", "")),
        # PBS adds up the memory of all nodes, where the field is of the largest task.
        max_rss_bytes=size_bytes(job.get("resources_used.mem", "")) or None if len(nodes) == 1 else None,
    )
    # The server has no word for which other node it was.
    failed = nodes[:1] if _exit_code(job) == _FIRST_NODE and state == "NODE_FAIL" else ()
    comment = job.get("comment", "") if standing(state).place == "ended" else ""
    return PbsJob(Sight(state, nodes, reason, asked_at=asked_at), Account(accounting, failed, comment))


def _state(job: dict[str, str]) -> str:
    letter = job["job_state"]
    if letter != "F":
        return _STATES.get(letter, "RUNNING")
    code = _exit_code(job)
    if code is not None and code in _EXITS:
        return _EXITS[code]
    if job.get("substate") == _DELETED:
        return "CANCELLED"
    if code is not None and code < 0:
        return "LAUNCH_FAILED"
    return "COMPLETED" if code == 0 else "FAILED"


def _exit_code(job: dict[str, str]) -> int | None:
    text = job.get("Exit_status", "")
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _reason(job: dict[str, str]) -> str:
    """Why a job waits: the scheduler's comment, or that it is held, and by whom."""
    comment = " ".join(job.get("comment", "").removeprefix(_NOT_RUNNING).split())
    if job.get("job_state") != "H":
        return comment
    held = f"held (Hold_Types {job.get('Hold_Types', 'unknown')})"
    return f"{held}: {comment}" if comment else held


def host_names(text: str) -> tuple[str, ...]:
    """Of exec_host, `n1/0*2+n2/1`: n1, n2."""
    names = (part.partition("/")[0].strip("() ") for part in text.split("+"))
    return tuple(dict.fromkeys(name for name in names if name))


def size_bytes(text: str) -> int | None:
    """Of `1024kb`, or `128kw` of words; of a number without a unit, bytes; None for what is none."""
    match = re.fullmatch(r"(\d{1,18})([kmgt]?[bw])?", text.lower())
    if match is None:
        return None
    unit = match[2] or "b"
    return int(match[1]) * _SIZES[f"{unit[:-1]}b"] * (_WORD_BYTES if unit.endswith("w") else 1)


def _moment(text: str) -> float | None:
    """Seconds since the epoch of `Mon Nov 23 12:54:56 2026`, in local time."""
    with suppress(ValueError, OverflowError):
        moment = datetime.strptime(text, "%a %b %d %H:%M:%S %Y").timestamp()
        return moment if math.isfinite(moment) and abs(moment) <= MAX_AMOUNT else None
    return None
