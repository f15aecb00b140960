"""Why torch's attention does not take a kernel on a GPU, as a pure rule; torch itself chooses.

    obstacle("flash_attention", AttentionCall("float32", 128), Gpu((9, 0)))  # "flash_attention takes 16-bit numbers.."

torch tries its kernels in an order and takes the first whose constraints hold (`select_sdp_backend` in its
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); it names the constraint that failed only where nothing is left.
The rule has the constraints that depend on dtype, head size, mask, training and capability. Those that are tighter in
some versions of torch and cuDNN are left out, so that the rule never excludes what torch takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_FLASH_WIDEST, _CUDNN_WIDEST = 256, 256  # cuDNN's own limit is 128 before Hopper and in older versions
_BACKWARD_WIDEST, _BACKWARD_WIDE = 192, 224
_SMALL_SHARED = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
"""Capabilities, both ends included, whose shared memory is too small for flash attention's backward of wide heads."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a call of attention asks for. masked: by a tensor, not causally; trains: with a backward pass."""

    dtype: str
    head_dim: int
    masked: bool = False
    trains: bool = False


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device. rocm: one of AMD, whose capability says nothing of its kernels."""

    capability: tuple[int, int]
    rocm: bool = False


def obstacle(kernel: str, call: AttentionCall, gpu: Gpu) -> str | None:
    """Return why the GPU cannot take this kernel for the call; None: the rule knows no reason."""
    if kernel == "flash_attention":
        return _flash(call, gpu)
    if kernel == "efficient_attention":
        return _efficient(call, gpu)
    return _cudnn(call, gpu) if kernel == "cudnn_attention" else None


def explain_attention(chosen: str, order: Sequence[str], call: AttentionCall, gpu: Gpu) -> str:
    """Return why torch takes `chosen`: it is the first of `order`, or what is wrong with those before it."""
    before = list(order[: order.index(chosen)]) if chosen in order else []
    if not before:
        return f"{chosen} is the first in torch's order"
    return "; ".join(obstacle(name, call, gpu) or f"{name}: refused by this version of torch" for name in before)


def _flash(call: AttentionCall, gpu: Gpu) -> str | None:
    if call.masked:
        return "flash_attention takes no mask"
    if (missing := _sixteen_bits("flash_attention", call, gpu)) is not None:
        return missing
    if not gpu.rocm and call.head_dim > _FLASH_WIDEST:
        return f"flash_attention takes heads of at most {_FLASH_WIDEST}, not {call.head_dim}"
    small = any(low <= gpu.capability <= high for low, high in _SMALL_SHARED) and not gpu.rocm
    if call.trains and small and _BACKWARD_WIDEST < call.head_dim <= _BACKWARD_WIDE:
        return f"flash_attention has no backward pass of heads of {call.head_dim} on capability {_said(gpu)}"
    return None


def _efficient(call: AttentionCall, gpu: Gpu) -> str | None:
    ampere = gpu.rocm or gpu.capability >= (8, 0)
    if call.dtype not in ("float16", "float32", "bfloat16") or (call.dtype == "bfloat16" and not ampere):
        return f"efficient_attention has no {call.dtype} on capability {_said(gpu)}"
    multiple = 8 if call.dtype != "float32" else 4 if ampere else 1
    if call.head_dim % multiple:
        return f"efficient_attention takes heads of a multiple of {multiple} in {call.dtype}, not {call.head_dim}"
    return None


def _cudnn(call: AttentionCall, gpu: Gpu) -> str | None:
    if gpu.rocm:
        return "cudnn_attention is not in builds for ROCm"
    if (missing := _sixteen_bits("cudnn_attention", call, gpu)) is not None:
        return missing
    if call.head_dim > _CUDNN_WIDEST or call.head_dim % 8:
        return f"cudnn_attention takes heads of a multiple of 8, at most {_CUDNN_WIDEST}, not {call.head_dim}"
    return None


def _sixteen_bits(kernel: str, call: AttentionCall, gpu: Gpu) -> str | None:
    if call.dtype not in ("float16", "bfloat16"):
        return f"{kernel} takes 16-bit numbers, not {call.dtype}"
    if not gpu.rocm and gpu.capability < (8, 0):
        return f"{kernel} needs capability 8.0, not {_said(gpu)}"
    return None


def _said(gpu: Gpu) -> str:
    return ".".join(str(part) for part in gpu.capability)
