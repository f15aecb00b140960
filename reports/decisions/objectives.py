"""Evaluation of the study's objectives for each cell: met, missed or undecided, with intervals.

    judgements = judge_objectives(study)
    table = objectives_table(judgements)

`met` and `missed` need the whole 95 % interval on one side of the bound. A bound inside the interval, too
few repeats for an interval, or a figure that is not known leave it `undecided`, with the reason. Exposed
communication is of one recorded pass: there the range over the ranks decides.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from configs.plans.plan import PlannedExperiment
from configs.spec.objectives import P99_LATENCIES, has_figure
from configs.workloads import STUDIED
from reports.decisions.cost import cell_cost, price_of
from reports.decisions.nodes import batch_of, without_batch
from reports.numbers.statistics import LEAST_REPEATS, Bounds, Estimate, paired_ratio
from reports.profiles.profiled import profiled, why_unprofiled
from reports.reading.load import CellResult, StudyResult
from reports.reading.names import NO_MODEL
from reports.text import UNKNOWN, Table, escaped, first_of, number, plural
from reports.training.cells import exposed_shares

ObjectiveWord = Literal["met", "missed", "undecided"]

MOST_ROWS = 60


@dataclass(frozen=True)
class Objective:
    """One bound: how it is called, in which unit it is printed, and on which side of it to stay."""

    field: str
    title: str
    unit: str
    scale: float
    at_most: bool
    kinds: tuple[str, ...]


def _kinds(field: str) -> tuple[str, ...]:
    return tuple(kind for kind, known in STUDIED.items() if has_figure(field, known))


OBJECTIVES = {
    field: Objective(field, title, unit, scale, at_most, _kinds(field))
    for field, title, unit, scale, at_most in (
        ("p99_latency_seconds", "P99 latency", "ms", 1000, True),
        ("p99_ttft_seconds", "P99 time to first token", "ms", 1000, True),
        ("p99_itl_seconds", "P99 time between tokens", "ms", 1000, True),
        ("tokens_per_second", "throughput", "tokens/s", 1, False),
        ("embeddings_per_second", "throughput", "embeddings/s", 1, False),
        ("speedup", "speed-up", "times", 1, False),
        ("exposed_communication_share", "exposed communication", "%", 100, True),
        ("usd_per_million_tokens", "cost per million tokens", "USD", 1, True),
        ("usd_per_million_embeddings", "cost per million embeddings", "USD", 1, True),
    )
}


@dataclass(frozen=True)
class Judgement:
    """One objective of one cell, or of one scaling experiment, or of the whole study (`model` None)."""

    objective: Objective
    bound: float
    word: ObjectiveWord
    reason: str
    model: str | None
    subject: str
    result: CellResult | None = None
    value: float | None = None
    interval: Bounds | None = None


@dataclass(frozen=True)
class _Known:
    """A figure as far as it is known. `why`: what an interval lacks; `note`: to mind whatever the verdict."""

    value: float | None
    interval: Bounds | None
    why: str
    note: str = ""


def judge_objectives(study: StudyResult) -> list[Judgement]:
    """Every objective that the study states, of every cell or experiment that has such a figure."""
    found: list[Judgement] = []
    for field, objective in OBJECTIVES.items():
        bound = getattr(study.plan.objectives, field)
        if bound is None:
            continue
        if field == "speedup":
            found += _speedups(study, objective, bound)
        elif field == "exposed_communication_share":
            found += _exposed(study, objective, bound)
        else:
            found += _of_cells(study, objective, bound)
    return found


def _of_cells(study: StudyResult, objective: Objective, bound: float) -> Iterator[Judgement]:
    for result in study.cells.values():
        if result.compared and result.cell.workload.kind in objective.kinds:
            known = _figure(study, result, objective.field)
            word, reason = _verdict(objective, bound, known)
            yield Judgement(
                objective, bound, word, reason, result.model, result.name, result, known.value, known.interval
            )


def _figure(study: StudyResult, result: CellResult, field: str) -> _Known:
    """The figure that an objective bounds."""
    if not result.completed:
        return _Known(None, None, f"not measured: {result.status.replace('_', ' ')}")
    if field.startswith("p99_"):
        latency = result.kind.latency
        assert latency is not None, "objectives name the kinds that they bound"
        return _percentile(result, P99_LATENCIES.get(field, latency.waited_for))
    if field.startswith("usd_per_million"):
        price = price_of(study, result)
        if price is None:
            return _Known(None, None, "price unknown")
        cost = getattr(cell_cost(result, price), field)
        if cost is None and result.estimate("throughput") is not None:
            return _Known(None, None, "no cost: a repeat has a throughput of 0")
        return _of(cost)
    return _of(result.estimate(field))


def _of(value: Estimate | None) -> _Known:
    if value is None:
        return _Known(None, None, "not measured")
    return _Known(value.median, value.interval, _no_interval(value.count, "repeat"))


def _no_interval(count: int, noun: str) -> str:
    verb = "gives" if count == 1 else "give"
    return f"{plural(count, noun)} {verb} no interval, {LEAST_REPEATS} do"


def _percentile(result: CellResult, kind: str) -> _Known:
    """The P99 of all samples; its interval has the repeat as its unit."""
    found = result.percentiles(kind)
    if found is None:
        return _Known(None, None, "not measured")
    note = f"P99 from {found.samples:,} samples only" if found.marked else ""
    repeats = len(result.completed)
    few = (
        _no_interval(repeats, "repeat") if repeats < LEAST_REPEATS else "no interval: repeats too short for a P99 each"
    )
    return _Known(found.p99, found.p99_interval, few, note)


def _exposed(study: StudyResult, objective: Objective, bound: float) -> list[Judgement]:
    """Of every cell on several ranks that a profile pass could record, or whose steps timed it themselves."""
    found = []
    for result in study.cells.values():
        if not result.compared or result.cell.layout.ranks == 1 or result.cell.workload.kind not in objective.kinds:
            continue
        profile = profiled(study, result)
        timed = exposed_shares(result) if profile is None else None
        if timed is not None:
            known = _of(timed)
            word, reason = _verdict(objective, bound, known)
            found.append(
                Judgement(
                    objective, bound, word, reason, result.model, result.name, result, known.value, known.interval
                )
            )
            continue
        if profile is None:
            reason = why_unprofiled(study, result)
            found.append(Judgement(objective, bound, "undecided", reason, result.model, result.name, result))
            continue
        shares = profile.shares[objective.field]
        value, over_ranks = profile.mean(objective.field), (min(shares), max(shares))
        word, reason = _over_ranks(objective, bound, over_ranks)
        found.append(Judgement(objective, bound, word, reason, result.model, result.name, result, value, over_ranks))
    if not found:
        reason = "no cell that could be profiled has several ranks"
        found.append(Judgement(objective, bound, "undecided", reason, None, "every cell"))
    return found


def _over_ranks(objective: Objective, bound: float, shares: Bounds) -> tuple[ObjectiveWord, str]:
    """The verdict where the interval is the range over the ranks of one pass."""
    word, _ = _side(objective, bound, _Known(shares[0], shares, ""))
    where = {"met": "every rank is within the bound", "missed": "every rank is beyond the bound"}
    return word, f"{where.get(word, 'ranks lie on both sides of the bound')}, in one recorded pass"


def _speedups(study: StudyResult, objective: Objective, bound: float) -> Iterator[Judgement]:
    for experiment in study.plan.experiments:
        if experiment.kind in ("strong", "weak") and len(experiment.points) > 1:
            known, subject = _speedup(study, experiment)
            word, reason = _verdict(objective, bound, known)
            model = study.cells[experiment.points[0].cell].model
            yield Judgement(objective, bound, word, reason, model, subject, None, known.value, known.interval)


def _speedup(study: StudyResult, experiment: PlannedExperiment) -> tuple[_Known, str]:
    """Throughput of the largest point over the baseline's, block by block."""
    results = sorted(study.points(experiment), key=lambda result: result.cell.layout.ranks)
    named = next((point.cell for point in experiment.points if point.baseline), results[0].key)
    base, largest = study.cells[named], results[-1]
    subject = f"{experiment.name}, {plural(largest.cell.layout.ranks, 'rank')} over {base.cell.layout.ranks}"
    if largest.cell.layout.ranks <= base.cell.layout.ranks:
        return _Known(None, None, "no point has more ranks than the baseline"), experiment.name
    ratio = paired_ratio(largest.values("throughput"), base.values("throughput"), confidence=base.confidence)
    if ratio is not None:
        compared = sum(one is not base and one.estimate("throughput") is not None for one in results)
        alone = f"of this point alone; the table of the experiment corrects its intervals for {compared:,} points"
        note = alone if ratio.interval is not None and compared > 1 else ""
        return _Known(ratio.value, ratio.interval, _no_interval(ratio.count, "pair"), note), subject
    lost = [result for result in (largest, base) if not result.completed]
    why = f"not measured: {lost[0].status.replace('_', ' ')}" if lost else "no block has both points"
    return _Known(None, None, why), subject


