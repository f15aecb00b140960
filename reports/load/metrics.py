"""Figures of a load run: latencies with intervals, rates, goodput, token counts.

    found = serving_metrics(run, objectives)
    found.latencies["ttft"].p99.value, found.latencies["ttft"].p99.interval

Percentiles are over the requests that were due in the steady part. Their intervals take consecutive parts of that as
sections (`reports.numbers.percentiles`), since neighbouring requests share a queue and are not independent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from configs.common.arrays import Floats, Ints
from configs.load.arrivals import ClosedLoop
from configs.load.objectives import RequestObjectives
from configs.load.samples import FinishCode, RequestOutcome
from reports.load.samples import LoadRun
from reports.load.steady import Window, steady_window
from reports.numbers.percentiles import quantiles, section_interval
from reports.numbers.statistics import CONFIDENCE, LEAST_REPEATS, Bounds, Percentile
from reports.text import percent

SHARES = (0.5, 0.9, 0.99)
SECTIONS = LEAST_REPEATS
"""Consecutive parts of a run. Few and long ones: neighbouring requests wait in one queue, and in simulations of queues
more sections cover less."""
_LEAST_OF_SECTION = 10
WARM_UP_SHARE = 0.2
"""Of each run of a search, not counted: every run begins with an idle server. A share that is fixed beforehand, since a
cut that is chosen by the samples (as of `reports.load.steady`) leaves a shorter queue than there is."""

_SHORT_SHARE = 0.9
"""Of the requests that conversations stand for: with fewer, more than one conversation's chance, a run is too short."""

MAX_SCORE = 1e6
"""Of a request that failed: worse than any bound, and still a number whose logarithm can be taken."""


@dataclass(frozen=True)
class LoadPercentile(Percentile):
    """A percentile with the interval by sections; None where there are too few samples."""

    interval: Bounds | None


@dataclass(frozen=True)
class LatencyFigures:
    """One kind of latency in seconds, over `samples` values."""

    samples: int
    mean: float
    p50: LoadPercentile
    p90: LoadPercentile
    p99: LoadPercentile


@dataclass(frozen=True)
class Goodput:
    """Requests that met all objectives: share of those that were due, and how many per second.

    The rate is of those that were due, of a closed loop of those that ended.
    """

    share: float
    requests_per_second: float | None


@dataclass(frozen=True)
class LoadFigures:
    """Of the steady part of a run.

    latencies: by ttft, tpot, tpot_with_first, itl, e2e; without those that nothing is known of. due: requests.
    requested_rate: None of a closed loop; the other rates: None where all requests were due at once, the achieved one
    where none ended in the steady part, and that of tokens where none arrived in it.
    lengths_held: share of answers as long as asked for.
    counts_agree: share of answers with as many chunks as the server counted tokens; None without usage.
    chunks_above_usage: answers with more chunks than tokens, which no server can have.
    at_once: share of answers of several tokens that came at one moment; their TPOT and ITL are unknown.
    """

    window: Window
    latencies: Mapping[str, LatencyFigures]
    due: int
    completed: int
    outcomes: Mapping[str, int]
    requested_rate: float | None
    offered_rate: float | None
    achieved_rate: float | None
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    goodput: Goodput | None
    lengths_held: float | None
    counts_agree: float | None
    chunks_above_usage: int
    at_once: float | None
    late_p99_seconds: float | None
    lag_p99_seconds: float | None


def serving_metrics(run: LoadRun, objectives: RequestObjectives | None = None) -> LoadFigures:
    """All figures of a run."""
    window = steady_window(run)
    due = window.holds(run.columns["scheduled_seconds"])
    kept = np.flatnonzero(due)
    outcomes = run.columns["outcome"][due]
    usage, chunks = run.columns["new_tokens"], run.columns["chunks"]
    counted = due & run.completed & ~np.isnan(usage)
    completed = due & run.completed
    # Users first ask all at once: as a rate, requests that were due would be too many by as many as there are users.
    closed = isinstance(run.facts.job.arrivals, ClosedLoop)
    rated = window.holds(run.columns["ended_seconds"]) if closed else due
    return LoadFigures(
        window=window,
        latencies=_latencies(run, kept),
        due=len(kept),
        completed=int(completed.sum()),
        outcomes={one.name.lower(): int((outcomes == one).sum()) for one in RequestOutcome if (outcomes == one).any()},
        requested_rate=run.facts.job.requested_rate,
        offered_rate=_rate(len(kept), window),
        achieved_rate=_achieved(run, window),
        tokens_per_second=_token_rate(run, window),
        prompt_tokens_per_second=_prompt_rate(run, rated & run.completed, window),
        goodput=None if objectives is None else _goodput(scores(run, objectives), due, rated, window),
        lengths_held=_share(_as_long_as_asked(run)[completed]),
        counts_agree=_share((usage == chunks)[counted]),
        chunks_above_usage=int((chunks > usage)[counted].sum()),
        at_once=_share(run.at_once[completed]),
        late_p99_seconds=_p99(run.late_seconds[due & (run.columns["outcome"] != RequestOutcome.DROPPED)]),
        lag_p99_seconds=_p99(run.lag_seconds),
    )


def scores(run: LoadRun, objectives: RequestObjectives) -> Floats:
    """Of each request the largest latency over its bound: up to 1 it met its objectives; MAX_SCORE where it failed."""
    latencies = {"ttft": run.ttft_seconds, "tpot": run.judged_tpot_seconds, "e2e": run.e2e_seconds}
    found = np.zeros(len(run))
    for name, bound in objectives.bounds.items():
        found = np.fmax(found, latencies[name] / bound)  # fmax: an answer of one token has no time per token
    return np.where(run.completed, np.minimum(found, MAX_SCORE), MAX_SCORE)


