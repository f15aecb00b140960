"""The decode step's attention in C against torch's operators, over head widths, groups, windows and filling."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import DecodeAttention, bias_table, has_decode_attention, stored_width
from engine.kernels.build import unavailable_reason
from engine.models.llama import rotate

pytestmark = pytest.mark.usefixtures("one_thread")

_CAPACITY = 40


class Case:
    """A cache with numbers up to `position`, and the new heads of each sequence."""

    def __init__(self, dtype: torch.dtype, batch: int, kv_heads: int, group: int, width: int, position: int) -> None:
        torch.manual_seed(width + position)
        self.batch, self.kv_heads, self.group, self.width, self.position = batch, kv_heads, group, width, position
        self.store = torch.randn(2, 2, batch, kv_heads, _CAPACITY, width).to(dtype)
        self.store[..., position:, :] = float("nan")  # what was never written must not be read
        self.cos, self.sin = torch.randn(2, _CAPACITY, width).to(dtype)
        self.merged = torch.randn(batch, (group + 2) * kv_heads * width).to(dtype)

    def run(self, window: int, padding: Tensor | None) -> Tensor:
        stride, queries = self.merged.shape[1], self.group * self.kv_heads
        angles = (self.cos, self.sin)
        step = DecodeAttention(self.store, self.batch, queries, self.width**-0.5, angles, (stride, stride))
        step.begin(self.position, padding)
        values = (queries + self.kv_heads) * self.width * self.merged.element_size()
        return step.run(1, self.merged.data_ptr(), self.merged.data_ptr() + values, window)[:, 0]

    def expected(self, window: int, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result in float64, and the layer's cache afterwards."""
        filling = torch.zeros(self.batch, dtype=torch.int64) if padding is None else padding
        heads = self.merged.view(self.batch, -1, self.width)
        queries, turning = self.group * self.kv_heads, (self.group + 1) * self.kv_heads
        places = self.position - filling
        turned = rotate(heads[:, :turning], self.cos[places][:, None], self.sin[places][:, None])
        after = self.store[:, 1].clone()
        after[0, :, :, self.position], after[1, :, :, self.position] = turned[:, queries:], heads[:, turning:]
        positions = torch.arange(_CAPACITY)
        start = max(0, self.position + 1 - window) if window else 0
        seen = (positions <= self.position) & (positions >= start) & (positions >= filling[:, None])
        keys, values = after.nan_to_num().double()
        grouped = turned[:, :queries].view(self.batch, self.kv_heads, self.group, self.width).double()
        mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[:, None, None])
        return mixed.reshape(self.batch, -1), after


