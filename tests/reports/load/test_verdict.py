from dataclasses import replace

import numpy as np
import pytest

from configs.load.job import Contents
from configs.load.samples import RequestOutcome
from reports.load.metrics import serving_metrics
from reports.load.samples import LoadRun
from reports.load.text import rate_table, served_latency_table, verdict_lines
from reports.load.verdict import LoadVerdict, Verdict, judged
from tests.support.run_folders.load_runs import made_run

DUE = np.arange(400) / 10


def judgement(run: LoadRun) -> LoadVerdict:
    return judged(run, serving_metrics(run))


def test_a_clean_run_is_valid_without_notes() -> None:
    found = judgement(made_run(DUE, ttft=0.2))
    assert found.verdict is Verdict.VALID and found.is_result and not found.notes


@pytest.mark.parametrize(
    ("late", "lag", "verdict"),
    [
        (0.019, 0.0, Verdict.VALID),  # under a tenth of the median TTFT
        (0.021, 0.0, Verdict.CLIENT_BOUND),
        (0.0, 0.021, Verdict.CLIENT_BOUND),
    ],
)
def test_a_late_generator_voids_the_figures(late: float, lag: float, verdict: Verdict) -> None:
    found = judgement(made_run(DUE, ttft=0.2, late=late, lag=np.full(100, lag)))
    assert found.verdict is verdict and found.is_result is (verdict is Verdict.VALID)


def test_lateness_of_a_few_requests_is_no_bottleneck() -> None:
    late = np.where(np.arange(400) < 3, 0.5, 0.0)
    assert judgement(made_run(DUE, ttft=0.6, late=late)).verdict is Verdict.VALID


def test_requests_that_were_not_sent_are_the_generators_fault() -> None:
    outcome = np.where(np.arange(400) < 2, RequestOutcome.DROPPED, RequestOutcome.COMPLETED)
    found = judgement(made_run(DUE, ttft=0.2, outcome=outcome))
    assert found.verdict is Verdict.CLIENT_BOUND and found.reason == "2 requests not sent: 4,096 requests in flight"
    run = made_run(DUE, ttft=0.2, outcome=outcome)
    short = run.facts.model_copy(update={"errors": {"not sent: Too many open files": 2}})
    assert judgement(replace(run, facts=short)).reason == "2 requests not sent: Too many open files"


def test_no_answer_at_all_is_no_result() -> None:
    found = judgement(made_run(DUE, ttft=0.2, outcome=RequestOutcome.REFUSED))
    assert found.verdict is Verdict.NO_ANSWERS and not found.is_result and found.reason == "HTTP 503: busy"
    run = made_run(DUE, ttft=0.2, outcome=RequestOutcome.REFUSED)
    record = replace(run, facts=run.facts.model_copy(update={"errors": {}}))  # records keep no messages
    assert judgement(record).reason == "none of 400 requests completed"
    late = judgement(made_run(DUE, ttft=0.2, outcome=RequestOutcome.REFUSED, late=0.5))
    assert late.verdict is Verdict.NO_ANSWERS  # what the server said tells more than how late it was asked


def test_a_growing_queue_is_not_steady() -> None:
    found = judgement(made_run(DUE, ttft=0.1 + DUE / 10))
    assert found.verdict is Verdict.NOT_STEADY and found.reason.startswith("TTFT: ")


def test_notes_name_what_limits_the_figures() -> None:
    short = np.where(np.arange(400) % 10 == 3, 7.0, 11.0)
    run = made_run(DUE, ttft=0.2, new_tokens=short, contents=Contents(new_tokens=11, exact=True))
    notes = " ".join(judgement(run).notes)
    assert "10.0 % of the answers do not have the length asked for" in notes
    assert "40 answers had more chunks than the server counted tokens" in notes
    assert "no usage" in " ".join(judgement(made_run(DUE, ttft=0.2, new_tokens=np.nan)).notes)
    few = judgement(made_run(DUE, ttft=0.2, new_tokens=22.0)).notes
    assert few == ("100 % of the answers have fewer chunks than tokens: ITL is the time between chunks",)


def test_a_rate_that_is_unknown_is_explained() -> None:
    """Of a server slower than the run is long, the report had a dash beside the verdict `valid`."""
    run = made_run(DUE[:20], ttft=0.2, gap=1.0, duration=2.0)
    assert serving_metrics(run).achieved_rate is None and serving_metrics(run).tokens_per_second is not None
    (note,) = (note for note in judgement(run).notes if "ended within" in note)
    assert note.startswith("no answer ended within the 2.00 s that are counted: the achieved rate is unknown;")
    late = judgement(made_run(DUE[:20], ttft=5.0, duration=2.0)).notes
    assert any("the achieved rate and that of tokens are unknown" in note for note in late)


def test_both_definitions_of_tpot_are_printed() -> None:
    run = made_run(DUE, ttft=0.2)
    figures = serving_metrics(run)
    rows = {row[0]: row for row in served_latency_table(figures).rows}
    assert rows["TPOT without the first token"][3] != rows["TPOT with the first token"][3]
    assert any(row[0] == "requested" for row in rate_table(figures).rows)
    assert verdict_lines(figures, judged(run, figures))[0].startswith("verdict: valid")


def test_failed_requests_are_counted_as_their_messages_are() -> None:
    """Those of the start that is cut were told by message alone: `3 requests of 335 failed: HTTP 503: busy (23)`."""
    rng = np.random.default_rng(0)
    slow_start = np.where(np.arange(400) < 60, 1.5, 0.2) + rng.random(400) / 100
    refused = (np.arange(400) < 20) | (np.abs(np.arange(400) - 201) < 2)
    outcome = np.where(refused, RequestOutcome.REFUSED, RequestOutcome.COMPLETED)
    run = made_run(DUE, ttft=slow_start, outcome=outcome)
    assert serving_metrics(run).window.begin > 0
    assert judgement(run).notes == ("23 of all 400 requests failed (5.75 %): HTTP 503: busy (23)",)
    untold = replace(run, facts=run.facts.model_copy(update={"errors": {}}))
    assert judgement(untold).notes == ("23 of all 400 requests failed (5.75 %)",)


def test_what_is_too_little_to_tell_is_the_answers() -> None:
    outcome = np.where(np.arange(400) < 395, RequestOutcome.REFUSED, RequestOutcome.COMPLETED)
    notes = judgement(made_run(DUE, ttft=0.2, outcome=outcome)).notes
    assert "steady state unknown: 5 answers to 400 requests are too few to tell" in notes
    assert judgement(made_run(DUE[:1], 0.2, duration=1)).notes == (
        "steady state unknown: 1 request is too few to tell",
    )
    assert judgement(made_run(DUE[:7], ttft=0.2)).notes == ("steady state unknown: 7 requests are too few to tell",)


@pytest.mark.parametrize(
    ("ttft", "reason"),
    [
        (np.where(np.arange(400) < 300, 0.2, 0.4), "TTFT: the level changes by +100.0 % at about request 301"),
        (np.where(np.arange(400) < 100, 5.0, 0.1 + DUE / 100), "after request 200"),
    ],
)
def test_where_a_run_is_not_steady_is_told_in_requests(ttft: np.ndarray, reason: str) -> None:
    """A pass of the series is a mean of several."""
    assert reason in judgement(made_run(DUE, ttft=ttft)).reason
