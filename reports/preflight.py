"""Detection of slow nodes by comparison with their peers, and the preflight section of the report.

    nodes, pairs = judge(nodes, pairs)

A node is held against the median of the others, which one bad node cannot move. Of two nodes either may be the one
that is not as it should be, so only gross differences count there, and a slow link belongs to both.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from configs.common.files.reading import read_model
from configs.plans.paths import RunPaths
from configs.plans.preflight import NodeFigures, PairFigures, Preflight, TargetPreflight
from reports.tables import first_rows
from reports.text import UNKNOWN, Table, escaped, joined, number, percent, plural

SLOW_SHARE = 0.8
"""Below this share of the median of its peers a node, or a link, is slow."""
GROSS_SHARE = 0.5
"""The same where there is one peer only."""

_MOST_SAID = 20
"""Lines on nodes and links; the table of nodes begins with those that are not good."""

_FIGURES: dict[str, Callable[[NodeFigures], float | None]] = {
    "products of matrices": lambda node: node.gemm_flops_per_second,
    "reads of memory": lambda node: node.read_bytes_per_second,
    "its best link": lambda node: node.bytes_per_second,
}


def judge_nodes(
    nodes: Sequence[NodeFigures], pairs: Sequence[PairFigures]
) -> tuple[tuple[NodeFigures, ...], tuple[PairFigures, ...]]:
    """Nodes with the rate of their best link and their verdict; pairs, those that are slow without a slow node marked.

    `nodes` are those that were measured. Two nodes have one link, which says nothing of either.
    """
    best = _best_links(pairs)
    linked = [node.model_copy(update={"bytes_per_second": best.get(node.node)}) for node in nodes]
    of_all = {name: _known(figure, linked) for name, figure in _FIGURES.items()}
    ordered = {name: sorted(known.values()) for name, known in of_all.items()}
    judged = []
    for node in linked:
        slow = [said for name in _FIGURES if (said := _slowness(name, node.node, of_all[name], ordered[name]))]
        judged.append(
            node.model_copy(update={"verdict": "slow" if slow else "good", "reason": "; ".join(slow) or None})
        )
    suspected = {node.node for node in judged if node.verdict == "slow"}
    rates = sorted(pair.bytes_per_second for pair in pairs)
    return tuple(judged), tuple(_judged_pair(pair, rates, suspected) for pair in pairs)


def _best_links(pairs: Sequence[PairFigures]) -> dict[str, float]:
    """By node."""
    best: dict[str, float] = {}
    for pair in pairs:
        for node in pair.nodes:
            best[node] = max(pair.bytes_per_second, best.get(node, 0.0))
    return best


def _known(figure: Callable[[NodeFigures], float | None], nodes: Sequence[NodeFigures]) -> dict[str, float]:
    return {node.node: value for node in nodes if (value := figure(node)) is not None}


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Of sorted values without one that is `own`; they are two or more."""
    place, others = bisect_left(ordered, own), len(ordered) - 1
    low, high = (ordered[at if at < place else at + 1] for at in ((others - 1) // 2, others // 2))
    return (low + high) / 2


def _slowness(name: str, node: str, known: Mapping[str, float], ordered: Sequence[float]) -> str | None:
    """`reads of memory at 41 % of the others' median`; None where the node keeps up or has nobody to compare with."""
    own, peers = known.get(node), len(known) - 1
    if own is None or peers < 1:
        return None
    share = own / _median_of_others(ordered, own)
    if share >= (SLOW_SHARE if peers > 1 else GROSS_SHARE):
        return None
    compared = "the others' median" if peers > 1 else f"what {next(one for one in known if one != node)} reaches"
    return f"{name} at {percent(share)} of {compared}"


def _judged_pair(pair: PairFigures, rates: Sequence[float], suspected: set[str]) -> PairFigures:
    """A link between nodes that are both sound can be slow itself. rates: of all, sorted."""
    own = pair.bytes_per_second
    slow = len(rates) > 2 and own < SLOW_SHARE * _median_of_others(rates, own)
    return pair.model_copy(update={"slow": slow and not suspected & set(pair.nodes)})


def preflight_summary(found: TargetPreflight) -> str:
    """One line: how many nodes were tested, and what they and their links reach at least."""
    measured = [node for node in found.nodes if node.gemm_flops_per_second is not None]
    least = min((node.gemm_flops_per_second or 0.0 for node in measured), default=None)
    link = min((pair.bytes_per_second for pair in found.pairs), default=None)
    figures = [] if least is None else [f"at least {_scaled(least, 1e9)} GFLOP/s a rank"]
    figures += [] if link is None else [f"{_scaled(link, 1e6)} MB/s between two"]
    return ", ".join([f"{plural(len(measured), 'node')} tested{_covered(found)}", *figures])


def _covered(found: TargetPreflight) -> str:
    """` (3,500 of 499,500 links)`: of many nodes not every pair is measured; nothing where all were."""
    measured = sum(node.gemm_flops_per_second is not None for node in found.nodes)
    possible = measured * (measured - 1) // 2
    return f" ({len(found.pairs):,} of {possible:,} links)" if len(found.pairs) < possible else ""


def sentences(found: TargetPreflight) -> list[str]:
    """What a person should know of a target's nodes: for the terminal, and above the section's table."""
    said = [
        f"node {node.node} is {node.verdict}: {node.reason}; it is left out where other nodes suffice"
        for node in found.nodes
        if node.verdict != "good"
    ]
    said += [f"the link between {joined(pair.nodes)} is slow" for pair in found.pairs if pair.slow]
    more = len(said) - _MOST_SAID
    if more > 1:
        said[_MOST_SAID:] = [f"{more:,} more slow or broken nodes and slow links are in preflight.json"]
    return [*said, *found.notes]


def read_preflight(run: RunPaths) -> Preflight | None:
    """What was found in this run; None where nothing was tested, or by a version that wrote it otherwise."""
    try:
        return read_model(run.preflight, Preflight)
    except (FileNotFoundError, ValueError):
        return None


@dataclass(frozen=True)
class PreflightSection:
    """One target's nodes and links, as the report shows them."""

    title: str
    sentences: tuple[str, ...]
    nodes: Table
    pairs: Table | None


def preflight_sections(run: RunPaths) -> list[PreflightSection]:
    """One for each target whose nodes were tested."""
    found = read_preflight(run)
    return [_section(target) for target in found.targets] if found else []


def _section(found: TargetPreflight) -> PreflightSection:
    measured = sum(node.gemm_flops_per_second is not None for node in found.nodes)
    peers = ""
    if measured > 1:
        share = SLOW_SHARE if measured > 2 else GROSS_SHARE
        held = "the median of the others" if measured > 2 else "the other, since of two nodes either may be the odd one"
        peers = f" A node is called slow below {percent(share, 2)} of {held}."
    tested = f"{plural(len(found.nodes), 'node')}, tested{_covered(found)} at {found.at[:16]} UTC"
    title = f"{escaped(found.target)}: {tested}.{peers}"
    nodes = Table(
        ("node", "verdict", "products, GFLOP/s a rank", "reads, GB/s a rank", "best link, MB/s"),
        tuple(
            (
                escaped(node.node),
                node.verdict,
                _scaled(node.gemm_flops_per_second, 1e9),
                _scaled(node.read_bytes_per_second, 1e9),
                _scaled(node.bytes_per_second, 1e6),
            )
            for node in sorted(found.nodes, key=lambda node: node.verdict == "good")
        ),
        text_columns=2,
    )
    rows = tuple(
        (
            escaped(joined(pair.nodes)),
            _scaled(pair.latency_seconds, 1e-6),
            _scaled(pair.bytes_per_second, 1e6) + (" (slow)" if pair.slow else ""),
            _scaled(pair.sum_seconds, 1e-6),
            _scaled(pair.message_seconds, 1e-6),
        )
        for pair in sorted(found.pairs, key=lambda pair: not pair.slow)
    )
    titles = ("small all-reduce, µs", "large all-reduce, MB/s of the bus", "after work, µs", "message after work, µs")
    nodes = first_rows(nodes.without_empty_columns(), where="preflight.json")
    table = Table(("nodes", *titles), rows).without_empty_columns()
    pairs = first_rows(table, where="preflight.json") if rows else None
    texts = tuple(escaped(text[:1].upper() + text[1:]) + "." for text in sentences(found))
    return PreflightSection(title, texts, nodes, pairs)


def _scaled(value: float | None, unit: float) -> str:
    return UNKNOWN if value is None else number(value / unit)