def _verdict(objective: Objective, bound: float, known: _Known) -> tuple[ObjectiveWord, str]:
    """Only a whole interval on one side decides."""
    word, reason = _side(objective, bound, known)
    return word, f"{reason}; {known.note}" if known.note else reason


def _side(objective: Objective, bound: float, known: _Known) -> tuple[ObjectiveWord, str]:
    if known.value is None:
        return "undecided", known.why
    if known.interval is None:
        side = "within" if (known.value <= bound if objective.at_most else known.value >= bound) else "beyond"
        return "undecided", f"{known.why}; the figure itself is {side} the bound"
    low, high = known.interval
    if (high <= bound) if objective.at_most else (low >= bound):
        return "met", "the whole interval is within the bound"
    if (low > bound) if objective.at_most else (high < bound):
        return "missed", "the whole interval is beyond the bound"
    return "undecided", "the bound lies in the interval"


def objectives_summary(judgements: Sequence[Judgement]) -> Table | None:
    """How often each objective is met, missed or undecided."""
    if not judgements:
        return None
    rows = []
    for objective in dict.fromkeys(judgement.objective for judgement in judgements):
        mine = [judgement for judgement in judgements if judgement.objective == objective]
        words = [judgement.word for judgement in mine]
        unknown = sum(judgement.value is None for judgement in mine)
        tally = [f"{words.count(word):,}" for word in ("met", "missed", "undecided")]
        rows.append((_stated(mine[0]), *tally, f"{unknown:,}"))
    return Table(("objective", "met", "missed", "undecided", "of these without a figure"), tuple(rows))


