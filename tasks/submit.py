"""Stage 4: submit job folders (`tasks.campaign.launches.jobs`); many of one shape are one array of a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from configs.records.record import Status
from slurm.schedulers.adapter import adapter_for
from slurm.schedulers.refusals import Limited, Refused, Unavailable
from tasks.campaign.session import Session
from tasks.prefect_api.stages import stage


@dataclass(frozen=True)
class Refusal:
    """Why nothing was submitted. `final`: it never will be, as it stands; else another time it may.

    `limited`: the scheduler answered, and takes no more such jobs now; those of another shape it may take.
    `status`: of the measurements where it is final.
    """

    message: str
    final: bool
    limited: bool = False
    status: Status = Status.FAILED


@stage("submit", "submit {what}")
def submit_launches(what: str, names: Sequence[str], adapter: str, session: Session) -> Refusal | None:
    """Hand job folders, which hold their `job.json`, to the adapter of their target.

    A scheduler's refusal is an outcome of cells, not a failure of the pipeline. Raises OSError where this machine
    cannot start them.
    """
    try:
        adapter_for(adapter).submit_many([session.run.job(name).folder for name in names])
    except Refused as error:
        return Refusal(str(error), final=True, status=error.status)
    except Unavailable as error:
        return Refusal(str(error), final=False, limited=isinstance(error, Limited))
    return None
