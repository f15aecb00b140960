"""Verdict of a launcher on the end of a launch, and selection of the first cause among the nodes' verdicts."""

from collections.abc import Sequence

from configs.common.base import Frozen, utc_now
from configs.common.failure_kinds import OTHER_NODE, PEER_LOST, PROCESS_DIED
from configs.common.secrets import excerpt
from configs.plans.job import JobEnd
from configs.records.record import Status

_MESSAGE_CHARACTERS = 600
_WEAKEST_LAST = (Status.CANCELLED, PROCESS_DIED, PEER_LOST, OTHER_NODE, Status.COMPLETED)


class JobVerdict(Frozen):
    """How the job ended on a node, or as a whole. `nodes` are those to blame, which a retry leaves out.

    `silent_ranks` had not given up their measurement: where all others lost a peer that said nothing, it was one of
    them.
    """

    status: Status
    measurement: str | None = None
    rank: int | None = None
    kind: str | None = None
    message: str | None = None
    nodes: tuple[str, ...] = ()
    silent_ranks: tuple[int, ...] = ()

    def with_message(self, addition: str) -> "JobVerdict":
        """The same with one more thing to say."""
        return self.model_copy(update={"message": f"{self.message or ''} {addition}".strip()})

    def as_end(self, return_code: int | None) -> JobEnd:
        """What is put on disk."""
        return JobEnd(
            status=self.status,
            return_code=return_code,
            measurement=self.measurement,
            nodes=self.nodes,
            rank=self.rank,
            kind=self.kind,
            message=excerpt(self.message, _MESSAGE_CHARACTERS) if self.message else None,
            finished_at=utc_now(),
        )


class NotStartedError(Exception):
    """The ranks were never started; `verdict` says why."""

    def __init__(self, verdict: JobVerdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


def first_cause(verdicts: Sequence[JobVerdict]) -> JobVerdict:
    """The verdict that explains the others, of all nodes in the order in which they came; not empty.

    What happened of its own on a node comes before what was done to it or what it saw of another; among equals the
    first.
    """
    chosen = min(verdicts, key=_weakness)
    silent = {rank for verdict in verdicts for rank in verdict.silent_ranks}
    update: dict[str, object] = {}
    if chosen.kind == PEER_LOST and len(silent) == 1:
        update["rank"] = silent.pop()
    if chosen.measurement is None:
        update["measurement"] = next((verdict.measurement for verdict in verdicts if verdict.measurement), None)
    return chosen.model_copy(update=update)


def _weakness(verdict: JobVerdict) -> int:
    for weakness, word in enumerate(_WEAKEST_LAST, start=1):
        if word in (verdict.status, verdict.kind):
            return weakness
    return 0
