"""Load runs as text: one table of latencies, one of rates, and the verdict; a search as one row per rate."""

from math import isnan

from reports.load.metrics import MAX_SCORE, LatencyFigures, LoadFigures, LoadPercentile
from reports.load.search import FoundRate, ProbedRate
from reports.load.verdict import LoadVerdict, Verdict
from reports.text import UNKNOWN, Table, number, percent, plural

LATENCY_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT without the first token",
    "tpot_with_first": "TPOT with the first token",
    "itl": "ITL",
    "e2e": "end to end",
}
MARK = "†"
_FAILED = "failed requests"


def served_latency_table(figures: LoadFigures) -> Table:
    """A row for each latency, in milliseconds, with 95 % intervals by sections."""
    rows = [_latency_row(LATENCY_NAMES[name], figures.latencies.get(name)) for name in LATENCY_NAMES]
    return Table(("ms", "samples", "mean", "P50", "P90", "P99"), tuple(rows))


def _latency_row(name: str, latency: LatencyFigures | None) -> tuple[str, ...]:
    if latency is None:
        return (name, *[UNKNOWN] * 5)
    cells = (percentile_cell(each) for each in (latency.p50, latency.p90, latency.p99))
    return (name, f"{latency.samples:,}", number(latency.mean * 1000), *cells)


def percentile_cell(value: LoadPercentile) -> str:
    """`41.2 (40.8 to 42.0)` in milliseconds; with a mark where its samples are too few."""
    text = number(value.value * 1000) + (MARK if value.marked else "")
    if value.interval is None:
        return text
    low, high = (number(bound * 1000) for bound in value.interval)
    return f"{text} ({low} to {high})"


def rate_table(figures: LoadFigures) -> Table:
    """Rates of the steady part."""
    rows = [
        ("requests due", f"{figures.due:,}", _rate(figures.offered_rate, "requests/s")),
        ("completed", f"{figures.completed:,}", _rate(figures.achieved_rate, "requests/s")),
    ]
    if figures.requested_rate is not None:
        rows.insert(0, ("requested", "", _rate(figures.requested_rate, "requests/s")))
    if figures.goodput is not None:
        good = figures.goodput
        rows.append(("goodput", percent(good.share), _rate(good.requests_per_second, "requests/s")))
    rows.append(("tokens out", "", _rate(figures.tokens_per_second, "tokens/s")))
    if figures.prompt_tokens_per_second is not None:
        rows.append(("tokens in", "", _rate(figures.prompt_tokens_per_second, "tokens/s")))
    for name, late in (("sent late, P99", figures.late_p99_seconds), ("timer late, P99", figures.lag_p99_seconds)):
        rows.append((name, "", UNKNOWN if late is None else f"{number(late * 1000)} ms"))
    return Table(("", "", ""), tuple(rows))


def _rate(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{number(value)} {unit}"


def verdict_lines(figures: LoadFigures, judgement: LoadVerdict) -> list[str]:
    """The verdict, then what a reader must know."""
    text = f"verdict: {judgement.verdict}"
    if judgement.reason:
        text += f" ({judgement.reason})"
    if judgement.verdict is Verdict.CLIENT_BOUND:
        text += ". These figures are no result: use a faster or less busy machine for the generator"
    notes = list(judgement.notes)
    if any(each.marked for latency in figures.latencies.values() for each in (latency.p50, latency.p90, latency.p99)):
        notes.append(f"{MARK} fewer than 10 samples beyond the percentile")
    return [text, *(f"note: {note}" for note in notes)]


def search_table(found: FoundRate) -> Table:
    """A row for each rate that was measured."""
    return Table(
        ("requests/s", "runs", "requests", "quantile over bound (interval)", "decision"),
        tuple(_probe_row(probe) for probe in found.probes),
        text_columns=0,
    )


def _probe_row(probe: ProbedRate) -> tuple[str, ...]:
    quantile = UNKNOWN if isnan(probe.quantile) else _score(probe, probe.quantile)
    if probe.interval is not None and quantile != _FAILED:
        low, high = (_score(probe, bound) for bound in probe.interval)
        quantile += f" ({low} to {high})"
    decision = {True: "passes", False: "fails", None: "undecided"}[probe.passes]
    return (number(probe.rate), str(len(probe.runs)), f"{probe.requests:,}", quantile, decision)


def _score(probe: ProbedRate, value: float) -> str:
    """A score; in words where it is that of a failed request, MAX_SCORE, or lies between it and the answered ones."""
    largest, failed = 0.0, False
    for scores in probe.runs:
        answered = scores[scores < MAX_SCORE]
        largest, failed = max(largest, float(answered.max(initial=0.0))), failed or len(answered) < len(scores)
    return _FAILED if failed and value > largest else number(value)


def search_sentence(found: FoundRate, objectives: str) -> str:
    """The answer in a sentence."""
    runs = plural(sum(len(probe.runs) for probe in found.probes), "run")
    if found.estimate is not None:
        low, high = number(found.low), number(found.high)
        answer = f"{number(found.estimate)} requests/s ({low} to {high}, 95 % interval, {runs})"
    elif found.low is not None:
        answer = f"at least {number(found.low)} requests/s ({runs})"
    elif found.high is not None:
        answer = f"below {number(found.high)} requests/s ({runs})"
    else:
        answer = f"unknown ({runs})"
    return f"Highest rate with {objectives}: {answer}. The search ended because {found.reason}."