@pytest.mark.parametrize("mode", ["on", "avx2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_it_equals_torch_s_operators(
    mode: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_KERNELS", mode)
    worked = 0
    for kv_heads, group in [(2, 4), (1, 1), (2, 2), (1, 7), (3, 5)]:
        for width in (16, 48, 64, 80, 128):
            for position, window in [(0, 0), (17, 0), (17, 9), (39, 8), (5, 9)]:
                for padding in (None, torch.tensor([0, position, position // 2])):
                    case = Case(dtype, 3, kv_heads, group, width, position)
                    if not has_decode_attention(case.store):
                        pytest.skip(unavailable_reason() or "no such path here")
                    expected, after = case.expected(window, padding)
                    got = case.run(window, padding)
                    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
                    assert torch.equal(case.store[:, 1, :, :, : position + 1], after[:, :, :, : position + 1])
                    assert case.store[:, 0, :, :, position].isnan().all(), "another layer was written"
                    worked += 1
    assert worked == 250


def test_a_sequence_gets_the_same_bits_whatever_is_beside_it() -> None:
    case = Case(torch.bfloat16, 3, 2, 4, 64, 21)
    if not has_decode_attention(case.store):
        pytest.skip(unavailable_reason() or "no such path here")
    together = case.run(0, torch.tensor([0, 5, 9]))
    case.batch, case.store, case.merged = 1, case.store[:, :, 1:2].contiguous(), case.merged[1:2].contiguous()
    assert torch.equal(case.run(0, torch.tensor([5]))[0], together[1])


def test_where_it_cannot_work_it_says_so() -> None:
    store = torch.empty(2, 1, 1, 1, 4, 64)
    assert not has_decode_attention(store.half())
    assert not has_decode_attention(store[..., :12])
    assert not has_decode_attention(store.to("meta"))


@pytest.mark.parametrize("mode", ["on", "avx2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (2, 2), (1, 7)])
def test_heads_that_do_not_turn_with_a_bias_for_each_distance(
    mode: str, dtype: torch.dtype, tolerance: float, kv_heads: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_KERNELS", mode)
    queries, scale = kv_heads * group, 0.3
    for position, padding in ((0, None), (17, None), (39, torch.tensor([0, 39, 20]))):
        case = Case(dtype, 3, kv_heads, group, 64, position)
        if not has_decode_attention(case.store):
            pytest.skip(unavailable_reason() or "no such path here")
        by_distance = torch.randn(queries, _CAPACITY)
        heads = case.merged.view(3, -1, 64)
        after = case.store[:, 1].nan_to_num()
        after[0, :, :, position], after[1, :, :, position] = (
            heads[:, queries : queries + kv_heads],
            heads[:, -kv_heads:],
        )
        places = torch.arange(_CAPACITY)
        filling = torch.zeros(3, dtype=torch.int64) if padding is None else padding
        seen = (places <= position) & (places >= filling[:, None])
        mask = by_distance[:, (position - places).clamp(min=0)].view(1, kv_heads, group, -1)
        mask = mask.masked_fill(~seen[:, None, None], float("-inf")).double()
        own, keys, values = (
            heads[:, :queries].view(3, kv_heads, group, 64).double(),
            after[0].double(),
            after[1].double(),
        )
        expected = functional.scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale)
        stride = case.merged.shape[1]
        step = DecodeAttention(case.store, 3, queries, scale, None, (stride, stride), bias_table(by_distance))
        step.begin(position, padding)
        address = case.merged.data_ptr() + (queries + kv_heads) * 64 * case.merged.element_size()
        got = step.run(1, case.merged.data_ptr(), address)
        torch.testing.assert_close(got.double().view_as(expected), expected, rtol=0, atol=tolerance)
        assert torch.equal(case.store[:, 1, :, :, : position + 1], after[:, :, :, : position + 1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_keys_and_values_of_a_source_stay_as_they_are(dtype: torch.dtype, tolerance: float) -> None:
    case = Case(dtype, 3, 2, 1, 64, 30)
    if not has_decode_attention(case.store):
        pytest.skip(unavailable_reason() or "no such path here")
    before, queries = case.store.clone(), torch.randn(3, 2, 64).to(dtype)
    step = DecodeAttention(case.store, 3, 2, 1.0, strides=(128, 0), fixed=True)
    for length, padding in ((30, None), (12, torch.tensor([0, 3, 11]))):
        step.begin(length - 1, padding)
        got = step.run(1, queries.data_ptr(), 0).view(3, 2, 1, 64)
        filling = torch.zeros(3, dtype=torch.int64) if padding is None else padding
        mask = (torch.arange(length) >= filling[:, None])[:, None, None]
        keys, values = case.store[:, 1, :, :, :length].double()
        expected = functional.scaled_dot_product_attention(queries[:, :, None].double(), keys, values, mask, scale=1.0)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
    assert torch.equal(case.store.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("mode", ["on", "avx2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("width", [4, 20, 100])
def test_heads_narrower_than_the_rows_of_the_cache(
    mode: str, dtype: torch.dtype, tolerance: float, turns: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWISE_KERNELS", mode)
    for group, position in ((1, 0), (3, 17), (7, 39)):
        case = Case(dtype, 3, 2, group, width, position)
        if not turns:
            case.cos, case.sin = torch.ones_like(case.cos), torch.zeros_like(case.sin)
        expected, after = case.expected(0, None)
        rows = stored_width(width, case.store)
        if rows == width:
            pytest.skip(unavailable_reason() or "no such path here")
        store = torch.zeros(2, 2, 3, 2, _CAPACITY, rows, dtype=dtype)
        store[..., :width] = case.store
        angles, stride = (case.cos, case.sin) if turns else None, case.merged.shape[1]
        step = DecodeAttention(store, 3, 2 * group, width**-0.5, angles, (stride, stride), width=width)
        step.begin(position, None)
        values = case.merged.data_ptr() + 2 * (group + 1) * width * case.merged.element_size()
        got = step.run(1, case.merged.data_ptr(), values)[:, 0]
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
        assert torch.equal(store[:, 1, :, :, : position + 1, :width], after[:, :, :, : position + 1])
        assert (store[:, 1, ..., width:] == 0).all(), "what a row has beyond the head stays zeros"


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    store = torch.randn(2, 1, 4, 8, 200, 64)
    merged, angles = torch.randn(4, 32 * 64), (torch.randn(200, 64), torch.randn(200, 64))
    if not has_decode_attention(store):
        pytest.skip(unavailable_reason() or "no such path here")
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            step = DecodeAttention(store, 4, 16, 0.125, angles, (merged.shape[1], merged.shape[1]))
            step.begin(180, None)
            found.append(step.run(0, merged.data_ptr(), merged.data_ptr()))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