def objectives_table(judgements: Sequence[Judgement]) -> Table | None:
    """Each judgement with its figure; at most MOST_ROWS, shared out over the objectives."""
    if not judgements:
        return None
    rows = tuple(
        (
            _stated(judgement),
            escaped(judgement.model or UNKNOWN),
            escaped(judgement.subject),
            f"**{judgement.word}**" if judgement.word != "undecided" else judgement.word,
            _value(judgement),
            escaped(judgement.reason),
        )
        for judgement in balanced_rows(judgements)
    )
    return Table(
        ("objective", "model", "cell or experiment", "verdict", "figure (interval)", "why"), rows, text_columns=6
    )


def balanced_rows(judgements: Sequence[Judgement]) -> list[Judgement]:
    """The rows of the table: of each objective as many as of the others, in the plan's order."""
    objectives = list(dict.fromkeys(judgement.objective for judgement in judgements))
    if len(judgements) <= MOST_ROWS:
        return list(judgements)
    share = MOST_ROWS // len(objectives)
    return [
        judgement
        for objective in objectives
        for judgement in [item for item in judgements if item.objective == objective][:share]
    ]


def _stated(judgement: Judgement) -> str:
    objective = judgement.objective
    side = "at most" if objective.at_most else "at least"
    return f"{objective.title} {side} {number(judgement.bound * objective.scale)} {objective.unit}"


def _value(judgement: Judgement) -> str:
    if judgement.value is None:
        return UNKNOWN
    objective = judgement.objective
    text = f"{number(judgement.value * objective.scale)}"
    if judgement.interval is not None:
        low, high = (number(bound * objective.scale) for bound in judgement.interval)
        text += f" ({low} to {high})"
    return f"{text} {objective.unit}"


