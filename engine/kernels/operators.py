"""Fused small operators of a transformer layer, each one pass of C instead of two to ten operators of torch.

    normed = rms_norm(hidden, weight, epsilon)
    hidden, normed = add_rms_norm(hidden, update, weight, epsilon)
    hidden, normed = add_layer_norm(hidden, update, weight, bias, epsilon)
    fed = activate(up, "gelu")
    fed = activate(gate_up, "silu", gated=True)  # [..., 2 F] -> [..., F]
    turned = rotate(queries, cos, sin)           # rotary position embedding

In decoding these operators process little data, so call overhead dominates: at 1024 values a norm takes 3.5 us instead
of 19, a rotation 7 instead of 13, silu of 2816 pairs 6.5 instead of 8. Each rounds where transformers rounds. torch
computes the same steps without a library, for other dtypes, and for large tensors with several threads; on GPUs
`engine.kernels.operators_gpu` fuses them.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.build import load_library
from engine.kernels.gpu import gpu_operators

_SOURCE = Path(__file__).with_name("operators.c")
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_FUNCTIONS = (
    "rms_norm", "add_rms_norm", "rms_norm_heads", "layer_norm", "add_layer_norm", "activate", "multiply", "rotate"
)  # fmt: skip
ONE_THREAD_ELEMENTS = 1 << 16
"""Of a tensor. Above this, the work exceeds the cost of waking threads: where there are several, it is torch's."""


def _gelu_new(x: Tensor) -> Tensor:
    """Compute GELU as GPT-2 and T5 do: each operator is rounded, unlike in torch's version."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu_new": _gelu_new,
    "relu": functional.relu,
}
_ACTIVATION_CODES = {name: code for code, name in enumerate(_ACTIVATIONS)}  # in the order of operators.c


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the root-mean-square norm of [..., width] times weight [width], in float32, the product after the cast.

    A float32 weight with a 16-bit x is multiplied before the cast. A 16-bit weight with a float32 x gives 16 bits, as
    the norms of T5 do.
    """
    if x.dtype is torch.float32 and weight.dtype is not torch.float32:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)).to(weight.dtype)
    library = _library_for(x)
    wide_weight = weight.dtype is not x.dtype
    same_rounding = not wide_weight or weight.dtype is torch.float32
    if library is None or not same_rounding:
        on_gpu = gpu_operators(x) if same_rounding else None
        if on_gpu is not None and weight.shape[0] <= on_gpu.MOST_WIDTH:
            normed: Tensor = on_gpu.rms_norm(x, weight, epsilon)
            return normed
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (weight * wide).to(x.dtype) if wide_weight else weight * wide.to(x.dtype)
    x = x.contiguous()
    y = torch.empty_like(x)
    width, code = weight.shape[0], _DTYPE_CODES[x.dtype]
    library.rms_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, epsilon, code, wide_weight
    )
    return y


