"""Linear layers whose weights are quantised: int8, int8 with int8 inputs, int4, float8 with float8 inputs.

    layer = quantize_linear(weight, bias, "int8")       # weight [out_features, in_features], or several, stacked
    y = layer(x)                                        # [..., in_features] -> [..., out_features], dtype of the weight
    layer.path                          # "avx512_vnni", "avx512", "avx2", "torch"; on a GPU "torch_int8", ...

Quantisation is defined here, in torch, for every path (`rounded`); the paths' products agree within rounding. The
kernels of `quantized.c` read half the bytes of bfloat16 (slightly over a quarter for int4) and are batch-invariant. The
path "torch" (float16 and float8 on a CPU, no compiler) dequantises at each call: it saves memory but no time. GPUs
never do so (`engine.kernels.quantized_gpu`).
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.build import load_library
from engine.kernels.linear import NativeLinear, PackedLinear, Packing
from engine.kernels.memory import aligned_bytes, into_huge_pages
from engine.kernels.quantized_gpu import FLOAT8, LARGEST_FLOAT8, SMALLEST_SCALE, GpuQuantized, divided

Scheme = Literal["int8", "int8_dynamic", "int4", "float8"]
SCHEMES: tuple[Scheme, ...] = ("int8", "int8_dynamic", "int4", "float8")
BLOCK = 32  # inputs that share a scale in int4
_SOURCE = Path(__file__).with_name("quantized.c")
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_MOST_INPUTS = 131_072  # above this, int8 sums exceed 32 bits
_ROUNDED_AT_ONCE = 1 << 18  # weights: a float32 part that fits the processor's cache
_ROUNDED_AT_ONCE_ON_GPU = 1 << 24  # 64 MiB in float32, of which rounding holds a few
_LARGEST = (-8.0, -8.5, -9.0, -7.5, -7.0)
"""Candidate values of a block's largest weight, in units of the scale, before clipping at -8: a finer scale is better
if the other weights gain more than the largest loses. The error of normally distributed weights is 9.7 % of their size
with the largest at 7, 8.6 % with it at -8, 8.2 % with the best of these five.
"""


def rounded_to_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [out, in] in -127..127 and float32 scales [out, 1]: value x scale is the weight, to the nearest step.

    One scale for each output, its largest weight over 127. A row of zeros has the scale 0; a row with a non-finite
    weight has a non-finite scale.
    """
    wide = weight.float()
    scales = divided(wide.abs().amax(dim=1, keepdim=True), 127)
    return (wide * _inverse(scales)).round_().clamp_(-127, 127).to(torch.int8), scales


def rounded_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [out, blocks, 32] in -8..7 and bfloat16 scales [out, blocks, 1]; inputs beyond the last are zero.

    The scale of a block is the one of a few that leaves the least squared error; each maps the block's largest weight
    to one of `_LARGEST`, so it has the other sign than that weight. It is rounded to bfloat16 before the weights are.
    """
    outputs, inputs = weight.shape
    wide = functional.pad(weight.float(), (0, -inputs % BLOCK)).view(outputs, -1, BLOCK)
    least, most = wide.aminmax(dim=2, keepdim=True)
    largest = torch.where(-least > most, least, most)
    best = scales = torch.empty(0)
    for steps in _LARGEST:
        tried = divided(largest, steps).bfloat16()
        step = tried.float()
        error = torch.mul(wide, _inverse(step)).round_().clamp_(-8, 7).mul_(step).sub_(wide)
        squares = error.square_().sum(dim=2, keepdim=True)
        if not len(best):
            best, scales = squares, tried
            continue
        scales = torch.where(squares < best, tried, scales)
        best = torch.minimum(squares, best)
    return (wide * _inverse(scales.float())).round_().clamp_(-8, 7).to(torch.int8), scales


def rounded_to_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8 (e4m3) [out, in] and float32 scales [out, 1]: one for each output, its largest weight over 448."""
    wide = weight.float()
    scales = divided(wide.abs().amax(dim=1, keepdim=True), LARGEST_FLOAT8)
    return (wide * _inverse(scales)).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8), scales


