"""Predict collectives by the alpha-beta model: a hop costs its latency, a byte the inverse of the bandwidth.

    all_reduce_seconds(message_bytes, ranks, machine)             # ring or tree, whichever is the faster one
    all_gather_seconds(message_bytes, ranks, machine, stride=8)   # ranks stand 8 apart (tensor parallelism of 8)

`message_bytes` is the whole tensor on each rank (all-reduce, broadcast), the gathered one (all-gather), the input
(reduce-scatter). Ranks are placed node by node, so `ranks` of them fill the first nodes. A ring that leaves a node does
so once in and once out; several rings run at once, one through each rank's own way out, so that the rate between nodes
is the sum of the shares of the group's members in a node (of GPUs, in the node with the fewest), and the ring runs at
the slower of the two rates. A hop costs its link's latency; on GPUs all hops are made by one kernel, so that is the
latency of NCCL's hop.

Formulas: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 2005
(ring and tree); the bus bandwidth factors of nccl-tests, doc/PERFORMANCE.md; the pipelined tree of NCCL 2.4 (Jeaugey,
"Massively Scale Your Deep Learning Training with NCCL 2.4", developer.nvidia.com, 2019-02-04).
"""

from dataclasses import dataclass
from math import ceil, log2

from configs.common.printable import plural
from configs.hardware.hardware import Link, Machine

_COPIED_BYTES_PER_SECOND = 1.5e9
"""Rate of a write to memory that the kernel must clear first, and a copy back: an all-gather of 52 MB over 1 Gbit/s
took 60 ms longer than its bytes need, a reduce-scatter 60 ms longer than an all-reduce (this project's lab, 2026-11).
"""


@dataclass(frozen=True)
class Ring:
    """A group of ranks as a ring: its hops of each kind, and its rate."""

    ranks: int
    nodes: int
    inside: Link | None
    between: Link | None
    bytes_per_second: float

    @property
    def hops_seconds(self) -> float:
        """Latency of ranks - 1 hops: once along the whole ring."""
        across = self.nodes - 1
        return self._latency(self.ranks - 1 - across, across)

    @property
    def tree_seconds(self) -> float:
        """Latency from the root to the last leaf: a tree over nodes, and one within each."""
        members = ceil(self.ranks / self.nodes)
        return self._latency(ceil(log2(members)), ceil(log2(self.nodes)))

    def _latency(self, within: int, across: int) -> float:
        inside = self.inside.latency_seconds * within if self.inside and within else 0.0
        return inside + (self.between.latency_seconds * across if self.between and across else 0.0)


def ring(ranks: int, machine: Machine, stride: int = 1) -> Ring:
    """Return the ring of `ranks` at distance `stride`. Raises ValueError naming the unknown link."""
    members = min(ranks, max(1, machine.joined_ranks // stride))
    nodes = ceil(ranks / members)
    inside, between = machine.neighbour if members > 1 else None, machine.between if nodes > 1 else None
    if members > 1 and inside is None:
        raise ValueError(
            f"machine.inside: {machine.name} has {members} ranks of a group in a node and no link between them; "
            "give its latency_seconds and bytes_per_second, or measure it with `rankwise doctor --calibrate`"
        )
    if nodes > 1 and between is None:
        raise ValueError(
            f"machine.between: {ranks * stride} ranks need {ceil(ranks * stride / machine.accelerators)} nodes of "
            f"{machine.name} and no link between nodes is known; give its latency_seconds and bytes_per_second, "
            f"or use at most {plural(machine.accelerators, 'rank')}"
        )
    rates = [inside.bytes_per_second] if inside else []
    # The last node may hold fewer members, and all rings pass through its ways out. gloo's one ring has a whole node's.
    ways = members if machine.accelerator.kind == "cpu" else min(members, ranks - (nodes - 1) * members)
    rates += [between.bytes_per_second * ways] if between else []
    return Ring(ranks, nodes, inside, between, min(rates, default=1.0))


def all_reduce_seconds(
    message_bytes: float, ranks: int, machine: Machine, *, stride: int = 1, share: float = 1.0
) -> float:
    """Predict an all-reduce.

    Ring: 2 (n-1) hops and 2 (n-1)/n of the bytes; tree: up and down, all bytes twice. `share`: of the link's rate.

    gloo, on CPUs, has only the ring (gloo/allreduce.cc).
    """
    if ranks == 1:
        return 0.0
    group = ring(ranks, machine, stride)
    rate = group.bytes_per_second * share
    by_ring = 2 * group.hops_seconds + 2 * (ranks - 1) / ranks * message_bytes / rate
    by_tree = 2 * group.tree_seconds + 2 * message_bytes / rate
    return by_ring if machine.accelerator.kind == "cpu" else min(by_ring, by_tree)


def all_gather_seconds(
    message_bytes: float, ranks: int, machine: Machine, *, stride: int = 1, share: float = 1.0
) -> float:
    """Predict an all-gather. Ring: n-1 hops and (n-1)/n of the bytes; gloo's uses an additional buffer of torch."""
    if ranks == 1:
        return 0.0
    group = ring(ranks, machine, stride)
    seconds = group.hops_seconds + (ranks - 1) / ranks * message_bytes / (group.bytes_per_second * share)
    return seconds + (copy_seconds(message_bytes, ranks) if machine.accelerator.kind == "cpu" else 0.0)


def copy_seconds(message_bytes: float, ranks: int) -> float:
    """Predict torch's copy of a gathered or scattered tensor for gloo; 0 on one rank."""
    return message_bytes / _COPIED_BYTES_PER_SECOND if ranks > 1 else 0.0


def reduce_scatter_seconds(
    message_bytes: float, ranks: int, machine: Machine, *, stride: int = 1, share: float = 1.0
) -> float:
    """Predict a reduce-scatter: a reversed all-gather with sums during the transfer. gloo has none: torch all-reduces
    the whole (counted on a link: 2 (n-1)/n of the bytes, torch 2.13) in a separate copy.
    """
    if machine.accelerator.kind == "cpu":
        summed = all_reduce_seconds(message_bytes, ranks, machine, stride=stride, share=share)
        return summed + copy_seconds(message_bytes, ranks)
    return all_gather_seconds(message_bytes, ranks, machine, stride=stride, share=share)


def point_to_point_seconds(
    message_bytes: float, ranks: int, machine: Machine, *, stride: int = 1, share: float = 1.0
) -> float:
    """Predict a message from a rank to the one `stride` further, among `ranks`: between nodes, if the row spans nodes.

    One pair has one rank's share of the way out, not the node's.
    """
    if ranks == 1:
        return 0.0
    group = ring(ranks, machine, stride)
    link = group.between or group.inside
    assert link is not None
    return (link.message_seconds or link.latency_seconds) + message_bytes / (link.bytes_per_second * share)
