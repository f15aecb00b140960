"""Quantised layers of a GPU: numbers on a CPU, where torch has the same operators; shapes and dtypes on a fake GPU."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.quantized import SCHEMES, Scheme, quantize_linear, rounded
from engine.kernels.quantized_gpu import GpuQuantized, int4_operands
from engine.planner.cells import PRODUCT_OPERATORS

SHAPES = ((16, 16), (3, 5), (130, 77), (65, 515))
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_cpu(weight: Tensor, bias: Tensor | None, scheme: Scheme) -> GpuQuantized:
    values, scales = rounded(weight, scheme)
    return GpuQuantized(values, scales, (len(weight), weight.shape[1]), bias, scheme, weight.dtype)


@pytest.mark.parametrize("scheme", ("int8", "int8_dynamic"))
@pytest.mark.parametrize("dtype", tuple(ROUNDING))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_of_bytes_are_right(outputs: int, inputs: int, dtype: torch.dtype, scheme: Scheme) -> None:
    weight, bias = numbers(outputs, inputs, dtype=dtype), numbers(outputs, dtype=dtype, seed=1)
    values, scales = rounded(weight, scheme)
    for rows in (1, 16, 17, 33, 40):
        x = numbers(rows, inputs, dtype=dtype, seed=rows)
        x[0, 0] = x[0].abs().max() * 1.5  # its lower byte at the end of its range
        steps = x.double().abs().amax(dim=1, keepdim=True) / (127 if scheme == "int8_dynamic" else 32_639)
        exact = x.double() @ (values.double() * scales.double()).T
        may_differ = 0.501 * steps * (values.double() * scales.double()).abs().sum(dim=1)
        for one in (None, bias):
            wanted = exact if one is None else exact + one.double()
            y = on_cpu(weight, one, scheme)(x)
            assert y.dtype is dtype and y.shape == wanted.shape
            sizes = x.double().abs() @ values.double().abs().T * scales.double().T
            assert ((y.double() - wanted).abs() <= may_differ + ROUNDING[dtype] * wanted.abs() + 1e-6 * sizes).all()


def test_words_at_the_middle_between_two_bytes_fit() -> None:
    weight = torch.eye(16)
    x = torch.arange(-32_639, 32_640, dtype=torch.float32)[:, None].repeat(1, 16)
    x[:, 15] = 32_639  # so that every other number is itself in steps
    y = on_cpu(weight, None, "int8")(x)
    assert torch.allclose(y, x, rtol=1e-6, atol=0.01)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_float8_products_are_right(outputs: int, inputs: int) -> None:
    weight, bias = numbers(outputs, inputs, dtype=torch.bfloat16), numbers(outputs, dtype=torch.bfloat16, seed=1)
    x = numbers(5, inputs, dtype=torch.bfloat16, seed=2)
    y, reference = on_cpu(weight, bias, "float8")(x), quantize_linear(weight, bias, "float8")(x)
    sizes = x.float().abs() @ weight.float().abs().T
    assert ((y - reference).abs() <= 2.0**-7 * reference.abs() + 2.0**-8 * sizes).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int4_operands_are_those_that_torch_multiplies(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = numbers(outputs, inputs, dtype=dtype)
    values, scales = rounded(weight, "int4")
    halves, both = int4_operands(values, scales)
    width = halves.shape[1] * 2
    assert (halves.dtype, both.dtype, both.shape[1:]) == (torch.uint8, torch.bfloat16, (len(halves), 2))
    assert len(halves) % 8 == 0 and width % 128 == 0 and both.is_contiguous()
    # The CPU's operator takes the same scales, and the numbers one by one; it wants multiples of 16 outputs.
    spare = -len(halves) % 16
    one_by_one = torch.stack((halves >> 4, halves & 15), dim=-1).flatten(1).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        torch.nn.functional.pad(one_by_one, (0, 0, 0, spare)), 1
    )
    x = numbers(4, inputs, dtype=torch.bfloat16, seed=3)
    rows = torch.nn.functional.pad(x, (0, width - inputs))
    scale_pairs = torch.nn.functional.pad(both, (0, 0, 0, spare))
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, 32, scale_pairs)[:, :outputs]
    wide = (values.float() * scales.float()).flatten(1)[:, :inputs]
    assert torch.allclose(y.float(), x.float() @ wide.T, rtol=0.02, atol=0.02 * float(wide.abs().sum(dim=1).max()) / 8)


VIEWS = re.compile(r"(prim|aten)\.(device|t|view|_unsafe_view|reshape|slice|narrow|alias|detach|unsqueeze)\b")
"""Operators without a kernel of their own."""


class Calls(TorchDispatchMode):
    """Sees every operator; the largest result, and the shapes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.names: list[str] = []
        self.products: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and "t." not in str(func):
            self.largest = max(self.largest, result.numel())
        self.names.append(str(func))
        if "mm" in str(func):
            self.products.append((str(func), tuple(args[0].shape), tuple(args[1].shape)))
        return result


