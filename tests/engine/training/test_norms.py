"""Which parts of a gradient its norm is summed over."""

import torch

from engine.training.strategies.norms import _pieces


def test_a_gradient_on_a_gpu_is_one_part() -> None:
    """Torch's kernel divides it itself; views of a model's gradients took the host longer than a step of it.

    A tensor without memory stands for one of a GPU.
    """
    assert len(_pieces(torch.empty(1 << 20, device="meta"))) == 1
    assert len(_pieces(torch.empty(1 << 20))) == 16
    assert len(_pieces(torch.empty(1 << 10, 1 << 10).t())) == 1
