"""Pareto fronts: the cells that no other cell dominates in two figures.

    fronts = user_fronts(study)            # tokens/s of a user against tokens/s of a rank
    fronts = cost_fronts(cell_costs(study))    # throughput against dollars per million tokens

A point is dominated where another is at least as good in both figures and better in one. The front is
exact for the medians; whether neighbours on it differ is for their intervals to say. Cells of one front do the same
work, the batch size aside.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from configs.common.printable import plural_noun
from reports.decisions.cost import CellCost, inverse, one_unit
from reports.decisions.nodes import work_key, work_title
from reports.numbers.statistics import Estimate
from reports.reading.load import CellResult, StudyResult
from reports.text import Table, escaped, estimate_cell, number, plural


@dataclass(frozen=True)
class ParetoPoint:
    """One cell by its two figures. `front`: no other cell beats it in both."""

    result: CellResult
    x: Estimate
    y: Estimate
    front: bool


@dataclass(frozen=True)
class Pareto:
    """All points of one model's work; more y is always better. `prices`: so many different ones the points have."""

    title: str
    model: str
    x_label: str
    y_label: str
    more_x: bool
    points: tuple[ParetoPoint, ...]
    prices: int = 0

    @property
    def front(self) -> list[ParetoPoint]:
        """The front in order of x."""
        return sorted((point for point in self.points if point.front), key=lambda point: point.x.median)


def on_front(points: Sequence[tuple[float, float]], more_x: bool = True) -> list[bool]:
    """Which points are dominated by no other. More y is better; more x, or less where `more_x` is false.

    Equal points do not dominate each other. O(n log n): by falling x the best y so far decides.
    """
    signed = [(x if more_x else -x, y) for x, y in points]
    order = sorted(range(len(signed)), key=lambda index: (-signed[index][0], -signed[index][1]))
    kept = [False] * len(signed)
    best_y, best_x = float("-inf"), float("inf")
    for index in order:
        x, y = signed[index]
        if y > best_y:
            kept[index] = True
            best_x, best_y = x, y
        elif y == best_y and x == best_x:
            kept[index] = True
    return kept


def user_fronts(study: StudyResult, wrong: Collection[str] = ()) -> list[Pareto]:
    """Speed for one user (1 / time per output token) against throughput of a rank, by model and work.

    wrong: keys of cells with wrong answers, which are on no front.
    """
    groups: dict[_Work, list[tuple[CellResult, Estimate, Estimate]]] = {}
    for result in study.cells.values():
        user = inverse(result.estimate("time_per_output_token_seconds"), 1.0)
        total = result.estimate("tokens_per_second")
        if result.compared and result.key not in wrong and user is not None and total is not None:
            rank = total.scaled(1 / result.cell.layout.ranks)
            groups.setdefault(_work(result), []).append((result, user, rank))
    labels = ("tokens/s for one user (1 / time per output token)", "tokens/s of a rank")
    models = Counter(model for model, *_ in groups)
    return [
        _pareto(
            f"Speed for one user against throughput: {model}{_told(group[0][0]) if models[model] > 1 else ''}",
            model,
            labels,
            True,
            group,
        )
        for (model, *_), group in groups.items()
    ]


def cost_fronts(costs: Iterable[CellCost], wrong: Collection[str] = ()) -> list[Pareto]:
    """Throughput against dollars per million tokens (or embeddings), by model and work; needs prices.

    wrong: as of `user_fronts`.
    """
    groups: dict[_Work, list[tuple[CellResult, Estimate, Estimate]]] = {}
    prices: dict[_Work, set[float]] = {}
    for cost in costs:
        if cost.result.key in wrong:
            continue
        total = cost.result.estimate("throughput")
        if cost.usd_per_hour is not None and cost.usd_per_million is not None and total is not None:
            group = _work(cost.result)
            groups.setdefault(group, []).append((cost.result, cost.usd_per_million, total))
            prices.setdefault(group, set()).add(cost.usd_per_hour)
    kinds = Counter((model, kind) for model, kind, _ in groups)
    fronts = []
    for (model, kind, work), members in groups.items():
        told = _told(members[0][0]) if kinds[model, kind] > 1 else f", {kind}"
        title, labels = f"Throughput against cost: {model}{told}", _cost_labels(members[0][0])
        fronts.append(replace(_pareto(title, model, labels, False, members), prices=len(prices[model, kind, work])))
    return fronts


_Work = tuple[str, str, str]
"""Model, kind of workload, and the work that a front's cells have in common: short prompts do not beat long ones."""


def _work(result: CellResult) -> _Work:
    return result.model, result.cell.workload.kind, work_key(result.cell)


def _told(result: CellResult) -> str:
    """What tells a front from the others of its model."""
    return f", {work_title(result.cell)}"


def _cost_labels(result: CellResult) -> tuple[str, str]:
    return f"USD per million {plural_noun(result.work_unit)}", f"{result.unit} over all ranks"


def _pareto(
    title: str,
    model: str,
    labels: tuple[str, str],
    more_x: bool,
    group: Sequence[tuple[CellResult, Estimate, Estimate]],
) -> Pareto:
    front = on_front([(x.median, y.median) for _, x, y in group], more_x)
    points = tuple(ParetoPoint(*item, kept) for item, kept in zip(group, front, strict=True))
    return Pareto(title, model, *labels, more_x, points)


def pareto_table(pareto: Pareto) -> Table:
    """The front, numbered as in the figure."""
    rows = tuple(
        (
            str(position),
            escaped(point.result.name),
            escaped(point.result.cell.target),
            estimate_cell(point.x),
            estimate_cell(point.y),
        )
        for position, point in enumerate(pareto.front, start=1)
    )
    columns = (
        "number",
        "cell",
        "target",
        f"{pareto.x_label}, median (interval)",
        f"{pareto.y_label}, median (interval)",
    )
    return Table(columns, rows, text_columns=3)


def pareto_sentence(pareto: Pareto) -> str:
    """How many cells are on the front, and what its ends trade for each other."""
    front, total = pareto.front, len(pareto.points)
    beaten = total - len(front)
    verb = "is" if len(front) == 1 else "are"
    text = f"{len(front):,} of {plural(total, 'cell')} {verb} beaten by no other in both"
    text += "; the rest is drawn faint." if beaten else "."
    if len(front) == 1:
        why = "" if pareto.more_x or pareto.prices > 1 else " With one price for all, the fastest is the cheapest."
        return f"{text} One cell is best in both, median against median: {front[0].result.name}.{why}"
    first, last = front[0], front[-1]
    x_gain, y_gain = (
        last.x.median / first.x.median,
        max(first.y.median, last.y.median) / min(first.y.median, last.y.median),
    )
    same_x, same_y = number(x_gain) == "1.00", number(y_gain) == "1.00"
    if same_x and same_y:
        return f"{text} They are equal in both to three digits, median against median."
    text += f" From {first.result.name} to {last.result.name}, median against median,"
    if pareto.more_x:
        speed = "the same speed" if same_x else f"{number(x_gain)} times the speed"
        tokens = "as many tokens" if same_y else f"{number(y_gain)} times fewer tokens"
        return f"{text} a user gets {speed}, and a rank gives {tokens}."
    growth = "throughput is the same" if same_y else f"throughput grows {number(y_gain)} times"
    costs = "as much" if same_x else f"{number(x_gain)} times as much"
    return f"{text} {growth}, and {one_unit(first.result)} costs {costs}."
