"""Whether the figures of a load run are results, and what a reader must know of them.

client-bound      the generator was late, or could not send: the figures are those of the generator; no result
no answers        no request completed
not steady        a queue grew, or the server's speed changed, during the run
valid             anything else
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from configs.load.samples import RequestOutcome
from reports.load.metrics import LoadFigures, cut_conversations
from reports.load.samples import LoadRun
from reports.text import number, percent, plural

LATE_SECONDS = 0.005
"""A generator that is later than this at P99, and than LATE_SHARE of the median TTFT, is part of what it measures."""
LATE_SHARE = 0.1
_NOT_SENT = "not sent: "
"""Messages of the generator begin so."""


class Verdict(StrEnum):
    VALID = "valid"
    CLIENT_BOUND = "client-bound"
    NO_ANSWERS = "no answers"
    NOT_STEADY = "not steady"


@dataclass(frozen=True)
class LoadVerdict:
    """A verdict with its reason, and notes that do not change it."""

    verdict: Verdict
    reason: str
    notes: tuple[str, ...]

    @property
    def is_result(self) -> bool:
        """Whether the figures may be used: those of a run that is not steady are still what the server did."""
        return self.verdict in (Verdict.VALID, Verdict.NOT_STEADY)


def judged(run: LoadRun, figures: LoadFigures) -> LoadVerdict:
    """The verdict on a run."""
    notes = tuple(_notes(run, figures))
    dropped = int((run.columns["outcome"] == RequestOutcome.DROPPED).sum())
    if dropped:
        known = (message for message in run.facts.errors if message.startswith(_NOT_SENT))
        why = next(known, f"{_NOT_SENT}{plural(run.facts.job.caps.max_in_flight, 'request')} in flight")
        unsent = f"{plural(dropped, 'request')} {why}"
        return LoadVerdict(Verdict.CLIENT_BOUND, unsent, notes)
    if not figures.completed:
        errors = run.facts.errors
        unknown = f"none of {plural(figures.due, 'request')} completed" if figures.due else "no request was due"
        most = max(errors, key=lambda message: errors[message]) if errors else unknown
        return LoadVerdict(Verdict.NO_ANSWERS, most, notes)
    late = _late(run, figures)
    if late is not None:
        return LoadVerdict(Verdict.CLIENT_BOUND, late, notes)
    if figures.window.found is False:
        return LoadVerdict(Verdict.NOT_STEADY, figures.window.reason, notes)
    return LoadVerdict(Verdict.VALID, f"steady {figures.window.reason}" if figures.window.found else "", notes)


def _late(run: LoadRun, figures: LoadFigures) -> str | None:
    """How late the generator was; None where its lateness is no part of the figures."""
    known = run.ttft_seconds[~np.isnan(run.ttft_seconds)]
    allowed = max(LATE_SECONDS, LATE_SHARE * float(np.median(known)) if len(known) else 0.0)
    pairs = ((figures.late_p99_seconds, "requests were sent"), (figures.lag_p99_seconds, "the generator's timer fired"))
    for late, what in pairs:
        if late is not None and late > allowed:
            return f"{what} {number(late * 1000)} ms late at P99, allowed {number(allowed * 1000)} ms"
    return None


def _notes(run: LoadRun, figures: LoadFigures) -> list[str]:
    notes = []
    if run.facts.capped is not None:
        notes.append(f"ended early: {run.facts.capped}")
    failed = int((~run.completed).sum())  # of the whole run, as the messages are
    if failed:
        errors = "; ".join(f"{message} ({count:,})" for message, count in run.facts.errors.items())
        told = f": {errors}" if errors else ""
        notes.append(f"{failed:,} of all {plural(len(run), 'request')} failed ({percent(failed / len(run))}){told}")
    cut = cut_conversations(run)
    if cut is not None:
        notes.append(cut)
    if figures.window.found is None:
        notes.append(f"steady state unknown: {figures.window.reason}")
    if figures.achieved_rate is None and figures.window.seconds > 0 and run.completed.any():
        both = " and that of tokens are" if figures.tokens_per_second is None else " is"
        notes.append(
            f"no answer ended within the {number(figures.window.seconds)} s that are counted: the achieved rate{both} "
            "unknown; a longer run (duration_seconds) would tell"
        )
    if run.facts.job.contents.exact and figures.lengths_held is not None and figures.lengths_held < 1:
        notes.append(
            f"{percent(1 - figures.lengths_held)} of the answers do not have the length asked for: "
            "the figures cannot be compared with those of other engines"
        )
    if figures.at_once:
        notes.append(
            f"{percent(figures.at_once)} of the answers came at one moment: their TPOT and ITL are unknown, and an "
            "objective of TPOT takes their end-to-end latency over all tokens"
        )
    if figures.chunks_above_usage:
        notes.append(
            f"{plural(figures.chunks_above_usage, 'answer')} had more chunks than the server counted tokens: "
            "its usage is wrong, and their tokens are counted by chunks"
        )
    elif figures.counts_agree is None and figures.completed:
        notes.append("the server sends no usage: tokens are counted by chunks")
    elif figures.counts_agree is not None and figures.counts_agree < 1:
        notes.append(
            f"{percent(1 - figures.counts_agree)} of the answers have fewer chunks than tokens: "
            "ITL is the time between chunks"
        )
    return notes
