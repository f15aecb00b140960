"""Recommendations: the best node and batch size for latency, throughput and cost, with their margins.

    found = recommend(study, costs, judgements)
    recommendation_table(found); open_questions(study, found)

Cells are compared that do the same work: model, kind of workload and its fields, the batch size aside. The
best was chosen among all of them, so its ratio to the next is corrected for as many comparisons; where its
interval reaches 1 the two cannot be told apart, and that is said.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from configs.common.printable import plural_noun
from configs.spec.cell import Cell
from reports.decisions.cost import CellCost
from reports.decisions.nodes import batch_of, longest, work_key, work_title
from reports.decisions.objectives import Judgement
from reports.decisions.spending import HOUR_SECONDS
from reports.numbers.statistics import ROUNDING, Estimate, Ratio, min_repeats, paired_ratio
from reports.reading.load import CellResult, StudyResult, unaltered
from reports.text import UNKNOWN, Table, escaped, estimate_cell, joined, plural, ratio_cell

PRICED_PER = {1_000: "thousand", 1_000_000: "million"}

MOST_WORKS = 8
"""So many kinds of work the report recommends for; in plain studies there are one or two."""


@dataclass(frozen=True)
class Goal:
    """What is wanted of a cell, in which unit, and whether less of it is better."""

    name: str
    unit: str
    scale: float
    less: bool


@dataclass(frozen=True)
class Recommendation:
    """The best cell for a goal. `ratio`: how many times better than the next; None where no block has both.

    unpriced: how many more could not be compared for want of a price.
    """

    model: str
    work: str
    goal: Goal
    best: CellResult
    value: Estimate
    second: CellResult | None
    ratio: Ratio | None
    candidates: int
    unpriced: int = 0

    @property
    def verdict(self) -> str:
        """Whether the win is sure."""
        if self.second is None:
            return "the only one with a price" if self.unpriced else "the only one"
        if self.ratio is None:
            return "not compared: no block has both"
        if self.ratio.differs is None:
            return "not known: too few repeats"
        if self.ratio.bounds[1] < 1 - ROUNDING:  # medians over other blocks than the shared ones
            return "loses in the blocks that both have"
        return "wins" if self.ratio.differs else "not told apart"


ValuesOfCell = Callable[[CellResult], Mapping[int, float]]


def recommend(
    study: StudyResult,
    costs: Sequence[CellCost],
    judgements: Sequence[Judgement] = (),
    wrong: Collection[str] = (),
) -> list[Recommendation]:
    """For each model and work the best cell for each goal; with objectives the cheapest that meets them all.

    wrong: keys of cells with wrong answers, of which none is recommended.
    """
    priced = {cost.result.key: cost for cost in costs if cost.price is not None}
    groups: dict[tuple[str, str], list[CellResult]] = {}
    for result in study.cells.values():
        if result.compared and result.completed and result.key not in wrong:
            groups.setdefault((result.model, work_key(result.cell)), []).append(result)
    failing = _not_meeting(judgements)
    judged = {judgement.result.key for judgement in judgements if judgement.result is not None}
    found: list[Recommendation] = []
    for members in groups.values():
        left = longest(unaltered(members))[0]
        # Work of a kind that no objective bounds meets none.
        bounded = any(one.key in judged for one in left)
        found += _of_group(left, priced, [one for one in left if one.key not in failing] if bounded else None)
    return found


def _of_group(
    members: Sequence[CellResult], priced: Mapping[str, CellCost], holding: Sequence[CellResult] | None
) -> list[Recommendation]:
    """Latency, throughput, cost, and the cheapest (without prices the fastest) of those that hold every objective."""
    known = members[0].kind
    assert known.latency is not None, f"{known.kind} is not compared"
    item, usd_scale = plural_noun(known.unit), float(known.usd_per_units)
    usd_unit = f"USD per {PRICED_PER[known.usd_per_units]} {item}"

    def usd(result: CellResult) -> Mapping[int, float]:
        cost = priced.get(result.key)
        if cost is None or cost.usd_per_hour is None:
            return {}
        factor = cost.usd_per_hour / HOUR_SECONDS * usd_scale
        return {repeat: factor / value for repeat, value in result.values("throughput").items() if value > 0}

    def usd_estimate(result: CellResult) -> Estimate | None:
        cost = priced.get(result.key)
        if cost is None or cost.usd_per_million is not None:
            return None if cost is None else cost.usd_per_million
        items = cost.usd_per_thousand_items
        return None if items is None else items.scaled(usd_scale / 1000)

    goals: list[tuple[Goal, Sequence[CellResult], ValuesOfCell, Callable[[CellResult], Estimate | None]]] = [
        (Goal("latency", known.latency.unit, 1000, True), members, *_field(known.latency.figure)),
        (Goal("throughput", f"{item}/s", 1, False), members, *_field("throughput")),
    ]
    cheapest = (Goal("cost", usd_unit, 1, True), members, usd, usd_estimate)
    goals += [cheapest] if any(usd_estimate(result) is not None for result in members) else []
    if holding is not None:
        by_cost = any(usd_estimate(result) is not None for result in holding)
        name = "cheapest that meets the objectives" if by_cost else "fastest that meets the objectives"
        last = cheapest if by_cost else goals[1]
        goals.append((Goal(name, last[0].unit, 1, last[0].less), holding, last[2], last[3]))
    chosen = []
    for goal in goals:
        one = _best(members[0], *goal)
        if one is not None:
            without = sum(result.key not in priced for result in goal[1]) if goal[0].unit == usd_unit else 0
            chosen.append(replace(one, unpriced=without))
    return chosen


def _field(name: str) -> tuple[ValuesOfCell, Callable[[CellResult], Estimate | None]]:
    return (lambda result: result.values(name)), (lambda result: result.estimate(name))


def _best(
    example: CellResult,
    goal: Goal,
    members: Sequence[CellResult],
    values: ValuesOfCell,
    estimated: Callable[[CellResult], Estimate | None],
) -> Recommendation | None:
    """The member with the best median, against the next."""
    known = [(value, result) for result in members if (value := estimated(result)) is not None]
    if not known:
        return None
    known.sort(key=lambda pair: pair[0].median if goal.less else -pair[0].median)
    (value, best), others = known[0], [result for _, result in known[1:]]
    second = others[0] if others else None
    ratio = None
    if second is not None:
        pair = (values(second), values(best)) if goal.less else (values(best), values(second))
        ratio = paired_ratio(*pair, comparisons=len(others), confidence=best.confidence)
    return Recommendation(
        example.model, work_title(example.cell), goal, best, value, second, ratio, candidates=len(known)
    )


def _not_meeting(judgements: Sequence[Judgement]) -> set[str]:
    """Keys of the cells that do not surely meet every objective that is theirs."""
    return {item.result.key for item in judgements if item.result is not None and item.word != "met"}


def recommendation_table(found: Sequence[Recommendation]) -> Table | None:
    """One row for each model, work and goal."""
    if not found:
        return None
    rows = tuple(
        (
            escaped(item.model),
            escaped(item.work),
            item.goal.name,
            escaped(item.best.cell.target),
            f"{batch_of(item.best.cell):,}",
            escaped(_how(item.best.cell)),
            f"{estimate_cell(item.value, item.goal.scale)} {item.goal.unit}",
            escaped(_short(item.second)) if item.second is not None else UNKNOWN,
            ratio_cell(item.ratio),
            item.verdict,
        )
        for item in shown_figure(found)
    )
    columns = (
        "model",
        "work",
        "best for",
        "node",
        "batch",
        "layout and precision",
        "figure (interval)",
        "next best",
        "times better (interval)",
        "verdict",
    )
    return Table(columns, rows, text_columns=len(columns))


def shown_figure(found: Sequence[Recommendation]) -> list[Recommendation]:
    """Those of the works with the most candidates, in the plan's order."""
    candidates: dict[tuple[str, str], int] = {}
    for item in found:
        work = (item.model, item.work)
        candidates[work] = max(candidates.get(work, 0), item.candidates)
    kept = sorted(candidates, key=lambda work: -candidates[work])[:MOST_WORKS]
    return [item for item in found if (item.model, item.work) in kept]


