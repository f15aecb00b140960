"""Memory in huge pages: alignment and zeros."""

import torch

from engine.kernels.memory import aligned_bytes, huge_zeros


def test_large_memory_starts_a_huge_page() -> None:
    assert aligned_bytes(5 << 20).data_ptr() % (2 << 20) == 0
    small = aligned_bytes(1000)
    assert small.data_ptr() % 64 == 0 and small.shape == (1000,)


def test_zeros_are_those_of_torch() -> None:
    for shape in ((3, 5), (2, 1024, 1024), (0, 4)):
        for dtype in (torch.float32, torch.bfloat16):
            zeros = huge_zeros(shape, dtype, torch.device("cpu"))
            assert zeros.is_contiguous() and zeros.dtype is dtype
            assert torch.equal(zeros, torch.zeros(shape, dtype=dtype))
    assert huge_zeros((2, 1024, 1024), torch.float32, torch.device("cpu")).data_ptr() % (2 << 20) == 0
