"""Linear layers whose weights are packed once for the CPU's instruction set.

    layer = pack_linear(weight, bias)       # weight [out_features, in_features], bias [out_features] or None
    y = layer(x)                            # [..., in_features] -> [..., out_features]
    layer.path                              # "amx_bf16", "avx512_bf16", "avx512", "avx2", "mkldnn" or "torch"

Decoding a token reads every weight once. `functional.linear` reaches a third of memory bandwidth, mkldnn's packed
layers half, the kernels of `linear.c` that of a plain read, without a loss at many rows. They store the weights once
and are batch-invariant: a row's bits do not depend on other rows. Other paths do not guarantee that.

bfloat16 goes to mkldnn where that takes it and there is no compiler, or none that knows the processor's tiles (AMX):
with many rows those are several times faster than vectors. float32 goes to `functional.linear` without a compiler,
float16 and GPUs always.
"""

import ctypes
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.build import kernel_mode, load_library, parallel_address, processor_flags, unavailable_reason
from engine.kernels.memory import aligned_bytes, into_huge_pages

_SOURCE = Path(__file__).with_name("linear.c")
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


class PackedLinear:
    """One packed linear layer: [..., in_features] -> [..., out_features], in the dtype of the weight.

    `nbytes`: size of the weights (padded) and the bias; `path`: name of the kernel in use; `stored`: the data that a
    call reads, for `read_seconds`. `stored` is None for mkldnn, and for memory-mapped weights until `finalize()`.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, path: str, nbytes: int, stored: Tensor | None
    ) -> None:
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self.path = path
        self.nbytes = nbytes
        self.stored = stored

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def finalize(self) -> None:
        """Move the weights into huge pages if available, and release memory-mapped ones.

        Must not run during a call.
        """


class NativeLinear(PackedLinear):
    """A layer on a compiled kernel, a function (packed, x, y, rows, threads, address of the parallel loop)."""

    _library: ctypes.CDLL
    _kernel: str
    """Looked up at each call: a recording puts its own functions into the library (engine/kernels/program.py)."""
    _address: int
    """Of the struct that describes the packed weights."""

    def __call__(self, x: Tensor) -> Tensor:
        shape, outputs = x.shape, self.out_features
        if x.dtype is not self.dtype or shape[-1] != self.in_features or not x.is_cpu:
            wanted = f"[..., {self.in_features}] {self.dtype} on the CPU"
            raise ValueError(f"wanted {wanted}, got {list(shape)} {x.dtype} on {x.device}")
        y = torch.empty(*shape[:-1], outputs, dtype=self.dtype)
        x = self._aligned(x)
        if not x.is_contiguous():
            x = x.contiguous()
        threads = torch.get_num_threads()
        parallel = parallel_address() if threads > 1 else None
        run = getattr(self._library, self._kernel)
        run(self._address, x.data_ptr(), y.data_ptr(), y.numel() // outputs, threads, parallel)
        return y

    def _aligned(self, x: Tensor) -> Tensor:
        """Return x with as many inputs as the kernel reads."""
        return x


class _Rows(ctypes.Structure):
    """`struct rows` of linear.c."""

    _fields_ = [("first", ctypes.c_void_p), ("stride", ctypes.c_int64), ("count", ctypes.c_int64)]


class _Packed(ctypes.Structure):
    """`struct packed` of linear.c."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("units", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    ]


Packing = Literal["finalized", "quick", "memory_mapped"]
"""Huge pages at once; common pages, which are allocated faster; or no packing before `finalize()`."""


def pack_linear(
    weight: Tensor | Sequence[Tensor], bias: Tensor | None = None, packing: Packing = "finalized"
) -> PackedLinear:
    """Return a packed copy of `weight` [out_features, in_features], which may be a view with any row stride.

    Several weights of the same in_features are stacked. `bias` [out_features] is added in float32 before the result is
    rounded. The weight is not kept, except on the
    path "torch".

    Weights in huge pages are read up to 1.5 times faster. `packing`: "quick" packs into common pages first, which are
    up to 5 times faster to allocate in a virtual machine whose host reclaims free memory. "memory_mapped" packs
    nothing: until `finalize()` each call reads the weights in place (in a mapped file: without a copy), a group of rows
    at a time through the cache. The bits are the same as later, and it is several times slower. The weights must not
    change until then. Other paths than our kernels' may copy at once.
    """
    parts = [part.detach() for part in ([weight] if isinstance(weight, Tensor) else weight)]
    some, outputs = parts[0], sum(len(part) for part in parts)
    assert all(part.dim() == 2 and part.numel() and part.shape[1] == some.shape[1] for part in parts)
    assert bias is None or bias.shape == (outputs,), bias.shape
    bias = None if bias is None else bias.detach().to(some.dtype)
    if some.device.type == "cpu" and some.dtype in _DTYPE_CODES:
        path = _own_path(some.dtype)
        if path:
            return _OwnLinear(parts, bias, path, packing)
        if some.dtype is torch.bfloat16 and _mkldnn_has_bfloat16():
            return _MkldnnLinear(_whole(parts), bias)
    return _TorchLinear(_whole(parts), bias, packing == "memory_mapped" and len(parts) == 1)


