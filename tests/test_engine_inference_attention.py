"""The decode step's attention in C against torch's operators, over head widths, groups, windows and filling."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.attention import DecodeAttention, has_decode_attention
from engine.kernels.build import unavailable_reason
from engine.llama import rotate

_CAPACITY = 40


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """A cache with numbers up to `position`, and the new heads of each sequence."""

    def __init__(self, dtype: torch.dtype, batch: int, kv_heads: int, group: int, width: int, position: int) -> None:
        torch.manual_seed(width + position)
        self.batch, self.kv_heads, self.group, self.width, self.position = batch, kv_heads, group, width, position
        self.store = torch.randn(2, 2, batch, kv_heads, _CAPACITY, width).to(dtype)
        self.store[..., position:, :] = float("nan")  # what was never written must not be read
        self.cos, self.sin = torch.randn(2, _CAPACITY, width).to(dtype)
        self.merged = torch.randn(batch, (group + 2) * kv_heads * width).to(dtype)

    def run(self, start: int, padding: Tensor | None) -> Tensor:
        stride, queries = self.merged.shape[1], self.group * self.kv_heads
        step = DecodeAttention(self.store, self.cos, self.sin, queries, self.batch, stride, stride)
        step.begin(self.position, padding)
        values = (queries + self.kv_heads) * self.width * self.merged.element_size()
        return step.run(1, self.merged.data_ptr(), self.merged.data_ptr() + values, start)[:, 0]

    def expected(self, start: int, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result in float64, and the layer's cache afterwards."""
        filling = torch.zeros(self.batch, dtype=torch.int64) if padding is None else padding
        heads = self.merged.view(self.batch, -1, self.width)
        queries, turning = self.group * self.kv_heads, (self.group + 1) * self.kv_heads
        places = self.position - filling
        turned = rotate(heads[:, :turning], self.cos[places][:, None], self.sin[places][:, None])
        after = self.store[:, 1].clone()
        after[0, :, :, self.position], after[1, :, :, self.position] = turned[:, queries:], heads[:, turning:]
        positions = torch.arange(_CAPACITY)
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
            for position, start in [(0, 0), (17, 0), (17, 9), (39, 31)]:
                for padding in (None, torch.tensor([0, position, position // 2])):
                    case = Case(dtype, 3, kv_heads, group, width, position)
                    if not has_decode_attention(case.store):
                        pytest.skip(unavailable_reason() or "no such path here")
                    expected, after = case.expected(start, padding)
                    got = case.run(start, padding)
                    torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
                    assert torch.equal(case.store[:, 1, :, :, : position + 1], after[:, :, :, : position + 1])
                    assert case.store[:, 0, :, :, position].isnan().all(), "another layer was written"
                    worked += 1
    assert worked == 200


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
    torch.set_num_threads(2)
    try:
        assert not has_decode_attention(store), "torch divides the work among threads, this does not"
    finally:
        torch.set_num_threads(1)