def scores_after_warm_up(run: LoadRun, objectives: RequestObjectives) -> Floats:
    """The scores of a run for `reports.load.search`."""
    return scores(run, objectives)[run.columns["scheduled_seconds"] >= WARM_UP_SHARE * run.facts.issuing_seconds]


def cut_conversations(run: LoadRun) -> str | None:
    """Say that conversations are too long for the run, so that surely fewer requests were due than asked for; or None.

    In a long run turns of conversations that have begun before take the place of those that begin too late to end. They
    do not where a conversation takes as long as the run. Conversations that a failure ended do not count.
    """
    turns, columns = run.facts.job.contents.turns, run.columns
    if turns == 1 or run.facts.job.requested_rate is None:
        return None
    whole = ~np.isin(columns["conversation"], columns["conversation"][~run.completed])
    due = whole & (columns["scheduled_seconds"] >= WARM_UP_SHARE * run.facts.issuing_seconds)
    begun = int((due & (columns["turn"] == 0)).sum())
    share = float(due.sum()) / (turns * begun) if begun else 1.0
    if not begun or share >= _SHORT_SHARE - 1 / sqrt(begun):
        return None
    asked = f"{percent(share)} of the requests that were asked for were due"
    return f"conversations of {turns} turns are too long for the run: {asked}"


def latency_of(values: Floats, sections: Ints) -> LatencyFigures | None:
    """Mean and percentiles of samples; sections: to which of SECTIONS parts of the run each belongs. None of none."""
    known = ~np.isnan(values)
    values, sections = values[known], sections[known]
    if not len(values):
        return None
    p50, p90, p99 = (_percentile(values, sections, share) for share in SHARES)
    return LatencyFigures(len(values), float(values.mean()), p50, p90, p99)


def _percentile(values: Floats, sections: Ints, share: float) -> LoadPercentile:
    (pooled,) = quantiles(values, (share,))
    least = max(_LEAST_OF_SECTION, ceil(1 / (1 - share) - 1e-9))
    parts = [values[sections == section] for section in range(SECTIONS)]
    interval = None
    if all(len(part) >= least for part in parts) and pooled > 0:
        interval = section_interval(pooled, [quantiles(part, (share,))[0] for part in parts], CONFIDENCE)
    return LoadPercentile(pooled, share, len(values), interval)


def _latencies(run: LoadRun, kept: Ints) -> dict[str, LatencyFigures]:
    if not len(kept):
        return {}
    section_of = np.full(len(run), -1, dtype=np.int64)
    section_of[kept] = np.arange(len(kept)) * SECTIONS // len(kept)
    by_request = {
        "ttft": run.ttft_seconds,
        "tpot": run.tpot_seconds,
        "tpot_with_first": run.tpot_with_first_seconds,
        "e2e": run.e2e_seconds,
    }
    found = {name: latency_of(values[kept], section_of[kept]) for name, values in by_request.items()}
    owners = section_of[run.gap_request]
    counted = (owners >= 0) & (run.completed & ~run.at_once)[run.gap_request]
    found["itl"] = latency_of(run.gap_seconds[counted], owners[counted])
    return {name: one for name, one in found.items() if one is not None}


def tokens_within(run: LoadRun, window: Window) -> float:
    """Tokens that arrived in the window; a chunk stands for the mean number of tokens of its answer's chunks."""
    per_chunk = run.tokens / np.maximum(run.columns["chunks"], 1)
    return float(per_chunk[run.chunk_request[window.holds(run.chunk_seconds)]].sum())


def _achieved(run: LoadRun, window: Window) -> float | None:
    """Completed requests a second. None where all ended later: a part shorter than an answer says nothing of it."""
    inside = int((window.holds(run.columns["ended_seconds"]) & run.completed).sum())
    return None if not inside and run.completed.any() else _rate(inside, window)


def _as_long_as_asked(run: LoadRun) -> NDArray[np.bool_]:
    """Without usage, chunks are no count of tokens: an answer that ended at its limit has as many as were asked for."""
    usage = run.columns["new_tokens"]
    limited = np.isnan(usage) & (run.columns["finish"] == FinishCode.LENGTH)
    told = np.where(np.isnan(usage), run.columns["chunks"], usage)
    held: NDArray[np.bool_] = (told == run.columns["asked_new_tokens"]) | limited
    return held


def _token_rate(run: LoadRun, window: Window) -> float | None:
    """Tokens a second. None where all arrived later, as of the achieved rate."""
    inside = tokens_within(run, window)
    return None if not inside and len(run.chunk_seconds) else _rate(inside, window)


def _prompt_rate(run: LoadRun, completed: NDArray[np.bool_], window: Window) -> float | None:
    usage = run.columns["prompt_tokens"][completed]
    return None if not len(usage) or np.isnan(usage).any() else _rate(float(usage.sum()), window)


def _goodput(found: Floats, due: NDArray[np.bool_], rated: NDArray[np.bool_], window: Window) -> Goodput | None:
    """rated: requests of which the rate is. It is None where all good ones ended later, as the achieved rate is."""
    good = found <= 1
    if not due.any():
        return None
    inside = int((good & rated).sum())
    return Goodput(float(good[due].mean()), None if not inside and good.any() else _rate(inside, window))


def _rate(number: float, window: Window) -> float | None:
    return number / window.seconds if window.seconds > 0 else None


def _share(held: NDArray[np.bool_]) -> float | None:
    return float(held.mean()) if len(held) else None


def _p99(values: Floats) -> float | None:
    return quantiles(values, (0.99,))[0] if len(values) else None
