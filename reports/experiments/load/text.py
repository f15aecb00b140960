"""Load experiments in words and tables: the answer, the points, their latencies, the search, the servers."""

import re
from collections.abc import Iterator

from reports.experiments.load.choice import choose_server
from reports.experiments.load.choice_text import bounds_text, limit_text, load_text, server_body, server_lead
from reports.experiments.load.experiment import Knee, LoadExperiment, LoadPoint
from reports.load.text import search_table
from reports.numbers.statistics import Estimate, ties
from reports.text import UNKNOWN, Table, escaped, estimate_cell, first_of, joined, not_apart, number, percent

_MOST_NOTES, _MOST_REASONS, _MOST_NAMED = 6, 3, 8
_VARYING = re.compile(r"(steady state unknown: |)([\d.,e-]+)(?= % of | requests are )")
_NUMBERS = re.compile(r"\d[\d.,e-]*")


def load_table(found: LoadExperiment) -> Table:
    """A row for each point: verdict, rates, goodput, queue, answers, cost."""
    columns = (
        "point",
        "verdict",
        "asked, requests/s",
        "achieved, requests/s",
        "tokens/s",
        "goodput",
        "queue",
        "answers",
        "USD/M tokens",
    )
    return Table(columns, tuple(_row(point) for point in found.points), text_columns=2).without_empty_columns()


def _row(point: LoadPoint) -> tuple[str, ...]:
    share = point.value("goodput_share")
    good = UNKNOWN if share is None else f"{_cell(point.value('goodput'))} ({percent(share.median)})"
    return (
        escaped(point.label),
        _verdict(point),
        _cell(point.value("asked")),
        _cell(point.value("achieved")),
        _cell(point.value("tokens")),
        good,
        _cell(point.value("waiting")),
        _answers(point),
        _cell(point.usd_per_million_tokens),
    )


def _cell(value: Estimate | None) -> str:
    return UNKNOWN if value is None else estimate_cell(value)


def _verdict(point: LoadPoint) -> str:
    """How the repeats ended, the worst word first."""
    words = [str(one.judgement.verdict) for one in point.repeats.values()]
    if not words:
        return point.result.status.replace("_", " ")
    counted = {word: words.count(word) for word in dict.fromkeys(sorted(words))}
    if len(counted) == 1:
        return words[0]
    return ", ".join(f"{word} ({count})" for word, count in counted.items())


def _answers(point: LoadPoint) -> str:
    found = point.answers
    if found is None:
        return UNKNOWN
    if found.different:
        return f"{found.different} of {found.compared} differ"
    ties = f", {found.ties} at ties" if found.ties else ""
    untold = f", {found.untold} differ, why is not told" if found.untold else ""
    return f"{found.equal} of {found.compared} equal{ties}{untold}"


def latencies_table(found: LoadExperiment) -> Table:
    """A row for each point, in milliseconds."""
    columns = (
        "ms",
        "TTFT P50",
        "TTFT P99",
        "TPOT P50 (with the first token)",
        "TPOT P99 (with the first token)",
        "ITL P50",
        "ITL P99",
        "end to end P50",
        "end to end P99",
    )
    return Table(columns, tuple(_latency_row(point) for point in found.points))


def _latency_row(point: LoadPoint) -> tuple[str, ...]:
    cells = [escaped(point.label)]
    for kind in ("ttft", "tpot", "itl", "e2e"):
        for which in ("p50", "p99"):
            text = _ms(point.value(f"{kind}_{which}"))
            if kind == "tpot":
                other = point.value(f"tpot_with_first_{which}")
                text += "" if other is None else f" ({number(other.median * 1000)})"
            cells.append(text)
    return tuple(cells)


def _ms(value: Estimate | None) -> str:
    if value is None:
        return UNKNOWN
    text = number(value.median * 1000)
    if value.interval is not None:
        low, high = (number(bound * 1000) for bound in value.interval)
        text += f" ({low} to {high})"
    return text


def limits_table(found: LoadExperiment) -> Table | None:
    """The rates that each point's searches measured; None where none did."""
    rows: list[tuple[str, ...]] = []
    columns: tuple[str, ...] = ()
    for point in found.points:
        for repeat, one in sorted(point.repeats.items()):
            if one.search is not None:
                table = search_table(one.search)
                columns = table.columns
                rows += [(escaped(point.label), str(repeat), *row) for row in table.rows]
    return Table(("point", "repeat", *columns), tuple(rows), text_columns=1) if rows else None


