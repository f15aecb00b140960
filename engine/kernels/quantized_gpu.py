"""Quantised linear layers on the tensor cores of an NVIDIA GPU, where the weight is read in its few bits.

    layer = GpuQuantized(values, scales, shape, bias, "int8", torch.bfloat16)     # values as rounded, see quantized.py

The rounded weights are those of every other path. int8 and int8_dynamic: `torch._int_mm`, exact in 32 bits; a row of
inputs becomes fixed point, 16 bits as two rows of bytes, or 8 bits. int4: `_weight_int4pack_mm` with one scale for each
32 inputs and the zero point 0, so that it multiplies (number - 8) x scale. float8: `_scaled_mm` with a scale for each
row and each output. No call copies to the host or depends on values, so that CUDA graphs can record it.

Sizes are padded with zeros to what these kernels demand (their checks in torch 2.13): `_int_mm` more than 16 rows and
multiples of 8, `_scaled_mm` multiples of 16, the int4 kernel 8 outputs and 128 inputs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.linear import PackedLinear

_BYTE_STEPS = 127
_WORD_STEPS = 256 * 127 + 127  # the largest number of two signed bytes
_LEAST_ROWS = 32  # more than 16, a multiple of 8
_INNER_TILES = 8  # of 16 inputs, in a tile of packed int4 weights
FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = torch.finfo(FLOAT8).max
_MOST = {"int8": float(_WORD_STEPS), "int8_dynamic": float(_BYTE_STEPS), "float8": LARGEST_FLOAT8}
"""That the largest input of a row becomes; a tensor of the layer, for the reason of `divided`."""
SMALLEST_SCALE = 1e-36  # below, a scale has no inverse in float32


class GpuQuantized(PackedLinear):
    """A layer of rounded weights: [..., in_features] -> [..., out_features] in `dtype`.

    values and scales: [out, in] int8 or float8 and [out, 1] float32; int4: [out, blocks, 32] in -8..7 and bfloat16
    [out, blocks, 1]. All on the layer's device, like the bias [out].
    """

    def __init__(
        self,
        values: Tensor,
        scales: Tensor,
        shape: tuple[int, int],
        bias: Tensor | None,
        scheme: str,
        dtype: torch.dtype,
    ) -> None:
        outputs, inputs = shape
        self._bias, self._scheme = bias, scheme
        if scheme == "int4":
            self._block = values.shape[2]
            halves, self._scales = int4_operands(values, scales)
            self._values = torch.ops.aten._convert_weight_to_int4pack(halves, _INNER_TILES)
            self._width = halves.shape[1] * 2
        else:
            self._values = functional.pad(values, (0, -inputs % 16, 0, -outputs % 16))
            self._scales = functional.pad(scales, (0, 0, 0, -outputs % 16)).t().contiguous()  # [1, out]
            self._width = self._values.shape[1]
        self._most = torch.full((), _MOST.get(scheme, 1.0), device=self._values.device)
        kept = [tensor for tensor in (self._values, self._scales, bias) if tensor is not None]
        super().__init__(shape, dtype, f"torch_{scheme}", sum(tensor.nbytes for tensor in kept), self._values)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not self.dtype or x.shape[-1] != self.in_features:
            wanted = f"[..., {self.in_features}] {self.dtype}"
            raise ValueError(f"wanted {wanted}, got {list(x.shape)} {x.dtype}")
        rows = x.reshape(-1, self.in_features)
        if self._width > self.in_features:
            rows = functional.pad(rows, (0, self._width - self.in_features))
        if self._scheme == "int4":
            y = torch.ops.aten._weight_int4pack_mm(rows.contiguous(), self._values, self._block, self._scales)
        elif self._scheme == "float8":
            y = self._float8(rows)
        else:
            y = self._bytes(rows) if self._scheme == "int8_dynamic" else self._words(rows)
        y = y.narrow(1, 0, self.out_features)
        y = (y if self._bias is None else y + self._bias).to(self.dtype)
        shaped: Tensor = y.reshape(*x.shape[:-1], self.out_features)
        return shaped

    def _bytes(self, rows: Tensor) -> Tensor:
        steps = _steps(rows, self._most)
        sums: Tensor = self._products((rows / steps).round_().to(torch.int8)) * steps * self._scales
        return sums

    def _words(self, rows: Tensor) -> Tensor:
        """Return products of inputs of 16 bits: value = 256 x high + low, each byte a row of its own."""
        steps = _steps(rows, self._most)
        words = (rows / steps).round_()
        high = torch.div(words + 128, 256, rounding_mode="floor")  # -127..127, so that the lower byte is -128..127
        low = torch.sub(words, high, alpha=256)
        both = self._products(torch.cat((high, low)).to(torch.int8)).to(torch.float32)
        high_sums, low_sums = both.narrow(0, 0, len(rows)), both.narrow(0, len(rows), len(rows))
        return torch.add(low_sums, high_sums, alpha=256) * steps * self._scales

    def _products(self, rows: Tensor) -> Tensor:
        """Return int32 [rows, out] of int8 rows."""
        count = len(rows)
        padded = functional.pad(rows, (0, 0, 0, max(_LEAST_ROWS - count, -count % 8)))
        return torch._int_mm(padded, self._values.t()).narrow(0, 0, count)

    def _float8(self, rows: Tensor) -> Tensor:
        steps = _steps(rows, self._most)
        rounded = (rows / steps).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8)
        return torch._scaled_mm(rounded, self._values.t(), scale_a=steps, scale_b=self._scales, out_dtype=self.dtype)


def int4_operands(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return what torch's int4 kernels read: uint8 [out, in / 2] and bfloat16 [blocks, out, 2].

    A byte holds two inputs, the first in its upper half, as numbers of 0 to 15; the last axis is scale and zero point.
    Outputs are padded to 8, inputs to 128.
    """
    outputs, blocks, block = values.shape
    spare = -blocks % (16 * _INNER_TILES // block)
    whole = functional.pad(values, (0, 0, 0, spare, 0, -outputs % 8)) + 8
    first, second = whole.to(torch.uint8).view(len(whole), -1, 2).unbind(-1)
    padded = functional.pad(scales.squeeze(2), (0, spare, 0, -outputs % 8)).t()
    return first << 4 | second, torch.stack((padded, torch.zeros_like(padded)), dim=-1)


def _steps(rows: Tensor, most: Tensor) -> Tensor:
    """Return the scale of each row [rows, 1] float32, with which its largest value becomes `most`; never zero."""
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, keepdim=True, dtype=torch.float32)
    steps: Tensor = (largest / most).clamp_(min=SMALLEST_SCALE)
    return steps


def divided(values: Tensor, by: float) -> Tensor:
    """Return float32 values / by with the same bits on every device.

    torch divides by a number on a GPU as it multiplies by the number's inverse, which is off by a bit now and then: a
    scale of weights, and thus a weight that is nearly between two steps, would be another than on a CPU. It divides by
    a tensor as IEEE 754 says.
    """
    return values / torch.full((), by, dtype=values.dtype, device=values.device)
