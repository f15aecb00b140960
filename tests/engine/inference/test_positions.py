"""Relative positions against T5's own in transformers, and rows of learned ones."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from engine.inference.positions import biased, bidirectional_bias, causal_bias, relative_bucket, table_rows


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 12), (16, 1000)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_t5(buckets: int, furthest: int, bidirectional: bool) -> None:
    offsets = torch.arange(-1500, 1501)
    expected = T5Attention._relative_position_bucket(offsets, bidirectional, buckets, furthest)
    assert torch.equal(relative_bucket(offsets, buckets, furthest, bidirectional), expected)
    assert len(expected.unique()) >= buckets // 2


def test_biases_stand_where_queries_and_keys_meet() -> None:
    table = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    both, one_way = bidirectional_bias(table, 8, 12, 20), causal_bias(table, 8, 12, 20)
    assert both.shape == (1, 3, 20, 20) and one_way.shape == (3, 20)
    for query, key in ((0, 0), (4, 19), (19, 4), (7, 6)):
        offset = torch.tensor(key - query)
        assert torch.equal(both[0, :, query, key], table[:, relative_bucket(offset, 8, 12, bidirectional=True)])
        distance = abs(query - key)
        own = table[:, relative_bucket(torch.tensor(-distance), 8, 12, bidirectional=False)]
        assert torch.equal(one_way[:, distance], own)
    seen = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    mask = biased(both, seen)
    assert torch.equal(mask[0, 1, 5, 3], both[0, 1, 5, 3]) and mask[0, 1, 3, 5] == torch.finfo(mask.dtype).min
    assert biased(both, None) is both


def test_filling_has_the_first_row_and_the_first_token_too() -> None:
    device, padding = torch.device("cpu"), torch.tensor([0, 3])
    assert table_rows(0, 5, padding, 2, 2, device).tolist() == [[2, 3, 4, 5, 6], [2, 2, 2, 2, 3]]
    assert table_rows(4, 2, None, 0, 3, device).tolist() == [[4, 5]] * 3