def servers_table(found: LoadExperiment) -> Table | None:
    """A row for each way in which a server was started; None where no record tells one."""
    rows: dict[tuple[str, ...], None] = {}
    for point in found.points:
        command = point.figure("server_command") or point.figure("server_url")
        if command is not None:
            environment = point.figure("server_environment") or ""
            texts = (f"{environment} {command}".strip(), point.figure("server_unmapped") or "")
            rows[(point.result.cell.engine, *map(escaped, texts))] = None
    return Table(("engine", "command", "no option for"), tuple(rows), text_columns=3) if rows else None


def load_sentence(found: LoadExperiment) -> str:
    """The answer: which server, the limits found, the knee, and the largest throughput."""
    choice = choose_server(found)
    decided = choice is not None and choice.choice is not None
    parts = [f"{server_lead(found, choice)}: {server_body(found, choice)}."] if choice is not None and decided else []
    parts += [*limit_sentences(found), *_knee_sentences(found)]
    rates = ((point.value("tokens"), point) for point in found.points if not point.work.find)
    known = [(value.median, point) for value, point in rates if value is not None]
    if known and not decided:
        best = max(known, key=lambda one: one[0])[1]
        others = [point for _, point in known if point is not best]
        tied = ties(best.by_repeat("tokens"), [one.by_repeat("tokens") for one in others], best.result.confidence)
        as_good = not_apart([others[index].label for index in tied])
        parts.append(f"Most tokens: {_cell(best.value('tokens'))} tokens/s at {best.label}{as_good}.")
    if not parts:
        return f"No point has a result{_why_void(found)}."
    return " ".join(parts)


def _why_void(found: LoadExperiment) -> str:
    """` (no answers: HTTP 503: busy)`: why no repeat is a result; nothing where none completed."""
    reasons = _void_reasons(found)
    return f" ({'; '.join(reasons)})" if reasons else ""


def _void_reasons(found: LoadExperiment) -> list[str]:
    """Verdict and reason of the repeats that are no results, each once; of more than `_MOST_REASONS` how many more."""
    reasons = dict.fromkeys(
        f"{one.judgement.verdict}: {one.judgement.reason}"
        for point in found.points
        for one in point.repeats.values()
        if not one.judgement.is_result
    )
    more = len(reasons) - _MOST_REASONS
    return [*list(reasons)[:_MOST_REASONS], *([f"{more:,} more"] if more > 0 else [])]


def limit_sentences(found: LoadExperiment) -> Iterator[str]:
    for point in found.points:
        searches = [one.search for one in point.valid if one.search is not None]
        if not searches:
            continue
        lows = [(one.low, one.reason) for one in searches if one.low is not None]
        highs = [(one.high, one.reason) for one in searches if one.high is not None]
        without = [one.reason for one in searches if one.estimate is None]
        objectives = point.work.objectives
        assert objectives is not None
        bounds = bounds_text(objectives.bounds)
        where = "" if point.label == "max_rate" else f"{point.label}: "
        if len(without) < len(searches):
            cost = point.usd_per_million_tokens
            price = "" if cost is None else f", at most ${number(cost.median)} per million tokens"
            text = limit_text(point)
            of_all = f"for {percent(objectives.share)} of the requests"
            open_ones = ""
            if without:
                verb = "has" if len(without) == 1 else "have"
                reasons = "; ".join(dict.fromkeys(without))
                open_ones = f" {len(without)} of {len(searches)} searches {verb} no estimate ({reasons})."
            yield f"{where}{text} is the highest rate with {bounds} {of_all}{price}.{open_ones}"
            continue
        told = []
        if lows:
            low, why = max(lows)
            told.append(f"At least {number(low)} requests/s meet {bounds} ({why}).")
        if highs:
            high, why = min(highs)
            told.append(f"{number(high)} requests/s are too many for {bounds} ({why}).")
        if not told:
            told.append(f"The search decided no rate ({without[0]}).")
        yield where + " Another search: ".join(told)


