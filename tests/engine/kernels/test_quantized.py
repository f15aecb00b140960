"""Quantised linear layers against float64, in every way that this machine can run them."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kernels import quantized
from engine.kernels.linear import PackedLinear
from engine.kernels.quantized import (
    BLOCK,
    SCHEMES,
    Scheme,
    quantize_linear,
    rounded,
    rounded_to_4_bits,
    rounded_to_8_bits,
)

pytestmark = pytest.mark.usefixtures("torch_threads")

MODES = ("on", "avx2", "off")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (3, 5), (64, 64), (65, 16), (130, 77), (200, 1026))
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture
def use_mode(monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> Iterator[Callable[[str], None]]:
    def use(name: str) -> None:
        monkeypatch.setenv("RANKWISE_KERNELS", name)
        quantized._library.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(kernel_cache))
    yield use
    quantized._library.cache_clear()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, use_mode: Callable[[str], None]) -> str:
    use_mode(request.param)
    return str(request.param)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    """The weight that a layer multiplies with, float64."""
    values, scales = rounded(weight, scheme)
    return (values.double() * scales.double()).flatten(1)[:, : weight.shape[1]]


def assert_right(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, scheme: Scheme, path: str) -> None:
    """Within one rounding of the result, float32's on the way, and what rounding the rows of x may do."""
    wide, rounded = x.double(), as_rounded(weight, scheme)
    most = wide.abs().amax(dim=-1, keepdim=True)
    steps = wide / most * 127
    if scheme == "int8_dynamic":
        may_differ = (((steps % 1) - 0.5).abs() < 1e-4) * most / 127  # halves may go either way
        wide = steps.round() * most / 127
    elif scheme == "float8":
        wide = (wide.float() / (most.float() / 448)).to(torch.float8_e4m3fn).double() * most / 448
        may_differ = wide.abs() * 2.0**-7  # one in the middle between two floats of 3 bits may go either way
    else:
        may_differ = (most / (2 * 32639) if path == "avx512_vnni" else 0 * most).expand(wide.shape)
    exact = wide @ rounded.T + (0 if bias is None else bias.double())
    sizes = wide.abs() @ rounded.abs().T + (0 if bias is None else bias.double().abs())
    allowed = ROUNDING[y.dtype] * exact.abs() + (weight.shape[1] + 8) * 2.0**-24 * sizes
    allowed += may_differ @ rounded.abs().T
    if path == "torch" and y.dtype is not torch.float32:
        allowed += 4 * ROUNDING[y.dtype] * 2.0**-8 * sizes
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert ((y.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_right(mode: str, outputs: int, inputs: int, dtype: torch.dtype, scheme: Scheme) -> None:
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    for one in (None, bias):
        layer = quantize_linear(weight, one, scheme)
        for rows in (1, 2, 3, 4, 5, 6, 7, 13):
            x = numbers(rows, inputs, dtype=dtype, seed=rows)
            assert_right(layer(x), x, weight, one, scheme, layer.path)


def test_8_bits_lose_half_a_step_at_most() -> None:
    weight = numbers(50, 300)
    values, scales = rounded_to_8_bits(weight)
    assert values.dtype is torch.int8 and int(values.max()) == 127 and scales.shape == (50, 1)
    assert ((values * scales - weight).abs() <= scales * 0.5001).all()


def test_4_bits_do_better_than_the_largest_weight_at_the_end_of_the_scale() -> None:
    weight = numbers(200, 320)
    values, scales = rounded_to_4_bits(weight)
    assert scales.dtype is torch.bfloat16 and int(values.min()) == -8 and int(values.max()) == 7
    blocks = weight.view(200, -1, BLOCK)
    error = (values * scales.float() - blocks).square().sum(dim=2)
    plain = blocks.abs().amax(dim=2, keepdim=True) / 7
    plain_error = ((blocks / plain).round() * plain - blocks).square().sum(dim=2)
    assert error.sum() < 0.75 * plain_error.sum()
    assert (error.sum() / weight.square().sum()).sqrt() < 0.083


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("on", "avx2"))
def test_a_row_has_the_same_bits_in_any_batch(
    name: str, dtype: torch.dtype, scheme: Scheme, use_mode: Callable[[str], None], torch_threads: Callable[[int], None]
) -> None:
    use_mode(name)
    layer = own(quantize_linear(numbers(150, 515, dtype=dtype), numbers(150, dtype=dtype, seed=1), scheme))
    x = numbers(20, 515, dtype=dtype, seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, 21):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
        assert torch.equal(layer(x[20 - rows :]), alone[20 - rows :]), rows
    torch_threads(2)
    assert torch.equal(layer(x), alone)


def own(layer: PackedLinear) -> PackedLinear:
    if layer.path == "torch":
        pytest.skip("no kernel of ours here")
    return layer


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("heights", ((130,), (64, 16, 16), (5, 60, 70, 1)))
def test_parts_are_rounded_row_by_row(
    mode: str, heights: tuple[int, ...], scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = numbers(sum(heights), 301, dtype=torch.bfloat16)
    parts = list(wide[:, 3:80].split(heights))
    x = numbers(9, 77, dtype=torch.bfloat16, seed=2)
    expected = quantize_linear(wide[:, 3:80].contiguous(), None, scheme)(x)
    assert torch.equal(quantize_linear(parts, None, scheme)(x), expected)
    monkeypatch.setattr(quantized, "_ROUNDED_AT_ONCE", 1)  # as few rows at a time as can be
    assert torch.equal(quantize_linear(parts, None, scheme)(x), expected)
    turned = wide[:, 3:80].t().contiguous().t()  # as some checkpoints have them
    assert torch.equal(quantize_linear(turned, None, scheme)(x), expected)
    # Some of the outputs are those rows of the whole: a share of a column-parallel rank.
    some = quantize_linear(wide[:70, 3:80], None, scheme)(x)
    assert torch.equal(some, expected[:, :70]) or mode == "off"
    assert torch.allclose(some, expected[:, :70], rtol=0.02, atol=0.1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_and_weights_of_zeros_and_what_is_no_number(mode: str, scheme: Scheme) -> None:
    weight = numbers(70, 40).abs()
    weight[3] = 0
    bias = numbers(70, seed=1)
    layer = quantize_linear(weight, bias, scheme)
    x = torch.ones(5, 40)
    x[1], x[2, 4], x[3, 4], x[4] = 0, float("nan"), float("inf"), 1e-38
    y = layer(x)
    assert torch.equal(y[1], bias) and y[0].isfinite().all() and torch.equal(y[0, 3], bias[3])
    assert torch.allclose(y[4], bias)
    assert y[2].isnan().all() and not y[3, :3].isfinite().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sums_of_the_largest_values_stay_right(mode: str, scheme: Scheme) -> None:
    inputs = 70_000
    layer = quantize_linear(torch.ones(2, inputs), None, scheme)
    for value in (1.0, -1.0):
        assert torch.allclose(layer(torch.full((1, inputs), value)), torch.tensor(value * inputs), rtol=1e-4)
    with pytest.raises(ValueError, match="at most 131072 inputs, this weight has 131073"):
        quantize_linear(torch.ones(1, 131_073), None, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_of_any_form_and_misuse(mode: str, scheme: Scheme) -> None:
    weight = numbers(32, 64)
    layer = quantize_linear(weight, None, scheme)
    x = numbers(3, 5, 128, seed=1)
    y = layer(x[:, ::2, :64])
    assert y.shape == (3, 3, 32) and layer(x[0, 0, :64]).shape == (32,) and layer(x[:0, 0, :64]).shape == (0, 32)
    assert torch.allclose(y, layer(x[:, ::2, :64].contiguous()), atol=1e-5)
    for wrong in (torch.ones(1, 8), torch.ones(1, 64, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"wanted \[\.\.\., 64\] torch\.float32"):
            layer(wrong)


def test_what_a_layer_says_of_itself(mode: str) -> None:
    weight, bias = numbers(128, 1024, dtype=torch.bfloat16), numbers(128, dtype=torch.bfloat16)
    layers = {scheme: quantize_linear(weight, bias, scheme) for scheme in SCHEMES}
    path = layers["int8"].path
    assert path == "torch" if mode == "off" else path == "avx2" or mode == "on"
    bias_bytes = 128 * (2 if path == "torch" else 4)
    assert layers["int8"].nbytes == layers["int8_dynamic"].nbytes == 128 * 1024 + 128 * 4 + bias_bytes
    assert layers["int4"].nbytes == 128 * 1024 // 2 + 128 * 32 * 2 + bias_bytes
    for layer in layers.values():
        assert (layer.out_features, layer.in_features, layer.dtype) == (128, 1024, torch.bfloat16)
        assert layer.stored is not None
        before = layer(weight[:2])
        layer.finalize()
        assert torch.equal(layer(weight[:2]), before)


def test_the_weight_may_change_after_quantising(mode: str) -> None:
    weight = numbers(64, 64)
    layer = quantize_linear(weight, None, "int8")
    before = layer(torch.ones(1, 64))
    weight.zero_()
    assert torch.equal(layer(torch.ones(1, 64)), before) and before.abs().max() > 0


def test_a_processor_without_instructions_for_bytes_keeps_the_offset_of_none(use_mode: Callable[[str], None]) -> None:
    use_mode("avx2")
    library = quantized._library()
    if library is None:
        pytest.skip("no compiler")
    assert isinstance(library, ctypes.CDLL) and quantized.own_path() == "avx2"
    assert (library.quantized_offset(8), library.quantized_offset(4)) == (0, 8)
