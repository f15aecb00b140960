"""The decision of a load experiment in words: plain text, for the opening of a report and a terminal."""

from collections.abc import Iterable
from statistics import median

from configs.plans.plan import PlannedExperiment
from reports.experiments.load.choice import MeasuredServer, ServerChoice
from reports.experiments.load.experiment import LoadExperiment, LoadPoint
from reports.numbers.statistics import Ratio
from reports.text import estimate_text, joined, number, pairs_text, percent, plural

_UNNAMED = ("", "max_rate")
"""Labels of points that no field tells apart."""


def server_lead(found: LoadExperiment, choice: ServerChoice) -> str:
    """`Serve llama-200m with tp 1`, `llama-200m serves`, without a stop."""
    model = found.experiment.model or "the model"
    if choice.choice is None:
        where = "" if choice.chosen.label in _UNNAMED else f" with {choice.chosen.label}"
        return f"{model}{where} serves"
    return f"Serve {model} with {choice.chosen.label}"


def server_body(found: LoadExperiment, choice: ServerChoice) -> str:
    """What it carries, at which load and latency and for how much, against the others; without a stop."""
    chosen = choice.chosen
    unit = "tokens/s" if choice.figure == "tokens" else "requests/s"
    value = limit_text(chosen.point) if choice.figure == "limit" else estimate_text(chosen.value, unit)
    searched = choice.figure == "limit"  # its latencies and tokens are those of the highest rate that passed
    parts = [f"{value}{_load(found, choice)}{'' if searched else _latencies(chosen.point)}"]
    cost = chosen.point.usd_per_million_tokens
    if cost is not None:
        parts.append(f"{'at most ' if searched else ''}${number(cost.median)} per million tokens")
    other = choice.next_best
    if other is not None and choice.ratio is not None:
        parts.append(_against(choice, other, choice.ratio))
    text = ", ".join(parts)
    if choice.others_win:
        loads = (f"{load_text(found.axis, at)} ({label})" for at, label in sorted(choice.others_win.items()))
        text += f"; another carries more at {joined(loads)}"
    if choice.left_out:
        text += f" (left out: {'; '.join(f'{label}: {why}' for label, why in choice.left_out.items())})"
    return text


def _load(found: LoadExperiment, choice: ServerChoice) -> str:
    """` at 32 users`, ` meet TTFT up to 1.00 s, 100 % of all, at 8.00 requests/s asked`."""
    at = choice.chosen.at
    if choice.figure == "tokens":
        if at is None:
            work = choice.chosen.point.work
            given = {"users": work.users, "rate": work.rate}
            return next((f" at {load_text(axis, value)}" for axis, value in given.items() if value), "")
        return f" at {load_text(found.axis, at)}"
    objectives = choice.chosen.point.work.objectives
    assert objectives is not None
    within = bounds_text(objectives.bounds)
    if choice.figure == "limit":
        return f" within {within} for {percent(objectives.share)} of the requests"
    load = "" if at is None else f", at {load_text(found.axis, at)}" + (" asked" if found.axis == "rate" else "")
    share = choice.chosen.point.value("goodput_share")
    return f" meet {within}" + ("" if share is None else f", {percent(share.median)} of all") + load


def limit_text(point: LoadPoint) -> str:
    """`12.8 requests/s (8.00 to 16.0, 2 searches)`: the median, and from the lowest bound of all to the highest."""
    searches = [one.search for one in point.valid if one.search is not None and one.search.estimate is not None]
    rates = [one.estimate for one in searches if one.estimate is not None]
    bounds = [bound for one in searches for bound in (one.low, one.high) if bound is not None]
    runs = plural(len(searches), "search")
    return f"{number(median(rates))} requests/s ({number(min(bounds))} to {number(max(bounds))}, {runs})"


def next_server_lines(
    choices: Iterable[tuple[PlannedExperiment, LoadExperiment, ServerChoice | None]],
) -> list[str]:
    """What more repeats would settle of the choices that are open."""
    lines = []
    for experiment, _, choice in choices:
        needed = None if choice is None else choice.repeats_needed
        if choice is None or needed is None or choice.next_best is None or choice.ratio is None:
            continue
        why = "for an interval" if choice.ratio.interval is None else "for half the interval"
        lines.append(
            f"Whether {choice.chosen.label} is surely ahead of {choice.next_best.label} in {experiment.name}: "
            f"{plural(needed, 'repeat')} instead of {choice.ratio.count} {why} (--set measuring.repeats={needed})."
        )
    return lines


def load_text(axis: str | None, at: float) -> str:
    """`32 users`, `2.50 requests/s`."""
    return plural(int(at), "user") if axis == "users" else f"{number(at)} requests/s"


def bounds_text(bounds: dict[str, float]) -> str:
    """`TTFT up to 1.00 s and TPOT up to 0.100 s`."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end-to-end latency"}
    return " and ".join(f"{names[name]} up to {number(bound)} s" for name, bound in bounds.items())


def _latencies(point: LoadPoint) -> str:
    """`, TTFT P99 412 ms and TPOT P99 31.0 ms`."""
    found = {name: point.value(f"{name.lower()}_p99") for name in ("TTFT", "TPOT")}
    told = [f"{name} P99 {number(value.median * 1000)} ms" for name, value in found.items() if value is not None]
    return f", {joined(told)}" if told else ""


def _against(choice: ServerChoice, other: MeasuredServer, ratio: Ratio) -> str:
    """Against the next best: of one size how many times as much, of a larger one also for what it costs."""
    assert choice.choice is not None
    if choice.by_latency:
        return f"answering {pairs_text(ratio)} as fast as {other.label}"
    more, per_size = choice.choice.more, choice.choice.per_size
    if choice.choice.larger is None or choice.servers[choice.choice.larger] is not other or more is None:
        low, high = ratio.bounds
        apart = low > 1 or high < 1
        return (
            f"{pairs_text(ratio)} what {other.label} does"
            if apart
            else f"not told apart from {other.label} ({pairs_text(ratio)})"
        )
    mine, its = (one.point.usd_per_hour for one in (choice.chosen, other))
    ranks = [one.point.result.cell.layout.ranks for one in (choice.chosen, other)]
    priced = all(one.point.usd_per_hour for one in choice.servers)
    size = (
        f"for {number(its / mine)} times the price"
        if priced and its and mine
        else f"on {plural(ranks[1], 'rank')} instead of {ranks[0]:,}"
    )
    per = "" if per_size is None else f", {percent(per_size.value)} as much per {'dollar' if priced else 'rank'}"
    return f"{other.label} carries {pairs_text(more)} as much {size}{per}"