def add_rms_norm(hidden: Tensor, update: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `hidden + update` [..., width] and its norm."""
    library = _library_for(hidden)
    wide_weight = weight.dtype is not hidden.dtype
    same_rounding = update.dtype is hidden.dtype and (not wide_weight or weight.dtype is torch.float32)
    if library is None or not same_rounding:
        on_gpu = gpu_operators(hidden) if same_rounding else None
        if on_gpu is not None and weight.shape[0] <= on_gpu.MOST_WIDTH:
            both: tuple[Tensor, Tensor] = on_gpu.add_rms_norm(hidden, update, weight, epsilon)
            return both
        hidden = hidden + update
        return hidden, rms_norm(hidden, weight, epsilon)
    return _add_and_norm(library.add_rms_norm, hidden, update, (weight,), epsilon, wide_weight)


def rms_norm_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, queries: int, keys: int, epsilon: float
) -> Tensor:
    """Normalise each of the first `queries` heads of [batch, length, heads, width], and the `keys` heads after them.

    The result [batch, length, queries + keys, width] is contiguous.
    """
    library = _library_for(heads)
    if library is None or not heads.is_contiguous() or query_weight.dtype is not heads.dtype:
        normed = rms_norm(heads[:, :, :queries], query_weight, epsilon)
        return torch.cat((normed, rms_norm(heads[:, :, queries : queries + keys], key_weight, epsilon)), dim=2)
    batch, length, stored, width = heads.shape
    y = torch.empty(batch, length, queries + keys, width, dtype=heads.dtype)
    addresses = heads.data_ptr(), query_weight.data_ptr(), key_weight.data_ptr(), y.data_ptr()
    code = _DTYPE_CODES[heads.dtype]
    library.rms_norm_heads(*addresses, batch * length, stored * width, queries, keys, width, epsilon, code)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return the layer norm of [..., width] with weight and bias [width], in float32 and rounded once, as in torch."""
    library = _library_for(x)
    if library is None or weight.dtype is not x.dtype:
        return functional.layer_norm(x, weight.shape, weight, bias, epsilon)
    x = x.contiguous()
    y = torch.empty_like(x)
    width = weight.shape[0]
    addresses = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    library.layer_norm(*addresses, x.numel() // width, width, epsilon, _DTYPE_CODES[x.dtype])
    return y


def add_layer_norm(
    hidden: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return `hidden + update` [..., width] and its layer norm."""
    library = _library_for(hidden)
    if library is None or weight.dtype is not hidden.dtype or update.dtype is not hidden.dtype:
        hidden = hidden + update
        return hidden, layer_norm(hidden, weight, bias, epsilon)
    return _add_and_norm(library.add_layer_norm, hidden, update, (weight, bias), epsilon)


def _add_and_norm(
    kernel: Callable[..., None],
    hidden: Tensor,
    update: Tensor,
    parameters: tuple[Tensor | None, ...],
    epsilon: float,
    *flags: bool,
) -> tuple[Tensor, Tensor]:
    """Run a kernel that writes the sum and its norm. parameters: weight [width], and the bias if the norm has one."""
    assert update.shape == hidden.shape, (update.shape, hidden.shape)
    hidden, update = hidden.contiguous(), update.contiguous()
    both, y = torch.empty_like(hidden), torch.empty_like(hidden)
    width = hidden.shape[-1]
    addresses = [None if one is None else one.data_ptr() for one in (hidden, update, *parameters, both, y)]
    kernel(*addresses, hidden.numel() // width, width, epsilon, _DTYPE_CODES[hidden.dtype], *flags)
    return both, y


def activate(x: Tensor, name: str, gated: bool = False) -> Tensor:
    """Apply silu, gelu, gelu_tanh, gelu_new or relu; gated: to the first half of [..., 2 F], times the second half.

    gelu is exact, by the error function; gelu_tanh its usual approximation, rounded once; gelu_new the same rounded
    after each operator, as in models that write it out. With a gate, it is rounded before the product.
    """
    library = _library_for(x)
    if library is None:
        if not gated:
            return _ACTIVATIONS[name](x)
        on_gpu = gpu_operators(x)
        if on_gpu is not None and name in on_gpu.ACTIVATIONS:
            fed: Tensor = on_gpu.activate_gated(x, name)
            return fed
        gate, up = x.chunk(2, dim=-1)
        return _ACTIVATIONS[name](gate) * up
    x = x.contiguous()
    width = x.shape[-1] // 2 if gated else x.shape[-1]
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
    code = _DTYPE_CODES[x.dtype]
    library.activate(x.data_ptr(), y.data_ptr(), y.numel() // width, width, _ACTIVATION_CODES[name], gated, code)
    return y


def multiply(x: Tensor, factor: float) -> Tensor:
    """Multiply x by a number, rounded once."""
    library = _library_for(x)
    if library is None:
        return x * factor
    x = x.contiguous()
    y = torch.empty_like(x)
    library.multiply(x.data_ptr(), y.data_ptr(), x.numel(), factor, _DTYPE_CODES[x.dtype])
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + width / 2) of x [a, b, c, width] by its angle; any strides but the last, which is 1.

    `cos` and `sin` have four dimensions too, each as large as that of x or 1. The result is contiguous.
    """
    library = _library_for(x)
    if library is None or cos.dtype is not x.dtype:
        on_gpu = gpu_operators(x)
        if on_gpu is not None and cos.dtype is x.dtype and x.stride(3) == 1:
            turned: Tensor = on_gpu.rotate(x, cos, sin)
            return turned
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin
    shape, angles, steps = x.shape, cos.shape, cos.stride()
    assert x.stride(3) == steps[3] == 1 and sin.stride() == steps and angles[3] == shape[3], (shape, angles, steps)
    y = torch.empty(*shape, dtype=x.dtype)  # sizes one by one cost less than a tuple
    addresses = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    library.rotate(*addresses, *shape, *x.stride()[:3], *angles[:3], *steps[:3], _DTYPE_CODES[x.dtype])
    return y


def _library_for(x: Tensor) -> ctypes.CDLL | None:
    """Return the library if it supports this tensor."""
    if x.dtype not in _DTYPE_CODES or not x.is_cpu:
        return None
    if x.numel() > ONE_THREAD_ELEMENTS and torch.get_num_threads() > 1:
        return None
    return _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(_SOURCE, "-ffp-contract=off")
    if library is not None:
        number, address, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
        library.rms_norm.argtypes = [*[address] * 3, number, number, real, number, number]
        library.add_rms_norm.argtypes = [*[address] * 5, number, number, real, number, number]
        library.rms_norm_heads.argtypes = [*[address] * 4, *[number] * 5, real, number]
        library.layer_norm.argtypes = [*[address] * 4, number, number, real, number]
        library.add_layer_norm.argtypes = [*[address] * 6, number, number, real, number]
        library.activate.argtypes = [address, address, *[number] * 5]
        library.multiply.argtypes = [address, address, number, real, number]
        library.rotate.argtypes = [*[address] * 4, *[number] * 14]
        for name in _FUNCTIONS:
            getattr(library, name).restype = None
    return library