def _short(result: CellResult) -> str:
    """`gpu-a, batch 8, dp=2, bfloat16`, and what else than the usual engine and weights there is."""
    cell = result.cell
    return f"{cell.target}, batch {batch_of(cell):,}, {_how(cell)}"


def _how(cell: Cell) -> str:
    """`dp=2, bfloat16, int8, transformers`."""
    engine = [cell.engine] if cell.engine != "rankwise" else []
    return ", ".join([cell.place, cell.dtype, *cell.compression, *engine])


def open_questions(
    study: StudyResult,
    found: Sequence[Recommendation],
    judgements: Sequence[Judgement] = (),
    wrong: Collection[str] = (),
) -> list[str]:
    """What the table does not say: what could not be recommended, and why; how many repeats an order would need."""
    lines = []
    barred = [result for key, result in study.cells.items() if result.compared and result.completed and key in wrong]
    if barred:
        why = "wrong answers" + (" or a loss that is not finite" if any(one.kind.trains for one in barred) else "")
        lines.append(f"Not recommended because of {why}: {plural(len(barred), 'cell')}.")
    shown = shown_figure(found)
    needed = [
        min_repeats(item.ratio.comparisons, item.best.confidence)
        for item in shown
        if item.ratio is not None and item.ratio.differs is None
    ]
    if needed:
        lines.append(
            f"Brackets hold the range of repeats too few for an interval; {max(needed)} repeats would give one."
        )
    without_price = sum(item.unpriced for item in shown if item.goal.name == "cost")
    if without_price:
        lines.append(f"Not compared by cost, as their price is unknown: {plural(without_price, 'cell')}.")
    left_out = len({(item.model, item.work) for item in found}) - MOST_WORKS
    if left_out > 0:
        verb = "is" if left_out == 1 else "are"
        lines.append(f"{plural(left_out, 'more kind')} of work, of fewer cells each, {verb} left out.")
    done = {(item.model, item.goal.name) for item in found}
    unpriced: dict[str | None, list[str]] = {}  # by the unit of the work of those on one machine
    models = {result.model: result.subject for result in study.cells.values() if result.compared}
    for model, subject in models.items():
        measured = [
            result for result in study.cells.values() if result.model == model and result.compared and result.completed
        ]
        if not measured:
            lines.append(f"{subject}: nothing to recommend, no cell has a figure.")
            continue
        if all(result.key in wrong for result in measured):
            lines.append(f"{subject}: nothing to recommend, every cell with a figure has wrong answers.")
            continue
        if (model, "cost") not in done:
            places = {(result.cell.target, result.cell.nodes) for result in measured}  # what an hour costs
            units = {result.work_unit for result in measured}
            unit = units.pop() if len(units) == 1 else "unit of work"
            unpriced.setdefault(unit if len(places) == 1 else None, []).append(subject)
        mine = [item for item in judgements if item.model == model and item.result is not None]
        if mine and not any(name == model and "objectives" in goal for name, goal in done):
            lines.append(f"{subject}: no cell is known to meet every objective; {_why_none(mine, measured, wrong)}.")
    for shared, named in unpriced.items():
        text = f"; on one machine the cheapest {shared} is that of the highest throughput" if shared else ""
        lines.append(f"{joined(named)}: what is cheapest in dollars is unknown without a price{text}.")
    return lines


def _why_none(judgements: Sequence[Judgement], measured: Sequence[CellResult], wrong: Collection[str]) -> str:
    """Why none of a model's cells is named as meeting every objective."""
    failing = _not_meeting(judgements)
    if any(result.key not in failing and result.key in wrong for result in measured):
        return "those that do have wrong answers"
    undecided = any(item.word == "undecided" for item in judgements)
    return "some verdicts are undecided" if undecided else "each misses one at least"
