"""Gradient norm over all shards and ranks, and gradient clipping.

    norm = gradient_norm(parameters, device, exposed)           # of whole gradients, the same on all ranks
    scale_gradients(parameters, factor)

torch's clip_grad_norm_ does not support tensors sharded over different meshes, as with tensor parallelism (norms over
dp, matrices over dp and tp).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.training.trainer import Exposed

_PIECE_ELEMENTS = 1 << 16
"""On a CPU the norm of four million float32 elements at once is off by 9e-5, and differs if they are sharded; with
pieces of this length by 4e-9, in the same time. A GPU's kernel divides by this length itself (ATen,
native/cuda/MultiTensorApply.cuh, kChunkSize); to make the views of a billion elements takes the host 0.3 s a step.
"""


def gradient_norm(parameters: Sequence[nn.Parameter], device: torch.device, exposed: Exposed) -> float:
    """Return the square root of the sum of squares; infinite or NaN if any element is.

    device: of the collectives; offloaded gradients are elsewhere. exposed: records the time of the collective.
    """
    by_axes: dict[tuple[object, ...], list[Tensor]] = {}
    groups: dict[tuple[object, ...], list[dist.ProcessGroup]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        axes = _sharded_axes(gradient)
        by_axes.setdefault(axes, []).append(local(gradient))
        if axes and axes not in groups:
            assert isinstance(gradient, DTensor)
            groups[axes] = [gradient.device_mesh.get_group(axis) for axis in axes[1:]]  # type: ignore[arg-type]
    squares = 0.0
    for axes, gradients in by_axes.items():
        # Norms first, as torch does: squares of float32 elements overflow sooner than their norm.
        pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
        norms = torch.stack(torch._foreach_norm(pieces)).double()
        mine = norms.square().sum().to(device)
        for group in groups.get(axes, []):
            with exposed.waiting():
                dist.all_reduce(mine, group=group)
            exposed.bytes += mine.nbytes
            exposed.calls += 1
        squares += float(mine)
    return math.sqrt(squares) if squares >= 0 else math.nan


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    whole = not tensor.is_cpu or not tensor.is_contiguous()
    return (tensor,) if whole else torch.split(tensor.view(-1), _PIECE_ELEMENTS)


def clipping_factor(norm: float, limit: float | None) -> float:
    """Return the factor on gradients of this norm, as in torch.nn.utils.clip_grad_norm_; 1.0: unchanged."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiply in place; no memory access if the factor is 1."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_axes(tensor: Tensor) -> tuple[object, ...]:
    """Return the mesh and its sharded axes; () if this rank has all."""
    if not isinstance(tensor, DTensor):
        return ()
    # Not `is_shard`, which is false for the strided shards of tensor parallelism under FSDP2.
    axes = tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return (tensor.device_mesh, *axes) if axes else ()