def objectives_sentences(judgements: Sequence[Judgement], wrong: Collection[str] = ()) -> list[str]:
    """For each objective and model what holds it; of cells that differ in their batch alone the largest that does.

    wrong: keys of cells with wrong answers, which are named where they hold it.
    """
    lines = []
    groups: dict[tuple[Objective, str, str], list[Judgement]] = {}
    for judgement in judgements:
        if judgement.result is not None and judgement.model is not None:
            group = (judgement.objective, judgement.model, judgement.result.cell.workload.kind)
            groups.setdefault(group, []).append(judgement)
    for (_, model, kind), members in groups.items():
        result = members[0].result
        whole = f"{model} ({kind})" if result is None or result.cell.model is not None else result.subject
        lines.append(_group_sentence(whole, members, wrong))
    for judgement in judgements:
        if judgement.result is None and judgement.model is not None:
            of = "" if judgement.model.startswith(NO_MODEL) else f"{judgement.model}, "
            text = f"{of}{judgement.subject}: {_stated(judgement)} is {judgement.word}"
            known = "" if judgement.value is None else f"{_value(judgement)}; "
            lines.append(f"{text} ({known}{judgement.reason}).")
        elif judgement.result is None:
            lines.append(f"{_stated(judgement)} is {judgement.word}: {judgement.reason}.")
    left_out = len(judgements) - len(balanced_rows(judgements))
    if left_out > 0:
        lines.append(f"{plural(left_out, 'more judgement')} {'is' if left_out == 1 else 'are'} left out of the table.")
    return lines


def _group_sentence(model: str, members: Sequence[Judgement], wrong: Collection[str]) -> str:
    """`Under 40.0 ms (P99 time between tokens), batch 16 is the largest that holds the objective.`"""
    stated = _stated(members[0])
    met = [judgement for judgement in members if judgement.word == "met"]
    open_ones = sum(judgement.word == "undecided" for judgement in members)
    tail = ""
    if open_ones:
        reasons = Counter(judgement.reason.split(";")[0] for judgement in members if judgement.word == "undecided")
        reason, often = reasons.most_common(1)[0]
        tail = f" Undecided: {open_ones:,} of {len(members):,}, mostly because: {reason} ({often:,})."
    bad = [judgement.subject for judgement in met if judgement.result is not None and judgement.result.key in wrong]
    if bad:
        tail = f" These have wrong answers: {first_of(bad, 3)}.{tail}"
    if not met:
        which = "is not known to be held by any cell" if open_ones else "is missed by every cell"
        return f"{model}: {stated} {which}.{tail}"
    largest: dict[str, list[str]] = {}
    for series in _series(members):
        found = _largest_batch(series)
        if found is not None:
            largest.setdefault(found[0], []).append(found[1])
    if not largest:
        held = first_of([judgement.subject for judgement in met], 3)
        return f"{model}: {stated} is held by {len(met):,} of {plural(len(members), 'cell')} ({held}).{tail}"
    side = "Under" if members[0].objective.at_most else "Above"
    bound = f"{number(members[0].bound * members[0].objective.scale)} {members[0].objective.unit}"
    shown = "; ".join(f"{text} ({'; '.join(places)})" for text, places in largest.items())
    return f"{model}: {side} {bound} ({members[0].objective.title}), {shown}.{tail}"


def _series(members: Sequence[Judgement]) -> list[list[Judgement]]:
    """Judgements of cells that differ in nothing but the batch size, with two sizes or more."""
    groups: dict[str, list[Judgement]] = {}
    for judgement in members:
        assert judgement.result is not None
        groups.setdefault(without_batch(judgement.result.cell), []).append(judgement)
    return [
        group
        for group in groups.values()
        if len({batch_of(judgement.result.cell) for judgement in group if judgement.result}) > 1
    ]


def _largest_batch(series: Sequence[Judgement]) -> tuple[str, str] | None:
    """(the largest batch that holds the objective, of which layout, precision and target); None where none does."""
    held = [judgement.result for judgement in series if judgement.word == "met" and judgement.result is not None]
    if not held:
        return None
    cell = max(held, key=lambda result: batch_of(result.cell)).cell
    size, tried = batch_of(cell), max(batch_of(judgement.result.cell) for judgement in series if judgement.result)
    text = f"batch {size:,} is the largest that holds the objective"
    if size == tried:
        text = f"batch {size:,}, the largest tried, holds the objective"
    return text, f"{cell.place}, {cell.dtype}, {cell.target}"
