"""The decision of a study: for each model and work what to run, and what a larger choice would bring.

    for found in decide(study, costs, judgements, wrong):
        sentence = f"{decision_lead(found)} {decision_body(found)}"

Candidates do the same work with the model's own weights, right answers, and every objective met. Better is more work
for a dollar where all have prices, else for a rank; with `purpose: serving` and no objectives it is less latency. The
rule is `reports.decisions.choice`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from configs.common.printable import plural_noun
from reports.decisions.choice import Candidate, Choice, choose_candidate
from reports.decisions.cost import CellCost
from reports.decisions.nodes import batch_of, longest, work_key, work_title
from reports.decisions.objectives import Judgement
from reports.numbers.statistics import Ratio, min_repeats
from reports.reading.load import CellResult, StudyResult, unaltered
from reports.text import estimate_text, joined, number, pairs_text, percent, plural

Basis = Literal["dollar", "rank", "latency"]

MAX_SHOWN = 2
"""Works that the opening of a report decides on: those with the most candidates."""


@dataclass(frozen=True)
class Decision:
    """What to run of `members`, the candidates that are left; `choice` None: none is left, and `left_out` says why.

    subject: the model, or the kind of work that has none. left_out: number of cells that were no candidates, by reason.
    costs: by key of a cell. shorter: cells that differ from a candidate only in doing less of the same work, as the
    baselines of strong and of weak scaling do. tried: most ranks of the same work in the plan, failed cells included.
    """

    model: str
    subject: str
    work: str
    basis: Basis
    members: tuple[CellResult, ...]
    choice: Choice | None
    left_out: Mapping[str, int]
    costs: Mapping[str, CellCost]
    shorter: tuple[CellResult, ...] = ()
    tried: int = 0

    @property
    def considered(self) -> tuple[CellResult, ...]:
        """Candidates, and those that stand behind one of them."""
        return (*self.members, *self.shorter)

    @property
    def chosen(self) -> CellResult:
        assert self.choice is not None
        return self.members[self.choice.chosen]


def decide(
    study: StudyResult,
    costs: Sequence[CellCost],
    judgements: Sequence[Judgement] = (),
    wrong: Collection[str] = (),
) -> list[Decision]:
    """A decision for each model, work and device with a figure, in the order of the plan.

    wrong: keys of cells with wrong answers.
    """
    groups: dict[tuple[str, str, str | None], list[CellResult]] = {}
    for result in study.cells.values():
        if result.compared and result.estimate("throughput") is not None:
            groups.setdefault((result.model, work_key(result.cell), result.device), []).append(result)
    tried = _tried(study)
    words: dict[str, set[str]] = {}
    for judgement in judgements:
        if judgement.result is not None:
            words.setdefault(judgement.result.key, set()).add(judgement.word)
    priced = {cost.result.key: cost for cost in costs}
    serving = study.plan.purpose == "serving" and not judgements
    return [
        replace(
            _decide(group, wrong, words if judgements else None, priced, serving),
            tried=max(tried.get(_work_on_target(result), 0) for result in group),
        )
        for group in groups.values()
    ]


def _work_on_target(result: CellResult) -> tuple[str | None, str, str]:
    return result.cell.model, work_key(result.cell), result.cell.target


def _tried(study: StudyResult) -> dict[tuple[str | None, str, str], int]:
    """Most ranks of each model's work on a target, whether measured or not."""
    found: dict[tuple[str | None, str, str], int] = {}
    for result in unaltered([result for result in study.cells.values() if result.compared]):
        work = _work_on_target(result)
        found[work] = max(found.get(work, 0), result.cell.layout.ranks)
    return found


def _decide(
    group: list[CellResult],
    wrong: Collection[str],
    words: Mapping[str, set[str]] | None,
    costs: Mapping[str, CellCost],
    serving: bool,
) -> Decision:
    members, left_out = [], dict[str, int]()
    for result in unaltered(group):
        why = _why_not(result, wrong, words)
        if why is None:
            members.append(result)
        else:
            left_out[why] = left_out.get(why, 0) + 1
    members, shorter = longest(members)
    prices = [None if (cost := costs.get(result.key)) is None else cost.usd_per_hour for result in members]
    basis: Basis = "rank" if None in prices else "dollar"
    if serving and all(result.latency_values for result in members):
        basis = "latency"
    candidates = [
        Candidate(
            result.name,
            float(result.cell.layout.ranks) if None in prices or price is None else price,
            {repeat: rate for repeat, rate in result.values("throughput").items() if rate > 0},
            result.latency_values,
            batch_of(result.cell),
        )
        for result, price in zip(members, prices, strict=True)
    ]
    found = choose_candidate(candidates, basis == "latency", group[0].confidence) if candidates else None
    first = group[0]
    return Decision(
        first.model,
        first.subject,
        work_title(first.cell),
        basis,
        tuple(members),
        found,
        left_out,
        costs,
        tuple(shorter),
    )


