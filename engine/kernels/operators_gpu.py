"""Fused small operators of a transformer layer on a GPU, in Triton; `engine.kernels.operators` calls them.

    normed = rms_norm(hidden, weight, epsilon)
    hidden, normed = add_rms_norm(hidden, update, weight, epsilon)
    fed = activate_gated(gate_up, "silu")
    turned = rotate(queries, cos, sin)

A decode step reads the weights once and does little else, but torch runs a norm as eight kernels, a rotation as five
and a gated activation as two, each of which takes the GPU about 2 us even in a CUDA graph: a third of a token's time
for an 8B model on an H100 (docs/measurements/gpu.md). Values are rounded where torch's operators round them. Importing
this module needs Triton, which torch's builds for GPUs bring along.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
MOST_WIDTH = 1 << 15
"""Of a norm: a row is held in one program's registers."""
LARGEST_EXPONENT = tl.constexpr(88.0)
"""Of a float32; beyond, the result is zero in any case."""
_ACTIVATED_TOGETHER = 1024
_HEADS_TOGETHER = 8


@triton.jit
def _rms_norm_kernel(
    x, update, weight, total, y, width, epsilon, ADDS: tl.constexpr, WIDE_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """One row. ADDS: of x + update, which is kept in total. WIDE_WEIGHT: the product is rounded, not the norm."""
    kind = y.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = tl.program_id(0).to(tl.int64) * width + columns
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        summed = (values + tl.load(update + places, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + places, summed, mask=inside)
        values = summed.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / width + epsilon)
    if not WIDE_WEIGHT:
        normed = normed.to(kind).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + places, (factors * normed).to(kind), mask=inside)


@triton.jit
def _activate_kernel(x, y, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row: of the first half of x [rows, 2 width] activated, times the second half."""
    kind = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        activated = gate / (1.0 + tl.exp(tl.minimum(-gate, LARGEST_EXPONENT)))
    elif KIND == 1:
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # 0.5 (1 + tanh(t)) = 1 / (1 + exp(-2 t))
        activated = gate / (1.0 + tl.exp(tl.minimum(-2.0 * inner, LARGEST_EXPONENT)))
    else:
        activated = tl.maximum(gate, 0.0)
    tl.store(y + row * width + columns, (activated.to(kind).to(tl.float32) * up).to(kind), mask=inside)


@triton.jit
def turned_pairs(low, high, cos, sin, kind: tl.constexpr):
    """Return the two halves of rotated heads; each product is rounded before the sum, as by torch's operators."""
    low, high, cos, sin = low.to(tl.float32), high.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    first = (low * cos).to(kind).to(tl.float32) + (-high * sin).to(kind).to(tl.float32)
    second = (high * cos).to(kind).to(tl.float32) + (low * sin).to(kind).to(tl.float32)
    return first.to(kind), second.to(kind)


@triton.jit
def _rotate_kernel(
    x, cosines, sines, y, second, heads, half,
    x_first, x_second, x_head, a_first, a_second, a_head,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one position of x [first, second, heads, 2 half]; a_...: strides of the angles."""
    kind = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    one, other = row // second, row % second
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    source = x + one * x_first + other * x_second + head * x_head + pair
    angle = one * a_first + other * a_second + head * a_head + pair
    low, high = tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0)
    cos, sin = tl.load(cosines + angle, mask=inside, other=0.0), tl.load(sines + angle, mask=inside, other=0.0)
    first, last = turned_pairs(low, high, cos, sin, kind)
    target = y + (row * heads + head) * 2 * half + pair
    tl.store(target, first, mask=inside)
    tl.store(target + half, last, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the root-mean-square norm of [..., width], as `engine.kernels.operators.rms_norm`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _norm(x, x, weight, y, y, epsilon, adds=False)
    return y


def add_rms_norm(hidden: Tensor, update: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `hidden + update` [..., width] and its norm."""
    hidden, update = hidden.contiguous(), update.contiguous()
    both, y = torch.empty_like(hidden), torch.empty_like(hidden)
    _norm(hidden, update, weight, both, y, epsilon, adds=True)
    return both, y


def _norm(x: Tensor, update: Tensor, weight: Tensor, total: Tensor, y: Tensor, epsilon: float, adds: bool) -> None:
    width = weight.shape[0]
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, block // 256))
    grid = (x.numel() // width,)
    wide = weight.dtype is not x.dtype
    _rms_norm_kernel[grid](x, update, weight, total, y, width, epsilon, adds, wide, block, num_warps=warps)


def activate_gated(x: Tensor, name: str) -> Tensor:
    """Return the activation of the first half of [..., 2 F], times the second half, [..., F]."""
    x = x.contiguous()
    width = x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    grid = (y.numel() // width, triton.cdiv(width, _ACTIVATED_TOGETHER))
    _activate_kernel[grid](x, y, width, ACTIVATIONS[name], _ACTIVATED_TOGETHER)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of x [a, b, c, width], whose last stride is 1, by angles of the same shape or 1; contiguous."""
    first, second, heads, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    angles = cos.expand(first, second, heads, width)
    grid = (first * second, triton.cdiv(heads, _HEADS_TOGETHER))
    _rotate_kernel[grid](
        x, cos, sin, y, second, heads, width // 2, *x.stride()[:3], *angles.stride()[:3],
        HEADS=_HEADS_TOGETHER, HALF=triton.next_power_of_2(width // 2),
    )  # fmt: skip
    return y
