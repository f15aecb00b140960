"""Calls of Slurm's programs and what they answer; and how any scheduler's is called.

    answer = run_slurm(["squeue", "--jobs=12"], environment, limit_seconds=30)
    on_cluster(["squeue", "--jobs=12"], "a")                # squeue --clusters=a --jobs=12
    answer.failed                      # no answer: not to be taken for an empty one

slurmctld denies a job that it has forgotten, or never had, with "Invalid job id specified". squeue says so only where
it is asked for one job alone, scontrol always, scancel never (Slurm 22.05).
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_UNKNOWN_JOB = "Invalid job id"
_NO_ACCOUNTS = "accounting storage is disabled"
# Filters, formats and clusters that somebody set for himself; jobs go where the target says.
_USERS_DEFAULTS = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_", "SLURM_CLUSTERS")
# Times in seconds since the epoch; the tasks of an array in full, of which Slurm else writes 64 characters.
_ASKED = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


@dataclass(frozen=True)
class SchedulerAnswer:
    """What a program of a scheduler said. `failed`: it failed, is missing or did not end: no word on any job."""

    text: str = ""
    failed: bool = False
    unknown_job: bool = False
    """The controller denies the job that it was asked for."""
    keeps_nothing: bool = False
    """The cluster keeps no accounts, or sacct is not installed; or the server no history of its jobs."""


def on_cluster(command: Sequence[str], cluster: str | None) -> list[str]:
    """The call, of another cluster that slurmdbd knows where one is named (`--clusters`, which all programs take)."""
    program, *arguments = command
    return [program, *([f"--clusters={cluster}"] if cluster else []), *arguments]


def without_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of Slurm's programs, without what a user set for their calls by hand."""
    return {name: value for name, value in environment.items() if not name.startswith(_USERS_DEFAULTS)}


def called(
    command: Sequence[str], environment: Mapping[str, str], limit_seconds: float
) -> "subprocess.CompletedProcess[str] | None":
    """Run a program of a scheduler; None where it is missing or did not end. Raises nothing."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def run_slurm(
    command: Sequence[str], environment: Mapping[str, str], limit_seconds: float, cluster: str | None = None
) -> SchedulerAnswer:
    """Run a program of Slurm; it writes times as seconds since the epoch, and all tasks of an array. Raises nothing."""
    own = without_defaults(environment) | _ASKED
    done = called(on_cluster(command, cluster), own, limit_seconds)
    if done is None:
        missing = shutil.which(command[0], path=environment.get("PATH")) is None
        return SchedulerAnswer(failed=True, keeps_nothing=missing and command[0] == "sacct")
    if done.returncode == 0:
        return SchedulerAnswer(done.stdout)
    unknown = _UNKNOWN_JOB in done.stderr
    return SchedulerAnswer(failed=not unknown, unknown_job=unknown, keeps_nothing=_NO_ACCOUNTS in done.stderr)