def _why_not(result: CellResult, wrong: Collection[str], words: Mapping[str, set[str]] | None) -> str | None:
    """Why a cell is no candidate; None: it is one."""
    if result.key in wrong:
        return "with wrong answers" + (" or a loss that is not finite" if result.kind.trains else "")
    if not any(rate > 0 for rate in result.values("throughput").values()):
        return "with a throughput of 0"
    told = set() if words is None else words.get(result.key, set())
    if "missed" in told:
        return "missing an objective"
    return "undecided on an objective" if "undecided" in told else None


def shown_decisions(found: Sequence[Decision]) -> list[Decision]:
    """Those that the opening tells: with the most candidates, in the order of the plan."""
    most = sorted(found, key=lambda decision: -len(decision.members))[:MAX_SHOWN]
    return [decision for decision in found if any(decision is one for one in most)]


def decision_lead(found: Decision) -> str:
    """`Run llama-110m as 1 rank, bfloat16, batch 8`, without a stop."""
    if found.choice is None:
        return f"No cell of {found.subject} can be recommended"
    result = found.chosen
    return f"{result.kind.verb} {result.name if result.cell.model is None else f'{found.model} as {result.name}'}"


def decision_body(found: Decision) -> str:
    """What it gives and gains, and what a larger choice would bring; without a stop."""
    if found.choice is None:
        return f"{_left_out(found.left_out)} ({found.work})"
    parts = [_gives(found)]
    if found.choice.gain is not None:
        simplest = found.members[found.choice.simplest]
        parts.append(f"{pairs_text(found.choice.gain)} the simplest ({simplest.name})")
    larger = _larger(found)
    text = ", ".join(parts) + (f"; {larger}" if larger else "")
    return text + (f" (left out: {_left_out(found.left_out)})" if found.left_out else "")


def _gives(found: Decision) -> str:
    """`363 tokens/s (350 to 369, 95 % interval, 6 repeats) at 7.05 ms TPOT, $0.41 per million tokens`."""
    result = found.chosen
    value = result.estimate("throughput")
    assert value is not None
    text = estimate_text(value, result.unit)
    latency = None if result.latency is None else result.estimate(result.latency.figure)
    if latency is not None and result.latency is not None:
        text += f" at {number(latency.median * 1000)} {result.latency.unit}"
    cost = found.costs.get(result.key)
    if cost is not None and cost.usd_per_million is not None:
        text += f", ${number(cost.usd_per_million.median)} per million {plural_noun(result.work_unit)}"
    return text


def _larger(found: Decision) -> str:
    """What the candidate that does the most work would bring, and why it is not chosen."""
    choice = found.choice
    assert choice is not None
    if choice.larger is None or choice.more is None:
        return ""
    other = found.members[choice.larger]
    text = f"{other.name} does {pairs_text(choice.more)} as much {_for_what(found, other)}"
    if choice.per_size is None or found.basis == "latency":
        return text
    size = "per rank" if found.basis == "rank" else "per dollar"
    text += f", {_share(choice.per_size)} as much {size}"
    if choice.per_size.interval is None and choice.per_size.is_above(1):
        text += f", which {plural(min_repeats(choice.comparisons, found.chosen.confidence), 'repeat')} would confirm"
    return text


def _for_what(found: Decision, other: CellResult) -> str:
    """`on 2 ranks instead of 1`, `for 2.00 times the price`."""
    price, mine = (_usd_per_hour(found, one) for one in (other, found.chosen))
    if price and mine and all(_usd_per_hour(found, one) is not None for one in found.members):
        return f"for {number(price / mine)} times the price"
    return f"on {plural(other.cell.layout.ranks, 'rank')} instead of {found.chosen.cell.layout.ranks:,}"


def _usd_per_hour(found: Decision, result: CellResult) -> float | None:
    cost = found.costs.get(result.key)
    return None if cost is None else cost.usd_per_hour


def _left_out(reasons: Mapping[str, int]) -> str:
    return joined(f"{plural(count, 'cell')} {why}" for why, count in reasons.items())


def _share(ratio: Ratio) -> str:
    """`84 % (79 to 88)`; brackets where the pairs are too few for an interval, no bounds where there is one pair."""
    low, high = (number(bound * 100) for bound in ratio.bounds)
    bounds = f"[{low} to {high}]" if ratio.interval is None else f"({low} to {high})"
    return percent(ratio.value) + (f" {bounds}" if ratio.count > 1 else "")


def efficiency_text(points: Iterable[tuple[int, Ratio | None]]) -> str:
    """`84 % (79 to 88) of linear at 2 ranks, 71 % (66 to 75) at 4`."""
    told: list[str] = []
    for ranks, efficiency in points:
        if efficiency is not None:
            at = plural(ranks, "rank") if not told else f"{ranks:,}"
            of = " of linear" if not told else ""
            told.append(f"{_share(efficiency)}{of} at {at}")
    return ", ".join(told)
