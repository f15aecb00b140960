"""The preflight workload on real ranks: every node and every pair of nodes is measured, once."""

from collections.abc import Iterator
from itertools import combinations

import pytest

from tests.support.cluster.preflight_ranks import trial
from tests.support.rank_pool import RankPool

RANKS = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_rank_computes_and_every_pair_of_nodes_exchanges(pool: RankPool, nodes: int) -> None:
    answers = pool.run(trial, nodes)
    for figures, _ in answers:
        assert 1e8 < figures["gemm_flops_per_second"] < 1e14 and 1e7 < figures["read_bytes_per_second"] < 1e13
        assert figures["node"]
    a_node = RANKS // nodes
    for rank, (_, columns) in enumerate(answers):
        expected = [pair for pair in combinations(range(nodes), 2) if rank // a_node in pair]
        seen = sorted(zip(*(columns.get(name, []) for name in ("first_node", "second_node")), strict=True))
        assert seen == expected, "a rank has its own node's pairs"
        for name in ("latency_seconds", "sum_seconds", "message_seconds"):
            assert all(0 < seconds < 1 for seconds in columns.get(name, []))
        assert all(1e5 < rate < 1e13 for rate in columns.get("bytes_per_second", []))
