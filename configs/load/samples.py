"""Raw samples of a load run: names and meaning of the columns, and the facts of the run beside them.

    <folder>/samples.npz     one column per name below, prefixed `0/` as those of a record's rank
    <folder>/run.json        LoadFacts

Times are in seconds since the run's start, on one monotonic clock. NaN is unknown. A request that ended in an error
keeps the times that it reached.
"""

from enum import IntEnum

from pydantic import NonNegativeFloat, NonNegativeInt

from configs.common.base import Frozen
from configs.load.job import LoadJob

SAMPLES_FILE, FACTS_FILE, JOB_FILE = "samples.npz", "run.json", "job.json"

REQUEST_COLUMNS = (
    "scheduled_seconds",  # when it should have been sent: latencies count from here
    "started_seconds",  # when the generator turned to it; the difference is the generator's own lateness
    "sent_seconds",  # when its last byte was handed to the kernel, connecting included
    "first_seconds",  # arrival of the first chunk with text
    "last_seconds",  # arrival of the last chunk with text
    "ended_seconds",  # end of the response, or of the attempt
    "asked_prompt_tokens",  # by the generator; NaN for text
    "prompt_tokens",  # by the server's usage
    "asked_new_tokens",
    "new_tokens",  # by the server's usage
    "chunks",  # with text, counted by the generator
    "conversation",
    "turn",  # from 0
    "outcome",  # Outcome
    "http_status",
    "finish",  # Finish
)
CHUNK_COLUMN = "chunk_seconds"
"""Arrivals of all chunks with text, one request after another in the order of the requests."""
LAG_COLUMN = "lag_seconds"
"""How late the generator's own timer fired, every `LAG_EVERY_SECONDS`: it shows a generator short of CPU."""
LAG_EVERY_SECONDS = 0.02
SAMPLE_COLUMNS = (*REQUEST_COLUMNS, CHUNK_COLUMN, LAG_COLUMN)


class RequestOutcome(IntEnum):
    """How a request ended."""

    COMPLETED = 0
    REFUSED = 1  # an HTTP status other than 200, or an error in the stream
    CONNECTION = 2  # no connection, or lost before the response ended
    TIMEOUT = 3
    MALFORMED = 4  # not a stream of completions
    DROPPED = 5  # not sent: too many in flight


class FinishCode(IntEnum):
    """Why the server ended an answer (`finish_reason`)."""

    UNKNOWN = 0
    LENGTH = 1
    STOP = 2
    OTHER = 3


class LoadFacts(Frozen):
    """What is known of a run as a whole."""

    job: LoadJob
    started_at: str
    issuing_seconds: NonNegativeFloat
    """The duration, or until the first request of an open loop would have been due that a count or a cap left out; else
    until the last one was due."""
    wall_seconds: NonNegativeFloat
    """Until the last response ended."""
    cpu_share: NonNegativeFloat
    """CPU time of the generator over wall time; at 1 its only thread was never idle."""
    requests: NonNegativeInt
    connections: NonNegativeInt
    capped: str | None = None
    """The cap that ended the run early."""
    errors: dict[str, int] = {}
    """Messages of failed requests and how often each was seen, at most 20 of them."""
