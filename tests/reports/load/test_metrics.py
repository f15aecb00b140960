from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.simulated import SingleServer
from configs.load.arrivals import ClosedLoop
from configs.load.objectives import RequestObjectives
from configs.load.samples import FinishCode, RequestOutcome
from reports.load.json_form import run_json
from reports.load.metrics import MAX_SCORE, SECTIONS, latency_of, scores, scores_after_warm_up, serving_metrics
from reports.load.text import rate_table
from reports.load.verdict import judged
from reports.text import UNKNOWN
from tests.support.run_folders.load_runs import made_run

SECONDS = st.floats(1e-4, 10)


def evenly(count: int, rate: float = 10.0) -> np.ndarray:
    return np.arange(count) / rate


def test_figures_of_a_run_whose_moments_are_known() -> None:
    run = made_run(evenly(200), ttft=0.3, gap=0.01, tokens=11, duration=20.0)
    found = serving_metrics(run, RequestObjectives(ttft_seconds=0.31, tpot_seconds=0.011))
    assert found.latencies["ttft"].p99.value == pytest.approx(0.3)
    assert found.latencies["tpot"].p50.value == pytest.approx(0.01)
    assert found.latencies["tpot_with_first"].p50.value == pytest.approx(0.4 / 11)
    assert found.latencies["itl"].samples == 200 * 10
    assert found.latencies["itl"].mean == pytest.approx(0.01)
    assert found.latencies["e2e"].p90.value == pytest.approx(0.4)
    assert found.due == found.completed == 200
    assert found.offered_rate == pytest.approx(10.0)
    assert found.goodput is not None and found.goodput.share == 1
    assert (found.lengths_held, found.counts_agree, found.chunks_above_usage) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("columns", "tokens", "gap"),
    [({}, 11, 0.0), ({"chunks": 1.0}, 1, 0.0), ({"new_tokens": np.nan}, 1, 0.0), ({}, 11, 1e-5)],
)
def test_time_per_token_of_answers_that_come_at_one_moment_is_unknown(
    columns: dict[str, Any], tokens: int, gap: float
) -> None:
    """As behind a proxy that buffers: eleven tokens in one chunk, or in eleven that are read one after another."""
    known: dict[str, Any] = {"new_tokens": 11.0, "asked_new_tokens": 11.0} | columns
    run = made_run(evenly(200), ttft=1.1, gap=gap, tokens=tokens, duration=20.0, **known)
    found = serving_metrics(run, RequestObjectives(tpot_seconds=0.09))
    assert "tpot" not in found.latencies and "itl" not in found.latencies
    assert found.goodput is not None and found.goodput.share == 0  # 0 s a token met any objective
    assert scores(run, RequestObjectives(tpot_seconds=0.2)) == pytest.approx(
        np.full(200, 0.5), rel=1e-3
    )  # 1.1 s over 11
    (note,) = (note for note in judged(run, found).notes if "one moment" in note)
    assert note.startswith("100 % of the answers came at one moment: their TPOT and ITL are unknown")
    assert run_json(found, judged(run, found), None)["checks"]["answers_at_one_moment_share"] == 1


@pytest.mark.parametrize(("ttft", "gap"), [(1e-4, 1e-5), (30.0, 1e-3), (30.0, 1e-4)])
def test_fast_answers_have_a_time_per_token(ttft: float, gap: float) -> None:
    """Of a stand-in without a model, and a few tokens after a prompt that took half a minute."""
    found = serving_metrics(made_run(evenly(50), ttft=ttft, gap=gap, tokens=11))
    assert found.at_once == 0 and found.latencies["tpot"].p50.value == pytest.approx(gap)


def test_answers_of_one_token_have_no_time_per_token_to_judge() -> None:
    run = made_run(evenly(200), ttft=1.1, tokens=1, duration=20.0)
    found = serving_metrics(run, RequestObjectives(tpot_seconds=0.001))
    assert found.goodput is not None and found.goodput.share == 1 and found.at_once == 0


