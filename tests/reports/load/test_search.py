"""The search against servers whose limit is known, in virtual time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.simulated import SingleServer
from configs.common.arrays import Floats
from configs.load.arrivals import PoissonArrivals
from configs.load.job import Contents
from configs.load.objectives import RequestObjectives
from reports.load.metrics import MAX_SCORE, WARM_UP_SHARE, serving_metrics
from reports.load.next_rate import taken
from reports.load.samples import LoadRun
from reports.load.search import FoundRate, RateSearch, SearchGoal
from reports.load.text import search_table
from reports.load.verdict import judged
from reports.text import UNKNOWN
from tests.support.run_folders.load_runs import made_run

SEEDS = 20


def found(server: SingleServer, goal: SearchGoal, seed: int, seconds: float, ttft_seconds: float) -> FoundRate:
    search, run = RateSearch(goal), 0
    while (rate := search.next_rate()) is not None:
        run += 1
        scores = server.scores(rate, seconds, 1000 * seed + run, ttft_seconds)
        search.add(rate, scores[int(WARM_UP_SHARE * len(scores)) :])
    return search.result()


@pytest.mark.parametrize("ttft_seconds", [0.7, pytest.param(1.5, marks=pytest.mark.slow), 5.0])
def test_a_known_limit_is_found_and_held(ttft_seconds: float) -> None:
    """At 67, 85 and 95 % of the service rate. Within 5 % and inside the interval, with every seed."""
    server = SingleServer(20.0)
    limit = server.limit(ttft_seconds, 0.99)
    for seed in range(SEEDS):
        result = found(server, SearchGoal(share=0.99, first_rate=1.0), seed, 1200.0, ttft_seconds)
        assert result.estimate is not None and result.low is not None and result.high is not None, result.reason
        assert result.low <= limit <= result.high, (seed, result)
        assert abs(result.estimate / limit - 1) < 0.05, (seed, result.estimate, limit)


@pytest.mark.parametrize("ttft_seconds", [0.7, 1.5, 5.0])
def test_few_runs_give_both_bounds(ttft_seconds: float) -> None:
    """Also where the second rate, 16 requests/s, is so near the limit that it stays undecided."""
    server = SingleServer(20.0)
    limit = server.limit(ttft_seconds, 0.9)
    for seed in range(SEEDS):
        result = found(server, SearchGoal(share=0.9, first_rate=8.0, max_runs=16), seed, 120.0, ttft_seconds)
        assert result.low is not None and result.high is not None, (seed, result)
        assert result.low <= limit <= result.high, (seed, result)


def test_another_share_and_a_start_above_the_limit() -> None:
    server = SingleServer(20.0)
    goal = SearchGoal(share=0.9, first_rate=300.0, tolerance=0.1)
    result = found(server, goal, 1, 600.0, 1.0)
    assert result.settled and result.low is not None and result.high is not None
    assert result.low <= server.limit(1.0, 0.9) <= result.high <= 1.101 * result.low


def ideal(limit: float, rate: float) -> Floats:
    """A server without noise: every request just as late as the rate is above the limit."""
    return np.full(2000, rate / limit)


@given(st.floats(0.05, 5000), st.floats(0.05, 5000))
def test_without_noise_the_interval_is_as_short_as_asked_for(limit: float, first: float) -> None:
    search = RateSearch(SearchGoal(share=0.99, first_rate=first))
    while (rate := search.next_rate()) is not None:
        search.add(rate, ideal(limit, rate))
    result = search.result()
    assert result.settled and result.low is not None and result.high is not None
    assert result.low <= limit <= result.high * (1 + 1e-9)
    assert result.high / result.low <= 1.05 + 1e-6


def test_a_server_without_a_limit_and_one_that_never_passes() -> None:
    for limit, expected in ((1e9, "no rate up to 64"), (1e-9, "no rate down to 0.5")):
        search = RateSearch(SearchGoal(share=0.99, first_rate=4.0, min_rate=0.5, max_rate=64.0))
        while (rate := search.next_rate()) is not None:
            search.add(rate, ideal(limit, rate))
        result = search.result()
        assert result.estimate is None and not result.settled and expected in result.reason


def test_the_budget_ends_the_search_with_the_interval_so_far() -> None:
    search = RateSearch(SearchGoal(share=0.99, first_rate=1.0, max_runs=12))
    while (rate := search.next_rate()) is not None:
        search.add(rate, ideal(10.0, rate))
    result = search.result()
    assert sum(len(probe.runs) for probe in result.probes) == 12
    assert not result.settled and result.reason == "12 runs are spent"
    assert result.low is not None and result.high is not None and result.low <= 10 <= result.high


def test_a_generator_that_cannot_do_more_ends_the_search() -> None:
    search = RateSearch(SearchGoal(share=0.99, first_rate=1.0))
    search.add(1.0, ideal(10.0, 1.0))
    search.stop("the generator was the bottleneck at 2 requests/s")
    assert search.next_rate() is None
    assert search.result().low == 1.0 and "bottleneck" in search.result().reason


def test_too_few_requests_decide_nothing() -> None:
    search = RateSearch(SearchGoal(share=0.99, first_rate=1.0, max_runs_per_rate=4))
    while (rate := search.next_rate()) is not None:
        search.add(rate, np.full(5, 0.1))
    result = search.result()
    assert result.low is None and result.estimate is None
    assert all(probe.passes is None for probe in result.probes)


def test_a_rate_at_which_no_request_was_due_has_no_quantile() -> None:
    """It was `not a number`."""
    search = RateSearch(SearchGoal(share=0.9, first_rate=0.01, max_runs=1))
    search.add(0.01, np.empty(0))
    assert search_table(search.result()).rows == (("0.0100", "1", "0", UNKNOWN, "undecided"),)


def test_a_failed_request_is_no_latency_of_a_million_bounds() -> None:
    """Where the quantile fell on requests that failed, the table said `1,000,000`, or half of it between two."""
    search = RateSearch(SearchGoal(share=0.9, first_rate=1.0, max_runs=3))
    for rate, failed in ((1.0, 0), (2.0, 10), (4.0, 100)):
        search.add(rate, np.array([0.5] * (100 - failed) + [MAX_SCORE] * failed))
    told = [row[3] for row in search_table(search.result()).rows]
    assert told == ["0.500 (0.500 to 0.500)", "failed requests", "failed requests"]


def conversations(turns: int, every: float, ttft: float, duration: float = 60.0, rate: float = 40.0) -> LoadRun:
    """Conversations that begin evenly, `rate / turns` a second, with a turn `every` so many seconds, up to the end."""
    begun = np.arange(int(duration * rate / turns)) * turns / rate
    due = begun[:, None] + np.arange(turns) * every
    number, turn = np.indices(due.shape)
    kept = due < duration
    order = np.argsort(due[kept], kind="stable")
    columns = {"conversation": number[kept][order], "turn": turn[kept][order]}
    run = made_run(due[kept][order], ttft=ttft, duration=duration, contents=Contents(turns=turns), **columns)
    job = run.facts.job.model_copy(update={"arrivals": PoissonArrivals(rate=rate / turns)})
    return replace(run, facts=run.facts.model_copy(update={"job": job}))


@pytest.mark.parametrize(
    ("turns", "every", "ttft", "counts"),
    [
        (10, 1.0, 0.1, True),
        (10, 6.0, 0.1, False),  # 54 s of 60: a third of the turns is due
        (10, 6.0, 2.0, True),  # fewer requests are too many already
        (1, 0.0, 0.1, True),
        (3, 6.0, 0.1, True),
    ],
)
def test_a_rate_that_conversations_never_reached_does_not_pass(
    turns: int, every: float, ttft: float, counts: bool
) -> None:
    """A search took a rate for that of runs in which a part of it was due, since later turns lay beyond their ends."""
    search, run = RateSearch(SearchGoal(share=0.9, first_rate=40.0)), conversations(turns, every, ttft)
    probe = taken(search, run, 40.0, RequestObjectives(ttft_seconds=1, share=0.9))
    assert (probe is not None) is counts and (search.next_rate() is not None) is counts
    if probe is None:
        assert "conversations of 10 turns are too long for the run: " in search.result().reason
        assert search.result().low is None and any(
            "too long" in note for note in judged(run, serving_metrics(run)).notes
        )
    else:
        assert probe.passes is (ttft < 1)
