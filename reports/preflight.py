"""Detection of slow nodes by comparison with their peers, and the preflight section of the report.

    nodes, pairs = judge(nodes, pairs)

A node is held against the median of the others, which one bad node cannot move. Of two nodes either may be the one
that is not as it should be, so only gross differences count there, and a slow link belongs to both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from configs.common.files.reading import read_model
from configs.plans.paths import RunPaths
from configs.plans.preflight import NodeFigures, PairFigures, Preflight, TargetPreflight
from reports.text import UNKNOWN, Table, escaped, joined, number, percent, plural

SLOW_SHARE = 0.8
"""Below this share of the median of its peers a node, or a link, is slow."""
GROSS_SHARE = 0.5
"""The same where there is one peer only."""

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
    linked = [node.model_copy(update={"bytes_per_second": _best_link(node.node, pairs)}) for node in nodes]
    judged = []
    for node in linked:
        slow = [said for name, figure in _FIGURES.items() if (said := _slowness(name, figure, node, linked))]
        judged.append(
            node.model_copy(update={"verdict": "slow" if slow else "good", "reason": "; ".join(slow) or None})
        )
    suspected = {node.node for node in judged if node.verdict == "slow"}
    return tuple(judged), tuple(_judged_pair(pair, pairs, suspected) for pair in pairs)


def _best_link(node: str, pairs: Sequence[PairFigures]) -> float | None:
    return max((pair.bytes_per_second for pair in pairs if node in pair.nodes), default=None)


def _slowness(
    name: str, figure: Callable[[NodeFigures], float | None], node: NodeFigures, nodes: Sequence[NodeFigures]
) -> str | None:
    """`reads of memory at 41 % of the others' median`; None where the node keeps up or has nobody to compare with."""
    own = figure(node)
    peers = {other.node: value for other in nodes if other is not node and (value := figure(other)) is not None}
    if own is None or not peers:
        return None
    share = own / median(peers.values())
    if share >= (SLOW_SHARE if len(peers) > 1 else GROSS_SHARE):
        return None
    compared = "the others' median" if len(peers) > 1 else f"what {next(iter(peers))} reaches"
    return f"{name} at {percent(share)} of {compared}"


def _judged_pair(pair: PairFigures, pairs: Sequence[PairFigures], suspected: set[str]) -> PairFigures:
    """A link between nodes that are both sound can be slow itself."""
    others = [other.bytes_per_second for other in pairs if other.nodes != pair.nodes]
    slow = len(others) > 1 and pair.bytes_per_second < SLOW_SHARE * median(others)
    return pair.model_copy(update={"slow": slow and not suspected & set(pair.nodes)})


def preflight_summary(found: TargetPreflight) -> str:
    """One line: how many nodes were tested, and what they and their links reach at least."""
    measured = [node for node in found.nodes if node.gemm_flops_per_second is not None]
    least = min((node.gemm_flops_per_second or 0.0 for node in measured), default=None)
    link = min((pair.bytes_per_second for pair in found.pairs), default=None)
    figures = [] if least is None else [f"at least {_scaled(least, 1e9)} GFLOP/s a rank"]
    figures += [] if link is None else [f"{_scaled(link, 1e6)} MB/s between two"]
    return ", ".join([f"{plural(len(measured), 'node')} tested", *figures])


def sentences(found: TargetPreflight) -> list[str]:
    """What a person should know of a target's nodes: for the terminal, and above the section's table."""
    said = [
        f"node {node.node} is {node.verdict}: {node.reason}; it is left out where other nodes suffice"
        for node in found.nodes
        if node.verdict != "good"
    ]
    said += [f"the link between {joined(pair.nodes)} is slow" for pair in found.pairs if pair.slow]
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
    title = f"{escaped(found.target)}: {plural(len(found.nodes), 'node')}, tested at {found.at[:16]} UTC.{peers}"
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
            for node in found.nodes
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
        for pair in found.pairs
    )
    titles = ("small all-reduce, µs", "large all-reduce, MB/s of the bus", "after work, µs", "message after work, µs")
    pairs = Table(("nodes", *titles), rows).without_empty_columns() if rows else None
    texts = tuple(escaped(text[:1].upper() + text[1:]) + "." for text in sentences(found))
    return PreflightSection(title, texts, nodes.without_empty_columns(), pairs)


def _scaled(value: float | None, unit: float) -> str:
    return UNKNOWN if value is None else number(value / unit)
