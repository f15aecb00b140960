"""Norms and activations of the families against torch's, which they round as; the rest is in test_engine_kernels.py."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import operators
from engine.kernels.build import load_library

DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = (3, 5, 16, 33, 768)


@pytest.fixture(autouse=True, params=["on", "avx2", "off"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RANKWISE_KERNELS", request.param)
    operators._library.cache_clear()
    if request.param != "off" and load_library(operators._SOURCE, "-ffp-contract=off") is None:
        pytest.skip("there is no C compiler")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(before)
    operators._library.cache_clear()


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_like_torch(got: Tensor, expected: Tensor, equal_share: float = 0.999) -> None:
    """In float32 within some roundings of the largest value; in bfloat16 almost always the same bits."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6 * max(1.0, float(expected.abs().max())))
    else:
        torch.testing.assert_close(got, expected, rtol=2.0**-7, atol=1e-4)
        assert (got == expected).double().mean() >= equal_share


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_layer_norm_is_torch_s(width: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, update = numbers(4, 3, width, dtype=dtype), numbers(4, 3, width, dtype=dtype, seed=1)
    weight = numbers(width, dtype=dtype, seed=2)
    bias = numbers(width, dtype=dtype, seed=3) if with_bias else None

    def norm(hidden: Tensor) -> Tensor:
        return functional.layer_norm(hidden, (width,), weight, bias, 1e-5)

    assert_like_torch(operators.layer_norm(x, weight, bias, 1e-5), norm(x), 0.99)
    assert_like_torch(operators.layer_norm(x[:, ::2], weight, bias, 1e-5), norm(x[:, ::2]), 0.99)
    both, normed = operators.add_layer_norm(x, update, weight, bias, 1e-5)
    assert torch.equal(both, x + update)
    assert_like_torch(normed, norm(x + update), 0.99)


def test_a_layer_norm_of_rows_far_from_zero_keeps_its_digits() -> None:
    x = numbers(2, 64, dtype=torch.float32) + 1000
    exact = functional.layer_norm(x.double(), (64,))
    got = operators.layer_norm(x, torch.ones(64), None, 1e-5)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_weight_in_float32_is_multiplied_before_the_cast(width: int, dtype: torch.dtype) -> None:
    x, update = numbers(4, width, dtype=dtype), numbers(4, width, dtype=dtype, seed=1)
    weight = 1.0 + numbers(width, dtype=dtype, seed=2).float()

    def norm(hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(dtype)

    assert_like_torch(operators.rms_norm(x, weight, 1e-6), norm(x), 0.99)
    both, normed = operators.add_rms_norm(x, update, weight, 1e-6)
    assert torch.equal(both, x + update)
    assert_like_torch(normed, norm(x + update), 0.99)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads_are_norms_of_each(dtype: torch.dtype) -> None:
    heads, queries, keys = numbers(3, 2, 7, 24, dtype=dtype), numbers(24, dtype=dtype), numbers(24, dtype=dtype, seed=1)
    got = operators.rms_norm_heads(heads, queries, keys, 4, 2, 1e-6)
    assert torch.equal(got[:, :, :4], operators.rms_norm(heads[:, :, :4], queries, 1e-6))
    assert torch.equal(got[:, :, 4:], operators.rms_norm(heads[:, :, 4:6], keys, 1e-6))
    assert torch.equal(operators.rms_norm_heads(heads[:, ::2], queries, keys, 4, 2, 1e-6), got[:, ::2])


def gelu_new(x: Tensor) -> Tensor:
    """As transformers' NewGELUActivation computes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_new": gelu_new,
    "relu": functional.relu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMULAS)
def test_activations_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    formula = FORMULAS[name]
    for width in (1, 16, 33, 1000):
        x = numbers(3, 2, 2 * width, dtype=dtype)
        share = 0.95 if name in ("gelu", "gelu_tanh") else 1.0  # far from 0 both are 1e-7 off
        assert_like_torch(operators.activate(x, name), formula(x), share if width > 100 else 0.0)
        gated = formula(x[..., :width]) * x[..., width:]
        assert_like_torch(operators.activate(x, name, gated=True), gated, share if width > 100 else 0.0)


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_are_right_from_end_to_end(name: str) -> None:
    x = torch.linspace(-30, 30, 60001)
    exact = FORMULAS[name](x.double())
    torch.testing.assert_close(operators.activate(x, name).double(), exact, rtol=3e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "gelu_new", "relu"])
def test_what_is_no_number_stays_so(name: str) -> None:
    x = torch.tensor([float("nan"), 1.0, -100.0])
    y = operators.activate(x, name)
    assert y[0].isnan() and 0.8 < y[1] <= 1.0 and y[2].abs() < 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_with_a_number_is_torch_s(dtype: torch.dtype) -> None:
    x = numbers(3, 77, dtype=dtype)
    assert torch.equal(operators.multiply(x, 512**-0.5), x * 512**-0.5)


@pytest.mark.parametrize("factor", [1.0, -0.3, 1e-3, 1.7, 1e-30])
def test_every_number_of_bfloat16_is_rounded_as_torch_rounds(factor: float) -> None:
    """To the last bit, denormal numbers and infinities too; of what is no number the pattern may be another."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    expected, rounded = (every.float() * factor).bfloat16(), operators.multiply(every, factor)
    is_number = ~expected.isnan()
    assert torch.equal(rounded.isnan(), ~is_number)
    assert torch.equal(rounded[is_number].view(torch.int16), expected[is_number].view(torch.int16))
    finite = expected[expected.isfinite() & (expected != 0)].abs()
    assert finite.min() < 2.0**-126 and expected.isinf().any()  # both are among them