OPERATORS = {"int8": "_int_mm", "int8_dynamic": "_int_mm", "int4": "_weight_int4pack_mm", "float8": "_scaled_mm"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", ((1,), (1, 1), (8, 1), (2, 40)))
def test_a_gpu_multiplies_the_few_bits_and_never_widens_the_weight(scheme: Scheme, shape: tuple[int, ...]) -> None:
    outputs, inputs = 2050, 1100
    with FakeTensorMode():
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        bias = torch.empty(outputs, dtype=torch.bfloat16, device="cuda")
        layer = quantize_linear(weight.split([2000, 50]), bias, scheme)
        assert layer.path == f"torch_{scheme}" and layer.stored is not None and layer.stored.device.type == "cuda"
        with Calls() as calls:
            y = layer(torch.empty(*shape, inputs, dtype=torch.bfloat16, device="cuda"))
    assert (y.shape, y.dtype, y.device.type) == ((*shape, outputs), torch.bfloat16, "cuda")
    assert calls.largest < outputs * inputs / 4
    ((name, left, right),) = calls.products
    assert OPERATORS[scheme] in name
    if scheme.startswith("int8"):  # what cuBLAS demands
        assert left[0] > 16 and not any(size % 8 for size in (*left, *right))
    if scheme == "float8":
        assert not any(size % 16 for size in (left[1], *right))
    bytes_each = 0.625 if scheme == "int4" else 1.0  # scales and zero points of int4: 4 bytes for 32 weights
    assert bytes_each <= layer.nbytes / (outputs * inputs) < bytes_each * 1.08


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_planner_counts_the_operators_beside_a_product(scheme: Scheme) -> None:
    with FakeTensorMode():
        layer = quantize_linear(torch.empty(64, 128, dtype=torch.bfloat16, device="cuda"), None, scheme)
        x = torch.empty(1, 1, 128, dtype=torch.bfloat16, device="cuda")
        with Calls() as calls:
            layer(x)
    assert len([name for name in calls.names if not VIEWS.match(name)]) - 1 == PRODUCT_OPERATORS[scheme], calls.names


@pytest.mark.parametrize("scheme", ("int8", "int8_dynamic"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_bytes_are_multiplied_for_any_dtype(scheme: Scheme, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        layer = quantize_linear(torch.empty(64, 48, dtype=dtype, device="cuda"), None, scheme)
        assert layer(torch.empty(3, 48, dtype=dtype, device="cuda")).dtype is dtype


@pytest.mark.parametrize("scheme", ("int8", "int8_dynamic", "float8"))
def test_a_share_of_the_outputs_are_those_rows_of_the_whole(scheme: Scheme) -> None:
    weight, x = numbers(96, 64, dtype=torch.bfloat16), numbers(3, 64, dtype=torch.bfloat16, seed=1)
    whole = on_cpu(weight, None, scheme)(x)
    for first in (0, 48):
        assert torch.equal(on_cpu(weight[first : first + 48], None, scheme)(x), whole[:, first : first + 48])


@pytest.mark.parametrize("scheme", ("int8", "int8_dynamic", "float8"))
def test_shares_of_the_inputs_add_up(scheme: Scheme) -> None:
    weight, x = numbers(96, 128), numbers(3, 128, seed=1)
    weight, x = (weight.bfloat16(), x.bfloat16()) if scheme == "float8" else (weight, x)
    parts = [
        on_cpu(weight[:, first : first + 64].contiguous(), None, scheme)(x[:, first : first + 64]) for first in (0, 64)
    ]
    exact = x.double() @ weight.double().T
    error = (parts[0].double() + parts[1].double() - exact).norm() / exact.norm()
    assert error < {"int8": 0.01, "int8_dynamic": 0.02, "float8": 0.06}[scheme]


def test_a_shape_that_is_not_the_layers_is_refused() -> None:
    layer: Callable[[Tensor], Tensor] = on_cpu(numbers(32, 64), None, "int8")
    with pytest.raises(ValueError, match=r"wanted \[\.\.\., 64\] torch\.float32"):
        layer(torch.ones(1, 8))
    assert layer(torch.ones(0, 64)).shape == (0, 32)
