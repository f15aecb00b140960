"""Which of our kernels for GPUs can be used here.

    kernels = gpu_operators(x)          # engine.kernels.operators_gpu, or None
    if has_gpu_attention(store): ...    # then engine.kernels.attention_gpu can be imported

They need Triton, which torch's builds for GPUs bring along. `RANKWISE_KERNELS=off` turns them off, too.
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from engine.kernels.build import kernel_mode

_DEVICES = ["cuda"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_WIDTH = 256
"""Of a head: wider ones do not fit into a processor's shared memory."""


def gpu_operators(x: Tensor) -> ModuleType | None:
    """Return the fused operators if they support this tensor."""
    return _operators() if x.device.type in _DEVICES and x.dtype in _DTYPES and kernel_mode() != "off" else None


def has_gpu_attention(store: Tensor) -> bool:
    """Return whether `GpuAttention` supports a cache whose rows are heads."""
    width = store.shape[-1]
    return gpu_operators(store) is not None and width <= _MOST_WIDTH and width % 2 == 0


@functools.cache
def _operators() -> ModuleType | None:
    try:
        return importlib.import_module("engine.kernels.operators_gpu")
    except ImportError:
        return None
