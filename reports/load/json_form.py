"""Load runs and searches as JSON: figures in seconds, requests/s and tokens/s; null is unknown."""

from typing import Any

from configs.load.objectives import RequestObjectives
from reports.load.metrics import LatencyFigures, LoadFigures, LoadPercentile
from reports.load.search import FoundRate
from reports.load.verdict import LoadVerdict

SCHEMA = 1


def run_json(figures: LoadFigures, judgement: LoadVerdict, objectives: RequestObjectives | None) -> dict[str, Any]:
    """One run."""
    window = figures.window
    return {
        "schema": SCHEMA,
        "verdict": str(judgement.verdict),
        "reason": judgement.reason,
        "is_result": judgement.is_result,
        "notes": list(judgement.notes),
        "objectives": None if objectives is None else objectives.model_dump(),
        "window": {"begin_seconds": window.begin, "end_seconds": window.end, "steady": window.found},
        "requests": {"due": figures.due, "completed": figures.completed, "outcomes": dict(figures.outcomes)},
        "rates": {
            "requested_per_second": figures.requested_rate,
            "offered_per_second": figures.offered_rate,
            "achieved_per_second": figures.achieved_rate,
            "tokens_per_second": figures.tokens_per_second,
            "prompt_tokens_per_second": figures.prompt_tokens_per_second,
            "goodput_per_second": figures.goodput and figures.goodput.requests_per_second,
            "goodput_share": figures.goodput and figures.goodput.share,
        },
        "latencies": {name: _latency(latency) for name, latency in figures.latencies.items()},
        "checks": {
            "lengths_held_share": figures.lengths_held,
            "counts_agree_share": figures.counts_agree,
            "answers_with_more_chunks_than_tokens": figures.chunks_above_usage,
            "answers_at_one_moment_share": figures.at_once,
            "late_p99_seconds": figures.late_p99_seconds,
            "lag_p99_seconds": figures.lag_p99_seconds,
        },
    }


def _latency(latency: LatencyFigures) -> dict[str, Any]:
    shares = {"p50": latency.p50, "p90": latency.p90, "p99": latency.p99}
    return {
        "samples": latency.samples,
        "mean_seconds": latency.mean,
        **{name: _percentile(found) for name, found in shares.items()},
    }


def _percentile(found: LoadPercentile) -> dict[str, Any]:
    interval = None if found.interval is None else list(found.interval)
    return {"seconds": found.value, "interval_seconds": interval, "few_samples": found.marked}


def search_json(found: FoundRate, objectives: RequestObjectives) -> dict[str, Any]:
    """A search for the highest rate."""
    return {
        "schema": SCHEMA,
        "objectives": objectives.model_dump(),
        "requests_per_second": found.estimate,
        "interval": [found.low, found.high],
        "settled": found.settled,
        "reason": found.reason,
        "rates": [
            {
                "requests_per_second": probe.rate,
                "runs": len(probe.runs),
                "requests": probe.requests,
                "quantile_over_bound": None if probe.quantile != probe.quantile else probe.quantile,
                "interval": None if probe.interval is None else list(probe.interval),
                "passes": probe.passes,
            }
            for probe in found.probes
        ],
    }