def _knee_sentences(found: LoadExperiment) -> Iterator[str]:
    """Series with the same knee share a sentence."""
    titles: dict[Knee, list[str]] = {}
    for title, knee in found.knees().items():
        titles.setdefault(knee, []).append(title)
    for knee, named in titles.items():
        where = f"{joined(named)}: the" if all(named) else "The"
        between = [load_text(found.axis, one) for one in (knee.below, knee.above) if one is not None]
        end = "lowest" if knee.below is None else "highest"
        side = f"between {' and '.join(between)}" if len(between) == 2 else f"the {end} load measured"
        side += not_apart([load_text(found.axis, one) for one in knee.tied])
        yield f"{where} knee (throughput over latency is largest) is at {load_text(found.axis, knee.at)}, {side}."


def load_lines(found: LoadExperiment) -> list[str]:
    """What a reader must know of the points: plain text, which the report escapes."""
    lines = []
    if found.asked:
        lines.append(f"Points differ in what is asked ({joined(found.asked)}), so none is chosen as a server.")
    void = [point.label for point in found.points if point.repeats and len(point.valid) < len(point.repeats)]
    if void:
        lines.append(f"Void: {first_of(void, _MOST_NAMED)} ({'; '.join(_void_reasons(found))}).")
    unsteady = [point.label for point in found.points if not point.steady]
    if unsteady:
        lines.append(f"Not steady, so latencies depend on how long the run was: {first_of(unsteady, _MOST_NAMED)}.")
    engines = {point.result.cell.engine for point in found.points}
    uneven = [point.label for point in found.points if point.valid and not point.comparable]
    if uneven and len(engines) > 1:
        lines.append(
            "Answers of other lengths than asked for, so not comparable with the others: "
            f"{first_of(uneven, _MOST_NAMED)}."
        )
    wrong = [point.label for point in found.points if not point.correct]
    if wrong:
        lines.append(
            f"Answers under load differ from those of the same requests alone: {first_of(wrong, _MOST_NAMED)}."
        )
    untold = [point.label for point in found.points if point.answers is not None and point.answers.untold]
    if untold:
        lines.append(
            "Answers under load differ from those of the same requests alone, and the server tells no "
            f"log-probabilities, so that noise and a defect cannot be told apart: {first_of(untold, _MOST_NAMED)}."
        )
    lines += _overheads(found)
    lines += [f"{note[:1].upper()}{note[1:]}." for note in _notes(found)]
    lines += [f"{point.label}: {text}." for point in found.points for text in point.damaged]
    return lines


def _notes(found: LoadExperiment) -> list[str]:
    """What the verdicts note, each once, and of each kind one before others of it; at most `_MOST_NOTES`.

    Notes that differ in their share or their number of requests alone are one, with the range.
    """
    told = {note for point in found.points for one in point.repeats.values() for note in one.judgement.notes}
    ranges: dict[tuple[str, str], list[str]] = {}
    for note in sorted(told):
        varies = _VARYING.match(note)  # from the beginning: a server's own words in a note may hold a share too
        before, value, rest = (*varies.groups(), note[varies.end() :]) if varies else (note, "", "")
        ranges.setdefault((before, rest), []).append(value)
    notes = []
    for (before, rest), values in ranges.items():
        ordered = sorted((value for value in values if value), key=lambda value: float(value.replace(",", "")))
        ends = [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered
        notes.append(f"{before}{' to '.join(ends)}{rest}")
    kinds: dict[str, list[str]] = {}
    for note in notes:
        kinds.setdefault(_NUMBERS.sub("", note), []).append(note)
    shown = [kind[0] for kind in kinds.values()] + [note for kind in kinds.values() for note in kind[1:]]
    more = len(shown) - _MOST_NOTES
    last = [f"{more:,} more {'note is' if more == 1 else 'notes are'} left out"] if more > 0 else []
    return [*shown[:_MOST_NOTES], *last]


def _overheads(found: LoadExperiment) -> Iterator[str]:
    """The largest share of the time with work in which our engine computed nothing: between two steps."""
    shares = []
    for point in found.points:
        for reading in point.result.completed.values():
            computed, between = reading.figure("compute_seconds"), reading.figure("between_steps_seconds")
            if computed is not None and between is not None and computed + between > 0:
                shares.append((between / (computed + between), point.label))
    if shares:
        share, label = max(shares)
        yield f"Between two steps the engine computed nothing for {percent(share)} of the time with work ({label})."
