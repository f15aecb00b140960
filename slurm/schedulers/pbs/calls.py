"""Calls of PBS's programs and what they answer.

    answer = run_pbs(["qstat", "-x", "-f", "-w", "12.server"], environment, limit_seconds=30)

Exit codes are the last byte of the error's number (src/include/pbs_error.h of OpenPBS 23.06): 153 of
PBSE_UNKJOBID 15001, 35 of PBSE_HISTJOBID 15139.
"""

from collections.abc import Mapping, Sequence

from slurm.schedulers.commands.calls import SchedulerAnswer, called

UNKNOWN_JOB = 153
FINISHED_JOB = 35


def run_pbs(
    command: Sequence[str], environment: Mapping[str, str], limit_seconds: float, server: str | None = None
) -> SchedulerAnswer:
    """Run a program of PBS, for another server where one is named. Raises nothing.

    An answer on several jobs of which the server does not know some has the others in it. `keeps_nothing`: the server
    keeps no history, so that it refuses to say anything to `-x`, which its programs call a success.
    """
    environment = {**environment, **({"PBS_SERVER": server} if server else {})}
    done = called(command, environment, limit_seconds)
    if done is None:
        return SchedulerAnswer(failed=True)
    unknown = done.returncode in (UNKNOWN_JOB, FINISHED_JOB)
    refused = done.returncode == 0 and not done.stdout.strip() and "history" in done.stderr.lower()
    failed = done.returncode != 0 and not unknown
    return SchedulerAnswer(done.stdout, failed=failed, unknown_job=unknown, keeps_nothing=refused)