def rounded(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Return the numbers and scales of a weight [out, in] in a scheme; their product is what every path multiplies."""
    if scheme == "int4":
        return rounded_to_4_bits(weight)
    return rounded_to_float8(weight) if scheme == "float8" else rounded_to_8_bits(weight)


def _inverse(scales: Tensor) -> Tensor:
    """Return the inverse; zero for scales too small for a float32 inverse."""
    return torch.where(scales.abs() < SMALLEST_SCALE, 0.0, 1.0 / scales)


def quantize_linear(
    weight: Tensor | Sequence[Tensor], bias: Tensor | None, scheme: Scheme, packing: Packing = "finalized"
) -> PackedLinear:
    """Return a quantised copy of `weight` [out_features, in_features]; several weights are stacked by rows.

    `bias` [out_features] is unchanged. x and y have the dtype of the weight. int8: x keeps at least 16 bits.
    int8_dynamic, float8: each row of x is rounded to 8 bits, by its largest value, at each call. `packing` "quick" uses
    common pages first, as in `pack_linear`; nothing is memory-mapped. Rows are rounded in small groups, without a
    second copy. On a GPU the scheme must have a kernel (`configs.hardware.quantised_products`).

    Raises ValueError for more than 131,072 inputs, beyond which sums might leave 32 bits.
    """
    parts = [part.detach() for part in ([weight] if isinstance(weight, Tensor) else weight)]
    some, outputs = parts[0], sum(len(part) for part in parts)
    assert all(part.dim() == 2 and part.numel() and part.shape[1] == some.shape[1] for part in parts)
    assert bias is None or bias.shape == (outputs,), bias.shape
    if some.shape[1] > _MOST_INPUTS:
        raise ValueError(f"compression: {scheme} is for at most {_MOST_INPUTS} inputs, this weight has {some.shape[1]}")
    bias = None if bias is None else bias.detach().to(some.dtype)
    if some.device.type != "cpu":
        values, scales = _all_rounded(parts, scheme, _ROUNDED_AT_ONCE_ON_GPU)
        return GpuQuantized(values, scales, (outputs, some.shape[1]), bias, scheme, some.dtype)
    path = own_path() if some.dtype in _DTYPE_CODES and scheme != "float8" else ""
    if path:
        return _OwnQuantized(parts, bias, scheme, path, huge_pages=packing != "quick")
    return _TorchQuantized(parts, bias, scheme)


def own_path() -> str:
    """Return the instruction set of our kernel; empty if there is none."""
    library = _library()
    return "" if library is None else str(library.quantized_path().decode())


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        number, address = ctypes.c_int64, ctypes.c_void_p
        library.quantized_path.argtypes, library.quantized_path.restype = [], ctypes.c_char_p
        library.quantized_offset.argtypes, library.quantized_offset.restype = [number], number
        library.quantized_group.argtypes, library.quantized_group.restype = [], number
        library.quantized_run.argtypes = [address, address, address, number, number, address]
        library.quantized_run.restype = None
    return library


def _some_rows(parts: Sequence[Tensor], at_once: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows of all parts in order, at most `at_once` together, and the number of the first of them."""
    sizes = [len(part) for part in parts]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    for first in range(0, ends[-1], at_once):
        wanted = range(first, min(first + at_once, ends[-1]))
        pieces = []
        for part, end in zip(parts, ends, strict=True):
            own = range(max(wanted.start - end + len(part), 0), min(wanted.stop - end + len(part), len(part)))
            if own:
                pieces.append(part.narrow(0, own.start, len(own)))
        yield first, (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()


class _Quantized(ctypes.Structure):
    """`struct quantized` of quantized.c."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("activation_bits", ctypes.c_int64),
    ]


class _OwnQuantized(NativeLinear):
    """Quantised layer on the kernels of quantized.c."""

    _kernel = "quantized_run"

    def __init__(
        self, parts: Sequence[Tensor], bias: Tensor | None, scheme: Scheme, path: str, huge_pages: bool
    ) -> None:
        library = _library()
        assert library is not None
        self._library = library
        outputs, inputs = sum(len(part) for part in parts), parts[0].shape[1]
        self._group = group = library.quantized_group()
        groups = -(-outputs // group)
        self._bias = None if bias is None else functional.pad(bias.float(), (0, groups * group - outputs))
        self._scales: Tensor | None = None
        if scheme == "int4":
            stored = self._packed_4_bits(parts, groups, huge_pages)
        else:
            stored = self._packed_8_bits(parts, groups, huge_pages)
        self._struct = _Quantized(
            stored.data_ptr(),
            None if self._scales is None else self._scales.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            outputs,
            inputs,
            _DTYPE_CODES[parts[0].dtype],
            4 if scheme == "int4" else 8,
            8 if scheme == "int8_dynamic" else 16,
        )
        self._address = ctypes.addressof(self._struct)
        nbytes = stored.nbytes + sum(tensor.nbytes for tensor in (self._scales, self._bias) if tensor is not None)
        super().__init__((outputs, inputs), parts[0].dtype, path, nbytes, stored)

    def _packed_8_bits(self, parts: Sequence[Tensor], groups: int, huge_pages: bool) -> Tensor:
        """Return [groups][units][outputs of a group] words of 4 inputs each; sets the scales."""
        inputs, group = parts[0].shape[1], self._group
        units = -(-inputs // 4)
        stored = aligned_bytes(groups * units * group * 4, huge_pages)
        words = stored.view(torch.int32).view(groups, units, group)
        self._scales = torch.zeros(groups * group)
        offset = self._library.quantized_offset(8) * 0x01010101
        at_once = max(_ROUNDED_AT_ONCE // inputs // group, 1) * group
        for first, rows in _some_rows(parts, at_once):
            values, scales = rounded_to_8_bits(rows)
            self._scales[first : first + len(rows)] = scales[:, 0]
            some = slice(first // group, -(-(first + len(rows)) // group))
            whole = functional.pad(values, (0, -inputs % 4, 0, -len(rows) % group)).view(torch.int32)
            words[some] = whole.view(-1, group, units).transpose(1, 2)
            words[some].bitwise_xor_(offset - (1 << 32) if offset >> 31 else offset)
        return stored

    def _packed_4_bits(self, parts: Sequence[Tensor], groups: int, huge_pages: bool) -> Tensor:
        """Return [groups][blocks] of a scale and 32 weights for each output of a group, as in `struct quantized`."""
        inputs, group = parts[0].shape[1], self._group
        blocks = -(-inputs // BLOCK)
        scale_words, weight_words = group // 2, group * BLOCK // 8
        stored = aligned_bytes(groups * blocks * (scale_words + weight_words) * 4, huge_pages)
        words = stored.view(torch.int32).view(groups, blocks, scale_words + weight_words)
        all_scales = stored.view(torch.bfloat16).view(groups, blocks, 2 * (scale_words + weight_words))[:, :, :group]
        at_once = max(_ROUNDED_AT_ONCE // inputs // group, 1) * group
        for first, rows in _some_rows(parts, at_once):
            values, scales = rounded_to_4_bits(rows)
            missing = -len(rows) % group
            some = slice(first // group, -(-(first + len(rows)) // group))
            scales = functional.pad(scales[:, :, 0], (0, 0, 0, missing)).view(-1, group, blocks)
            all_scales[some] = scales.transpose(1, 2)
            halves = functional.pad(values, (0, 0, 0, 0, 0, missing)).add_(self._library.quantized_offset(4))
            halves = halves.view(torch.uint8).view(-1, blocks, BLOCK // 8, 2, 4)
            both = halves[:, :, :, 0].bitwise_or(halves[:, :, :, 1] << 4)  # [rows, blocks, 4, 4 bytes]
            eights = both.view(torch.int32).view(-1, group, blocks, BLOCK // 8)
            words[some, :, scale_words:] = eights.permute(0, 2, 3, 1).reshape(-1, blocks, weight_words)
        return stored

    def finalize(self) -> None:
        assert self.stored is not None
        into_huge_pages(self.stored)


def _all_rounded(parts: Sequence[Tensor], scheme: Scheme, weights_at_once: int) -> tuple[Tensor, Tensor]:
    """Return the rounded weights of all parts, stacked."""
    at_once = max(weights_at_once // parts[0].shape[1], 1)
    some = [rounded(rows, scheme) for _, rows in _some_rows(parts, at_once)]
    return torch.cat([values for values, _ in some]), torch.cat([scales for _, scales in some])


class _TorchQuantized(PackedLinear):
    """Quantised layer of a CPU that dequantises at each call, in float32. int4: two values a byte."""

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None, scheme: Scheme) -> None:
        self._scheme, self._bias = scheme, bias
        outputs, inputs = sum(len(part) for part in parts), parts[0].shape[1]
        self._values, self._scales = _all_rounded(parts, scheme, _ROUNDED_AT_ONCE)
        if scheme == "int4":
            halves = (self._values + 8).view(torch.uint8)
            self._values = halves[:, :, ::2] | (halves[:, :, 1::2] << 4)
        kept = [tensor for tensor in (self._values, self._scales, bias) if tensor is not None]
        nbytes = sum(tensor.nbytes for tensor in kept)
        super().__init__((outputs, inputs), parts[0].dtype, "torch", nbytes, self._values)

    def _widened(self) -> Tensor:
        """Return the dequantised weight [out, in] in float32."""
        if self._scheme != "int4":
            return self._values.float() * self._scales
        halves = torch.stack((self._values & 15, self._values >> 4), dim=-1).flatten(2).to(torch.int8) - 8
        return (halves * self._scales.float()).flatten(1)[:, : self.in_features]

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is not self.dtype or x.shape[-1] != self.in_features:
            wanted = f"[..., {self.in_features}] {self.dtype}"
            raise ValueError(f"wanted {wanted}, got {list(x.shape)} {x.dtype}")
        inputs = x.float()
        if self._scheme in ("int8_dynamic", "float8"):
            most = 127 if self._scheme == "int8_dynamic" else LARGEST_FLOAT8
            steps = divided(inputs.abs().amax(dim=-1, keepdim=True), most)
            if self._scheme == "int8_dynamic":
                inputs = (inputs * _inverse(steps)).round_() * steps
            else:  # divided, as on a GPU
                numbers = (inputs / steps.clamp(min=SMALLEST_SCALE)).clamp_(-most, most)
                inputs = numbers.to(FLOAT8).float() * steps
        bias = None if self._bias is None else self._bias.float()
        return functional.linear(inputs, self._widened(), bias).to(x.dtype)
