"""Parse Slurm's accounting (sacct) of jobs.

    accounts = read_accounts(subprocess.run(sacct_command(["123"]), ...).stdout)
    accounts["123_4"].accounting.cpu_seconds

sacct has a row for the job and one for each of its steps. Times and CPU time are the job's row, as sacct(1) adds
them up itself; memory is in the steps' rows only, as the largest task's. Fields and their units: sacct(1),
https://slurm.schedmd.com/sacct.html.
"""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from configs.records.record import MAX_AMOUNT, Accounting
from slurm.launcher.node import host_names
from slurm.schedulers.commands.states import bare

SACCT_FIELDS = (
    "JobID",
    "State",
    "NodeList",
    "Submit",
    "Start",
    "End",
    "ElapsedRaw",
    "TotalCPU",
    "MaxRSS",
    "ConsumedEnergyRaw",
    "Reason",
)
SACCT_FORMAT = ",".join(SACCT_FIELDS)
SACCT_ARGUMENTS = ("--parsable2", "--noconvert", f"--format={SACCT_FORMAT}")
SACCT_STEP_ARGUMENTS = ("--parsable2", "--noconvert", f"--format={SACCT_FORMAT},JobIDRaw")
"""For steps of a job that is known by SLURM_JOB_ID: JobID has a task of an array as `<array>_<task>`."""

_MULTIPLES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)$")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)$")
_EMPTY = ("", "Unknown", "None", "None assigned", "N/A", "(null)")
_MAX_DIGITS = 40
_EARLIER = timedelta(hours=3)
"""Where clocks are set back, one time is two moments; and a file has its time from the server of its disk."""


@dataclass(frozen=True)
class Account:
    """One job in the accounts."""

    accounting: Accounting
    failed_nodes: tuple[str, ...] = ()
    reason: str = ""
    """Of the end, where the scheduler keeps one."""


def sacct_command(job_ids: Sequence[str]) -> list[str]:
    """The call for these jobs, steps included. Its times are read most surely with SLURM_TIME_FORMAT=%s."""
    return ["sacct", *SACCT_ARGUMENTS, f"--jobs={','.join(job_ids)}"]


def sacct_named_command(name: str, since: datetime) -> list[str]:
    """The call for jobs of a name, which no others have, that were there after about a moment of local time."""
    since -= _EARLIER
    return ["sacct", *SACCT_ARGUMENTS, f"--name={name}", f"--starttime={since:%Y-%m-%dT%H:%M:%S}"]


def read_accounts(text: str) -> dict[str, Account]:
    """Job id -> account, of a text that `SACCT_ARGUMENTS` made, its header line included.

    Other columns may stand between. Raises ValueError for a text without the columns JobID and State.
    """
    jobs: dict[str, list[dict[str, str]]] = {}
    for row in _rows(text):
        jobs.setdefault(row["JobID"].partition(".")[0], []).append(row)
    found = {name: _account(name, rows) for name, rows in jobs.items()}
    return {name: account for name, account in found.items() if account is not None}


def read_step(text: str, step: str) -> Account | None:
    """One step by itself, `77.3`: a launch of a manifest, of whose job it is a part. Raises as `read_accounts`."""
    rows = [row for row in _rows(text) if step in (row["JobID"], row.get("JobIDRaw"))]
    return _account(rows[0]["JobID"], rows) if rows else None


def _rows(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if "|" in line]
    header = lines[0].split("|") if lines else []
    if not {"JobID", "State"} <= set(header):
        raise ValueError(f"no accounts: expected a first line with the columns {SACCT_FORMAT}")
    rows = [dict(zip(header, line.split("|"), strict=False)) for line in lines[1:]]
    return [row for row in rows if {"JobID", "State"} <= row.keys()]  # a line may be cut off


def _account(name: str, rows: list[dict[str, str]]) -> Account | None:
    """None for what has no row of its own: steps whose job began after the text was made."""
    job = next((row for row in rows if row["JobID"] == name), None)
    if job is None:
        return None
    submitted, started = (seconds_since_epoch(job.get(field, "")) for field in ("Submit", "Start"))
    queued = None if submitted is None or started is None else _credible(max(0.0, started - submitted))
    failed, nodes = (_legible_hosts(job.get(field, "")) for field in ("FailedNode", "NodeList"))
    energy = max((joules for row in rows if (joules := _number(row.get("ConsumedEnergyRaw", "")))), default=None)
    accounting = Accounting(
        job_id=name,
        state=bare(job["State"]),
        nodes=nodes,
        queued_seconds=queued,
        elapsed_seconds=_number(job.get("ElapsedRaw", "")),
        cpu_seconds=duration_seconds(job.get("TotalCPU", "")),
        max_rss_bytes=max((size for row in rows if (size := _bytes(row.get("MaxRSS", "")))), default=None),
        energy_joules=energy,  # where nothing is metered sacct writes 0, which is left out
    )
    # `Reason` is for whoever reads the text: why the job was last kept from starting, not why it ended (sacct(1)).
    return Account(accounting, failed)


def duration_seconds(text: str) -> float | None:
    """Seconds of `[DD-[HH:]]MM:SS[.mmm]`; None where nothing was measured."""
    match = _DURATION.match(text) if len(text) <= _MAX_DIGITS else None
    if match is None:
        return None
    days, hours, minutes, seconds = match.groups(default="0")
    return _credible(float(days) * 86400 + float(hours) * 3600 + float(minutes) * 60 + float(seconds))


def _bytes(text: str) -> int | None:
    match = _BYTES.match(text) if len(text) <= _MAX_DIGITS else None
    size = _credible(float(match[1]) * _MULTIPLES[match[2]]) if match else None
    return None if size is None else round(size)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return _credible(number)


def _credible(amount: float) -> float | None:
    """The amount; None for one that is not finite or that no record can hold."""
    return amount if math.isfinite(amount) and abs(amount) <= MAX_AMOUNT else None


def seconds_since_epoch(text: str) -> float | None:
    """Of a time as SLURM_TIME_FORMAT=%s writes it, or as sacct does by itself (local time, no zone)."""
    if text.isascii() and text.isdigit():
        return _number(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def listed_hosts(text: str) -> tuple[str, ...]:
    """Of a host list; none where there is none. Raises as `host_names`."""
    return () if text in _EMPTY else host_names(text)


def _legible_hosts(text: str) -> tuple[str, ...]:
    """The same of accounts, where one list that cannot be read keeps back neither its job's state nor other jobs."""
    with suppress(ValueError):
        return listed_hosts(text)
    return ()
