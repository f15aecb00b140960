"""The best node for throughput, latency and cost, with margins and their significance.

    sentences = best_sentences([Contender(node, result, usd_per_hour), ...])

Nodes are compared by the best cell of each, over layouts and batch sizes, within one model, workload and
precision. Repeats on two nodes share no block, so ratios are unpaired; the intervals hold for all sentences
at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.common.base import content_hash
from configs.common.printable import plural_noun
from configs.spec.cell import Cell
from reports.decisions.nodes import BATCH_FIELDS
from reports.decisions.spending import HOUR_SECONDS
from reports.numbers.statistics import Estimate, Ratio, estimate, unpaired_ratio
from reports.reading.load import CellResult
from reports.text import estimate_text, joined, number, ratio_digits

_FREE_FIELDS = {
    "target": True,
    "nodes": True,
    "layout": True,
    "cores_per_rank": True,
    "env": True,
    "workload": BATCH_FIELDS,
}
"""What a node may choose for itself when it shows its best."""


@dataclass(frozen=True)
class Contender:
    """One cell on one node; `usd_per_hour` is None where the node's price is unknown."""

    node: str
    result: CellResult
    usd_per_hour: float | None = None


@dataclass(frozen=True)
class NodeGoal:
    """What a node can be best for. `values`: one above 0 for each repeat, empty where there are none."""

    title: str
    unit: str
    scale: float
    more_is_better: bool
    values: Callable[[Contender], list[float]]


@dataclass(frozen=True)
class BestCell:
    """The best cell of a node for a goal."""

    contender: Contender
    values: tuple[float, ...]
    value: Estimate


@dataclass(frozen=True)
class Contest:
    """A goal within one group of cells: the best of each node, the winner first."""

    what: str
    goal: NodeGoal
    entries: tuple[BestCell, ...]


def best_sentences(contenders: Sequence[Contender]) -> list[str]:
    """One sentence for each group and goal, throughput first; and one naming the nodes without a price."""
    found = [contest for group in _groups(contenders) for contest in _contests(group)]
    comparisons = max(1, sum(len(contest.entries) > 1 for contest in found))
    sentences = [_sentence(contest, comparisons) for contest in found]
    nodes = dict.fromkeys(item.node for item in contenders)
    unpriced = [node for node in nodes if all(item.usd_per_hour is None for item in contenders if item.node == node)]
    if unpriced:
        which = "any node" if len(unpriced) == len(nodes) else joined(unpriced)
        sentences.append(f"Cost: what an hour of {which} costs is unknown, so that is not compared.")
    return sentences


def _groups(contenders: Sequence[Contender]) -> list[list[Contender]]:
    groups: dict[str, list[Contender]] = {}
    for item in contenders:
        groups.setdefault(like(item.result.cell), []).append(item)
    return list(groups.values())


def like(cell: Cell) -> str:
    """The same for cells that do the same work in the same precision, whatever the layout and batch size."""
    return content_hash(cell.model_dump(mode="json", exclude=_FREE_FIELDS))  # type: ignore[arg-type]


def _contests(group: list[Contender]) -> list[Contest]:
    first = group[0].result
    goals = [NodeGoal("Highest throughput", first.unit, 1.0, True, _field("throughput"))]
    if first.latency is not None:
        goals.append(NodeGoal("Lowest latency", first.latency.unit, 1e3, False, _field(first.latency.figure)))
    goals += [
        NodeGoal("Lowest cost", f"USD per million {plural_noun(first.work_unit)}", 1.0, False, _usd_per_million),
    ]
    texts = [] if first.cell.model is None else [first.model]
    texts += [first.cell.workload.kind, first.cell.dtype]
    texts += [first.cell.engine] if first.cell.engine != "rankwise" else []
    entries = [(goal, _entries(group, goal)) for goal in goals]
    return [Contest(", ".join(texts), goal, found) for goal, found in entries if found]


def _field(name: str) -> Callable[[Contender], list[float]]:
    return lambda item: [value for value in item.result.values(name).values() if value > 0]


def _usd_per_million(item: Contender) -> list[float]:
    if item.usd_per_hour is None or not item.result.kind.needs_model:
        return []
    rates = item.result.values("throughput").values()
    return [item.usd_per_hour / HOUR_SECONDS / rate * 1e6 for rate in rates if rate > 0]


def _entries(group: Sequence[Contender], goal: NodeGoal) -> tuple[BestCell, ...]:
    """The best cell of each node, the best node first."""
    sign = -1 if goal.more_is_better else 1
    best: dict[str, BestCell] = {}
    for item in group:
        values = goal.values(item)
        value = estimate(values, item.result.confidence)
        if value is None:
            continue
        before = best.get(item.node)
        if before is None or sign * value.median < sign * before.value.median:
            best[item.node] = BestCell(item, tuple(values), value)
    return tuple(sorted(best.values(), key=lambda entry: sign * entry.value.median))


def _sentence(contest: Contest, comparisons: int) -> str:
    """`Highest throughput (tiny, generate, float32): gpu-a with dp=2, batch 8: 412 tokens/s (...), 1.4 times ...`."""
    goal, winner = contest.goal, contest.entries[0]
    shown = estimate_text(winner.value, goal.unit, goal.scale)
    text = f"{goal.title} ({contest.what}): {winner.contender.node} with {winner.contender.result.name}, {shown}"
    if len(contest.entries) == 1:
        return f"{text}; no other node has a figure."
    following = contest.entries[1]
    confidence = max(entry.contender.result.confidence for entry in (winner, following))
    ratio = unpaired_ratio(winner.values, following.values, comparisons, confidence)
    assert ratio is not None, "both have values above 0"
    other = f"the best of {following.contender.node} ({following.contender.result.name})"
    return f"{text}; {_ratio_text(ratio)} {other}{_doubt(ratio)}."


def _ratio_text(ratio: Ratio) -> str:
    if ratio.interval is None:
        return f"{number(ratio.value)} times"
    digits = ratio_digits(ratio.interval)
    low, high = (number(bound, digits) for bound in ratio.interval)
    return f"{number(ratio.value, digits)} times ({low} to {high})"


def _doubt(ratio: Ratio) -> str:
    if ratio.interval is None:
        return f", from too few repeats to say more ({ratio.count})"
    return "" if ratio.differs else ", so the two cannot be told apart"
