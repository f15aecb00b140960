"""Times of collectives: by hand on one node and on several, and what is said where a link is not known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.hardware.hardware import Accelerator, Link, Machine
from engine.planner.timing.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
    ring,
)

INSIDE = Link(name="inside", latency_seconds=1e-6, bytes_per_second=100e9)
BETWEEN = Link(name="between", latency_seconds=10e-6, bytes_per_second=10e9)


def machine(accelerators: int = 4, kind: str = "cuda", **links: Link | None) -> Machine:
    """A node of four, by default joined to its like at 4 x 10 GB/s."""
    device = Accelerator.model_validate(
        {"name": "made-up", "kind": kind, "memory_bytes": 1, "bytes_per_second": 1, "peak_flops": {}, "source": "test"}
    )
    return Machine(
        name="node", accelerator=device, accelerators=accelerators, **({"inside": INSIDE, "between": BETWEEN} | links)
    )


def test_one_rank_sends_nothing() -> None:
    alone = machine(inside=None, between=None)
    for seconds in (all_reduce_seconds, all_gather_seconds, reduce_scatter_seconds):
        assert seconds(1e9, 1, alone) == 0.0
    assert point_to_point_seconds(1e9, 1, alone) == 0.0


def test_a_message_has_a_latency_of_its_own_where_it_was_measured() -> None:
    link = BETWEEN.model_copy(update={"message_seconds": 2e-6})
    pair = machine(accelerators=1, between=link)
    assert point_to_point_seconds(1e6, 2, pair) == pytest.approx(2e-6 + 1e6 / 10e9)
    assert all_reduce_seconds(1e6, 2, pair) == all_reduce_seconds(1e6, 2, machine(accelerators=1))


def test_a_ring_in_one_node() -> None:
    # Three hops of 1 us and three quarters of 1 GB at 100 GB/s; an all-reduce does that twice.
    assert all_gather_seconds(1e9, 4, machine()) == pytest.approx(3e-6 + 0.75 / 100)
    assert reduce_scatter_seconds(1e9, 4, machine()) == pytest.approx(3e-6 + 0.75 / 100)
    assert all_reduce_seconds(1e9, 4, machine()) == pytest.approx(2 * (3e-6 + 0.75 / 100))
    assert point_to_point_seconds(1e9, 4, machine()) == pytest.approx(1e-6 + 1 / 100)


def test_a_ring_over_nodes_has_the_ways_out_of_all_members() -> None:
    # 8 ranks on 2 nodes: six hops inside, one between; 4 x 10 GB/s between nodes is less than 100 inside.
    assert all_gather_seconds(1e9, 8, machine()) == pytest.approx(6e-6 + 10e-6 + 7 / 8 / 40)
    wide = BETWEEN.model_copy(update={"bytes_per_second": 50e9})
    assert ring(8, machine(between=wide)).bytes_per_second == 100e9  # now the inside is the slower


def test_a_node_that_is_not_full_has_fewer_ways_out() -> None:
    # 5 GPUs on nodes of four: all bytes pass through the one way out of the fifth.
    assert all_gather_seconds(1e9, 5, machine()) == pytest.approx(3e-6 + 10e-6 + 4 / 5 / 10)
    assert ring(6, machine()).bytes_per_second == 20e9
    # dp=3 beside tp=2: two members in the first node, one in the second.
    assert ring(3, machine(), stride=2).bytes_per_second == 10e9
    # gloo has one ring, which has the whole way out of either node.
    assert ring(5, machine(kind="cpu")).bytes_per_second == 40e9


def test_a_group_that_stands_apart_has_fewer_members_a_node() -> None:
    # dp=4 beside tp=2 on nodes of four: two members a node, and two ways out.
    assert all_gather_seconds(1e9, 4, machine(), stride=2) == pytest.approx(2e-6 + 10e-6 + 0.75 / 20)
    # dp=2 beside tp=4: one member a node, and no link inside is needed.
    assert all_gather_seconds(1e9, 2, machine(inside=None), stride=4) == pytest.approx(10e-6 + 0.5 / 10)
    assert point_to_point_seconds(1e9, 2, machine(), stride=4) == pytest.approx(10e-6 + 1 / 10)


def test_a_tree_sums_small_messages_faster_and_a_ring_large_ones() -> None:
    # 64 ranks on 16 nodes: the tree has 2 levels inside and 4 between, the ring 48 and 15 hops.
    assert all_reduce_seconds(0.0, 64, machine()) == pytest.approx(2 * (2e-6 + 40e-6))
    assert all_reduce_seconds(1e12, 64, machine()) == pytest.approx(2 * (48e-6 + 150e-6 + 63 / 64 * 1e12 / 40e9))
    # gloo has only the ring.
    assert all_reduce_seconds(0.0, 64, machine(kind="cpu")) == pytest.approx(2 * (48e-6 + 150e-6))


def test_a_share_of_the_rate_is_taken_off_bytes_and_not_off_latency() -> None:
    assert all_gather_seconds(1e9, 4, machine(), share=0.5) == pytest.approx(3e-6 + 0.75 / 50)


def test_an_unknown_link_is_named() -> None:
    with pytest.raises(ValueError, match=r"machine\.between: 8 ranks need 2 nodes of node .* at most 4 ranks"):
        all_reduce_seconds(1.0, 8, machine(between=None))
    with pytest.raises(ValueError, match=r"machine\.inside: node has 4 ranks of a group in a node"):
        all_gather_seconds(1.0, 4, machine(inside=None))


def test_the_accelerators_own_link_joins_a_node() -> None:
    device = machine().accelerator.model_copy(update={"link": INSIDE})
    own = Machine(name="node", accelerator=device, accelerators=4)
    assert all_gather_seconds(1e9, 4, own) == all_gather_seconds(1e9, 4, machine())


@given(
    message=st.floats(0, 1e12),
    ranks=st.integers(2, 4096),
    faster=st.floats(1, 100),
    stride=st.sampled_from([1, 2, 4, 8]),
)
def test_more_bandwidth_is_never_slower_and_more_ranks_never_faster(
    message: float, ranks: int, faster: float, stride: int
) -> None:
    quick = machine(
        inside=INSIDE.model_copy(update={"bytes_per_second": INSIDE.bytes_per_second * faster}),
        between=BETWEEN.model_copy(update={"bytes_per_second": BETWEEN.bytes_per_second * faster}),
    )
    for seconds in (all_reduce_seconds, all_gather_seconds):
        slow = seconds(message, ranks, machine(), stride=stride)
        assert slow > 0
        assert seconds(message, ranks, quick, stride=stride) <= slow * (1 + 1e-9)
    members = max(1, 4 // stride)
    whole = members * -(-ranks // members)  # full nodes: a node that is not full has fewer ways out
    assert all_gather_seconds(message, 2 * whole, machine(), stride=stride) >= all_gather_seconds(
        message, whole, machine(), stride=stride
    )