def _whole(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _own_path(dtype: torch.dtype) -> str:
    """Return the instruction set of our kernel for `dtype`; empty if it cannot or should not be used."""
    library = _library()
    if library is None:
        return ""
    path = str(library.linear_path(_DTYPE_CODES[dtype]).decode())
    has_tiles = dtype is torch.bfloat16 and "amx_bf16" in processor_flags() and kernel_mode() == "on"
    return "" if has_tiles and path != "amx_bf16" else path


def _mkldnn_has_bfloat16() -> bool:
    """Whether mkldnn packs bfloat16 here: it refuses processors without AVX-512 (or AVX-NE-CONVERT)."""
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def why_no_cpu_kernels() -> str | None:
    """Return why layers on a CPU are computed by torch's products, which are slower; None where ours can be had."""
    return None if _library() is not None else unavailable_reason(_SOURCE.name)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        number, address = ctypes.c_int64, ctypes.c_void_p
        library.linear_path.argtypes, library.linear_path.restype = [number], ctypes.c_char_p
        library.linear_packed_bytes.argtypes, library.linear_packed_bytes.restype = [number] * 2, number
        library.linear_pack.argtypes, library.linear_pack.restype = [address, number, number, address], None
        library.linear_run.argtypes = [address, address, address, number, number, address]
        library.linear_run.restype = None
        library.read_bytes.argtypes, library.read_bytes.restype = [address, number], ctypes.c_uint32
    return library


class _OwnLinear(NativeLinear):
    """Linear layer on the kernels of linear.c."""

    _kernel = "linear_run"

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None, path: str, packing: Packing) -> None:
        library = _library()
        assert library is not None
        self._library = library
        outputs, inputs = sum(len(part) for part in parts), parts[0].shape[1]
        size, code = parts[0].element_size(), _DTYPE_CODES[parts[0].dtype]
        self._bias = None if bias is None else bias.float().contiguous()
        bias_address = None if self._bias is None else self._bias.data_ptr()
        # Rows may have any stride, the inputs of a row are contiguous.
        self._memory_mapped: list[Tensor] = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
        rows = [_Rows(part.data_ptr(), part.stride(0) * size, len(part)) for part in self._memory_mapped]
        self._rows = (_Rows * len(rows))(*rows)
        units = -(-inputs * size // 4)
        self._packed = _Packed(None, bias_address, ctypes.addressof(self._rows), outputs, units, code, inputs * size)
        self._address = ctypes.addressof(self._packed)
        self._is_odd = inputs * size % 4 != 0
        nbytes = library.linear_packed_bytes(outputs, inputs * size) + _nbytes(self._bias)
        super().__init__((outputs, inputs), parts[0].dtype, path, nbytes, None)
        if packing != "memory_mapped":
            self._pack(huge_pages=packing == "finalized")

    def _pack(self, huge_pages: bool) -> None:
        packed = self._packed
        count = self._library.linear_packed_bytes(packed.outputs, packed.row_bytes)
        weights = aligned_bytes(count, huge_pages)
        self._library.linear_pack(self._rows, packed.outputs, packed.row_bytes, weights.data_ptr())
        self.stored = weights
        packed.weights, packed.parts = weights.data_ptr(), None
        self._memory_mapped = []

    def _aligned(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 1)) if self._is_odd else x

    def finalize(self) -> None:
        if self.stored is None:
            self._pack(huge_pages=True)
        else:
            into_huge_pages(self.stored)


class _MkldnnLinear(PackedLinear):
    """Linear layer on mkldnn (oneDNN) packed layers, bfloat16; packed for calls of one row."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weights = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self._bias = bias
        self._run = torch.ops.mkldnn._linear_pointwise
        super().__init__(weight.shape, weight.dtype, "mkldnn", weight.nbytes + _nbytes(bias), None)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._run(x, self._weights, self._bias, "none", [], "")
        return y


class _TorchLinear(PackedLinear):
    """Linear layer on `functional.linear`, without packing."""

    def __init__(self, weight: Tensor, bias: Tensor | None, memory_mapped: bool) -> None:
        self._weight, self._bias, self._is_memory_mapped = weight, bias, memory_mapped
        super().__init__(weight.shape, weight.dtype, "torch", weight.nbytes + _nbytes(bias), weight)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def finalize(self) -> None:
        if self._is_memory_mapped:
            self._weight = self.stored = self._weight.clone()
            self._is_memory_mapped = False


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def read_seconds(tensor: Tensor) -> float:
    """Measure the seconds in which the calling thread reads a contiguous CPU tensor once, sequentially.

    The upper bound for decoding speed: as fast as torch's `sum` in float32, for every dtype. Huge pages
    (`aligned_bytes`, packed weights) are read faster than other memory.
    """
    assert tensor.is_contiguous() and tensor.is_cpu, tensor.device
    library = _library()
    flat = tensor.view(-1).view(torch.uint8)
    words = flat[: flat.numel() // 4 * 4].view(torch.float32)
    began = time.perf_counter()
    if library is not None:
        library.read_bytes(tensor.data_ptr(), tensor.nbytes)
    else:
        words.sum()
    return time.perf_counter() - began
