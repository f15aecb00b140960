"""What ZeRO-3 has gathered, worked out by hand; against real steps see `test_planner_training_memory`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.memory.framework import Framework
from engine.planner.memory.gathering import GatheredPeak, GatheredWeights, gather

WEIGHTS = GatheredWeights((10.0, 20.0), layers=2, tables=7.0, head=5.0, tied=False, recomputed=False)
EVERYTHING = 5 + 7 + 2 * 30


def framework(**more: int) -> Framework:
    """A bucket that holds all, and nothing that is too small to be shared out."""
    return Framework(**{"prefetch_bucket_size": 1000, "param_persistence_threshold": 1, **more})


def test_all_at_once_arrives_in_one_buffer_that_stays_until_the_last_weight_is_used() -> None:
    found = gather(WEIGHTS, framework())
    batch = EVERYTHING - 5  # the head is fetched before, alone
    assert found.start == GatheredPeak(
        5 + 2 * batch, 5 + 2 * batch
    )  # gloo's second buffer, then copies of all the weights
    assert [moment.held for moment in found.forward] == [5 + 2 * batch, 5 + 2 * batch]
    assert found.head.held == EVERYTHING
    assert [moment.held for moment in found.backward] == [EVERYTHING, EVERYTHING - 30]
    assert found.end.held == 5 + 7


def test_without_fetching_ahead_or_keeping_there_is_the_head_and_the_weight_in_use() -> None:
    found = gather(WEIGHTS, framework(prefetch_bucket_size=0, max_reuse_distance=0))
    assert [moment.held for moment in found.forward] == [5 + 20, 5 + 20]
    assert [moment.held for moment in found.backward] == [5 + 20, 5 + 20]
    assert found.head.held == 5
    assert found.start.arriving == 2 * 7 + 5


def test_a_weight_that_is_soon_used_again_stays() -> None:
    # From the last matrix to its own backward pass lies the head alone; from the one before, the last one twice.
    near = gather(WEIGHTS, framework(prefetch_bucket_size=0, max_reuse_distance=6))
    assert near.head.held == 5 + 20
    nearer = gather(WEIGHTS, framework(prefetch_bucket_size=0, max_reuse_distance=46))
    assert nearer.head.held == 5 + 20 + 10


def test_a_tied_head_is_the_table() -> None:
    tied = GatheredWeights((10.0,), layers=1, tables=0.0, head=5.0, tied=True, recomputed=False)
    assert gather(tied, framework()).end.held == 5
    assert gather(tied, framework()).head.held == 15


def test_recomputing_uses_a_block_s_weights_forwards_and_backwards() -> None:
    again = GatheredWeights((10.0, 20.0), layers=2, tables=7.0, head=5.0, tied=False, recomputed=True)
    frugal = framework(prefetch_bucket_size=0, max_reuse_distance=1)
    assert gather(again, frugal).backward[0].held == 5 + 20
    # Kept over the 20 and 20 that lie between its recomputation and its backward pass.
    assert gather(again, framework(prefetch_bucket_size=0, max_reuse_distance=41)).backward[0].held == 5 + 30


def test_small_weights_are_never_shared_out() -> None:
    assert gather(WEIGHTS, framework(param_persistence_threshold=1000)).forward == (GatheredPeak(), GatheredPeak())


@given(
    matrices=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    layers=st.integers(1, 6),
    head=st.integers(0, 40),
    bucket=st.integers(0, 300),
    reuse=st.integers(0, 500),
    recomputed=st.booleans(),
)
def test_never_more_than_all_weights_and_a_buffer_of_each(
    matrices: list[int], layers: int, head: int, bucket: int, reuse: int, recomputed: bool
) -> None:
    weights = GatheredWeights(tuple(map(float, matrices)), layers, 9.0, float(head), False, recomputed)
    found = gather(weights, framework(prefetch_bucket_size=bucket, max_reuse_distance=reuse))
    everything = sum(matrices) * layers + 9 + head
    for moment in (found.start, *found.forward, found.head, *found.backward, found.end):
        assert 0 <= moment.held <= 2 * everything
        assert moment.held <= moment.arriving <= 3 * everything
    assert len(found.forward) == len(found.backward) == layers
    assert found.end.held <= 9 + head


@pytest.mark.parametrize("live", [40, 1000])
def test_no_more_is_fetched_ahead_than_may_live(live: int) -> None:
    found = gather(WEIGHTS, framework(max_live_parameters=live, max_reuse_distance=0))
    most = max(moment.held for moment in found.forward)
    assert (most <= 40 + 20 + 40) if live == 40 else (most == 5 + 2 * 67)
