"""Preflight: what the nodes of a target showed before anything was measured, and which of them are left out.

`preflight.json` in the run folder holds a `Preflight`; `reports.preflight` shows it.
"""

from typing import Literal

from pydantic import PositiveInt

from configs.common.base import SCHEMA_VERSION, Frozen
from configs.records.record import Timestamp

SMALL_BYTES = 1024
"""Of the small all-reduce and the small message of a pair."""
MOST_ROUNDS = 7
"""Up to 8 nodes every pair is measured; of more nodes each has this many partners."""

NodeVerdict = Literal["good", "slow", "broken"]


class NodeFigures(Frozen):
    """One node: the slowest of its ranks counts; of its links the fastest, which shows what the node can do."""

    node: str
    gemm_flops_per_second: float | None = None
    read_bytes_per_second: float | None = None
    bytes_per_second: float | None = None
    verdict: NodeVerdict = "good"
    reason: str | None = None


class PairFigures(Frozen):
    """Two nodes: what all-reduces over their ranks reach.

    sum_seconds, message_seconds: of a small all-reduce, and of a small message one way, after work on each rank; on
    CPUs only.
    """

    nodes: tuple[str, str]
    latency_seconds: float
    bytes_per_second: float
    sum_seconds: float | None = None
    message_seconds: float | None = None
    slow: bool = False


class TargetPreflight(Frozen):
    """The nodes of one target. `excluded` are left out by jobs that find enough others."""

    target: str
    settings: str
    at: Timestamp
    ranks_per_node: PositiveInt
    nodes: tuple[NodeFigures, ...] = ()
    pairs: tuple[PairFigures, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def excluded(self) -> tuple[str, ...]:
        """Nodes that are slow or broken."""
        return tuple(node.node for node in self.nodes if node.verdict in ("slow", "broken"))


class Preflight(Frozen):
    """All targets of a study whose nodes were tested."""

    schema_version: int = SCHEMA_VERSION
    targets: tuple[TargetPreflight, ...] = ()


def rounds_of_pairs(nodes: int) -> list[list[tuple[int, int]]]:
    """Who meets whom, round by round: each node has at most one partner in a round, and never the same twice.

    The circle method of round-robin tournaments: one place stands still, the others move on by one. With an odd
    number one node rests in each round. All pairs, where MOST_ROUNDS suffice.
    """
    places: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    half = len(places) // 2
    rounds = []
    for _ in range(min(len(places) - 1, MOST_ROUNDS)):
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