def test_the_goodput_of_users_is_that_of_the_answers_that_ended() -> None:
    """Four users ask at once, then as their answers of 1 s end: 44 requests in 10 s were 4.4 good ones/s of 4."""
    first = np.array([0.25, 0.5, 0.75, 1.0])
    due = np.concatenate([np.zeros(4), *(first + number for number in range(10))])
    seconds = np.concatenate([first, np.ones(40)])
    run = made_run(due, ttft=seconds, tokens=1, duration=10.0)
    job = run.facts.job.model_copy(update={"arrivals": ClosedLoop(users=4)})
    found = serving_metrics(
        replace(run, facts=run.facts.model_copy(update={"job": job})), RequestObjectives(ttft_seconds=1.01)
    )
    assert found.goodput is not None and found.goodput.share == 1
    assert found.goodput.requests_per_second == found.achieved_rate == pytest.approx(4)
    assert found.prompt_tokens_per_second == pytest.approx(4 * 5)
    assert found.offered_rate == pytest.approx(4.4)


def test_waiting_in_the_generator_counts() -> None:
    """A request that was due at 0 and answered 0.1 s after it was sent, 2 s late, took 2.1 s."""
    run = made_run([0.0], ttft=2.1, late=2.0, duration=5.0)
    assert serving_metrics(run).latencies["ttft"].mean == pytest.approx(2.1)
    assert serving_metrics(run).late_p99_seconds == pytest.approx(2.0)


def test_failed_requests_have_no_latency_and_miss_the_objectives() -> None:
    outcome = np.where(np.arange(100) % 4 == 0, RequestOutcome.REFUSED, RequestOutcome.COMPLETED)
    run = made_run(evenly(100), ttft=0.1, outcome=outcome, duration=10.0)
    found = serving_metrics(run, RequestObjectives(ttft_seconds=1))
    assert found.latencies["ttft"].samples == found.completed == 75
    assert found.outcomes == {"completed": 75, "refused": 25}
    assert found.goodput is not None and found.goodput.share == 0.75
    assert found.goodput.requests_per_second == pytest.approx(7.5)
    assert found.latencies["itl"].samples == 75 * 10


def test_a_queue_that_grows_is_no_steady_state_and_an_even_one_is() -> None:
    due = evenly(400)
    growing = serving_metrics(made_run(due, ttft=0.1 + due * 0.1))
    assert growing.window.found is False and growing.due == 400
    assert serving_metrics(made_run(due, ttft=0.1 + 0.01 * np.sin(due * 7))).window.found is True


def test_a_slow_start_is_cut() -> None:
    rng = np.random.default_rng(0)
    ttft = 0.1 * (1 + 0.05 * rng.standard_normal(600))
    ttft[:60] += 2.0
    found = serving_metrics(made_run(evenly(600), ttft=ttft))
    assert found.window.found is True and 5.5 <= found.window.begin <= 9
    assert found.latencies["ttft"].p99.value < 0.2
    assert found.offered_rate == pytest.approx(10, rel=0.02)


def test_few_requests_cannot_tell_and_have_no_interval() -> None:
    found = serving_metrics(made_run(evenly(30), ttft=0.1))
    assert found.window.found is None
    assert found.latencies["ttft"].p99.interval is None and found.latencies["ttft"].p99.marked


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=40), st.floats(1e-3, 10), st.floats(1e-3, 10))
def test_a_score_up_to_one_is_a_request_that_meets_its_objectives(
    requests: list[tuple[float, float]], ttft_bound: float, tpot_bound: float
) -> None:
    ttft, gap = np.array(requests).T
    run = made_run(evenly(len(requests)), ttft=ttft, gap=gap, tokens=3, duration=9.0)
    objectives = RequestObjectives(ttft_seconds=ttft_bound, tpot_seconds=tpot_bound)
    met = (run.ttft_seconds <= ttft_bound) & (run.tpot_seconds <= tpot_bound)
    assert ((scores(run, objectives) <= 1) == met).all()


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    run = made_run(evenly(10), ttft=0.5, tokens=1)
    assert np.isnan(run.tpot_seconds).all() and "tpot" not in serving_metrics(run).latencies
    assert scores(run, RequestObjectives(ttft_seconds=1, tpot_seconds=1e-9)) == pytest.approx(0.5)


def test_failures_have_the_largest_score() -> None:
    run = made_run(evenly(10), ttft=0.5, outcome=RequestOutcome.TIMEOUT)
    assert (scores(run, RequestObjectives(e2e_seconds=99)) == MAX_SCORE).all()


