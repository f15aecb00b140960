"""What an adapter raises and returns: the states of a job, and why a scheduler does not take one."""

from typing import Literal

from configs.records.record import Status

JobState = Literal["waiting", "running", "suspended", "ended"]
"""suspended: it ran, has its nodes, and is stopped by the scheduler for a while; no time limit counts meanwhile."""

REFUSED = "Refused"
"""Kind of the end of a job that a scheduler took and will never start: wrong configuration, not to be tried again."""


class Refused(ValueError):
    """The scheduler does not take such a job: wrong configuration, not to be tried again. Names the target's field.

    status: what becomes of its measurements.
    """

    def __init__(self, message: str, status: Status = Status.FAILED) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(OSError):
    """The scheduler cannot take the job now; it may later. Whether it took it after all, `poll` finds out."""

    may_have_taken = True
    """Whether it may have taken the job all the same: not where no program could connect to it."""


class Limited(Unavailable):
    """The scheduler has answered, and does not take so many jobs now: a limit that passes when others end."""