def test_the_warm_up_of_a_search_is_a_fifth_whatever_the_samples() -> None:
    run = made_run(evenly(100), ttft=0.5, duration=10.0)
    assert len(scores_after_warm_up(run, RequestObjectives(ttft_seconds=1))) == 80


def test_wrong_usage_is_counted() -> None:
    usage = np.where(np.arange(50) < 10, 5.0, 11.0)
    found = serving_metrics(made_run(evenly(50), ttft=0.1, new_tokens=usage))
    assert found.chunks_above_usage == 10 and found.counts_agree == 0.8 and found.lengths_held == 0.8
    assert serving_metrics(made_run(evenly(50), ttft=0.1, new_tokens=np.nan)).counts_agree is None


@pytest.mark.parametrize("usage", [0.0, 1.0])
def test_a_usage_below_the_chunks_hides_no_time_per_token(usage: float) -> None:
    """Of 0 or 1 token, as proxies write it, an answer had no TPOT: it met every objective of one."""
    run = made_run(evenly(200), ttft=0.3, gap=0.01, tokens=11, duration=20.0, new_tokens=usage)
    found = serving_metrics(run, RequestObjectives(tpot_seconds=0.009))
    assert found.latencies["tpot"].p50.value == pytest.approx(0.01)
    assert found.goodput is not None and found.goodput.share == 0
    assert found.tokens_per_second == pytest.approx(110, rel=0.03)
    assert found.chunks_above_usage == 200 and found.lengths_held == 0


@pytest.mark.parametrize(("finish", "held"), [(FinishCode.LENGTH, 1.0), (FinishCode.STOP, 0.0)])
def test_chunks_of_several_tokens_are_no_length(finish: FinishCode, held: float) -> None:
    """Without usage, answers that ended at their limit were called too short, and their engine left out."""
    run = made_run(evenly(50), ttft=0.1, tokens=3, new_tokens=np.nan, asked_new_tokens=12.0, finish=finish)
    assert serving_metrics(run).lengths_held == held


@pytest.mark.parametrize(("share", "least"), [(0.5, 0.91), (0.9, 0.91), (0.99, 0.87)])
def test_intervals_by_sections_hold_the_percentile_of_a_queue(share: float, least: float) -> None:
    """Time in system of an M/M/1 queue, whose neighbouring requests are far from independent."""
    server, arrival = SingleServer(10.0), 6.0
    truth = np.log(1 / (1 - share)) / (server.rate - arrival)
    held = 0
    for seed in range(200):
        values = server.scores(arrival, 1700.0, seed, ttft_seconds=1.0)[200:]
        found = latency_of(values, np.arange(len(values)) * SECTIONS // len(values))
        assert found is not None
        percentile = {0.5: found.p50, 0.9: found.p90, 0.99: found.p99}[share]
        assert percentile.interval is not None
        held += percentile.interval[0] <= truth <= percentile.interval[1]
    assert held >= least * 200


def test_rates_of_requests_that_were_due_at_once_are_unknown() -> None:
    """Users with one request each: there is no time over which to count."""
    run = made_run(np.zeros(4), ttft=0.1, duration=0.5)
    run = replace(run, facts=run.facts.model_copy(update={"issuing_seconds": 0.0}))
    found = serving_metrics(run, RequestObjectives(ttft_seconds=1.0))
    assert (found.offered_rate, found.achieved_rate, found.tokens_per_second) == (None, None, None)
    assert found.goodput is not None and found.goodput.share == 1 and found.goodput.requests_per_second is None
    shown = {row[0]: row[2] for row in rate_table(found).rows}
    assert shown["completed"] == shown["tokens out"] == UNKNOWN
    assert run_json(found, judged(run, found), None)["rates"]["achieved_per_second"] is None


def test_a_run_shorter_than_its_answers_says_nothing_of_tokens() -> None:
    """It said 0 tokens/s beside answers that were complete, and a study chose by it."""
    found = serving_metrics(made_run([0.0, 0.1, 0.2], ttft=5.0))
    assert found.completed == 3 and (found.achieved_rate, found.tokens_per_second) == (None, None)
    refused = made_run([0.0, 0.1, 0.2], ttft=5.0, tokens=0, outcome=RequestOutcome.REFUSED, last_seconds=np.nan)
    assert serving_metrics(refused).tokens_per_second == 0
