"""Whether our kernels for GPUs can be used here.

    kernels = gpu_operators(x)                                      # engine.kernels.operators_gpu, or None
    if has_gpu_attention(device, dtype, width, group): ...          # then engine.kernels.attention_gpu can be imported
    why_no_gpu_kernels(device)                                      # the reason for None

They need Triton, which torch's builds for GPUs bring along, and Triton a C compiler. `RANKWISE_KERNELS=off` turns them
off, too.
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
_LEAST_CAPABILITY = (8, 0)
"""Of an NVIDIA GPU: below, there are no products of bfloat16."""
_REASON_CHARACTERS = 200


def gpu_operators(x: Tensor) -> ModuleType | None:
    """Return the fused operators if they support this tensor."""
    if x.device.type not in _DEVICES or x.dtype not in _DTYPES or why_no_gpu_kernels(x.device) is not None:
        return None
    return _operators()


def has_gpu_attention(device: torch.device, dtype: torch.dtype, width: int, group: int) -> bool:
    """Return whether `GpuAttention` works for heads of a width, `group` query heads to a key head."""
    supported = device.type in _DEVICES and dtype in _DTYPES and width <= _MOST_WIDTH and width % 2 == 0
    return supported and why_no_gpu_kernels(device) is None and _attends(device, dtype, width, group)


def why_no_gpu_kernels(device: torch.device) -> str | None:
    """Return why torch's operators are used on a device; None: ours are."""
    if device.type not in _DEVICES:
        return f"the device is {device.type}"
    return "RANKWISE_KERNELS=off" if kernel_mode() == "off" else _obstacle(device)


@functools.cache
def _obstacle(device: torch.device) -> str | None:
    """Try one, which takes a second where it was never compiled before."""
    try:
        if device.type == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
            if capability < _LEAST_CAPABILITY:
                return f"compute capability {capability[0]}.{capability[1]}, less than 8.0"
        row = torch.ones((1, 16), device=device)
        _operators().rms_norm(row, row[0], 1e-5)
    except ImportError:
        return "Triton is not installed"
    except Exception as error:  # of Triton, of the C compiler that it runs, or of the driver
        return " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS]
    return None


@functools.cache
def _attends(device: torch.device, dtype: torch.dtype, width: int, group: int) -> bool:
    """Try it on two tokens of a sequence: its tiles may need more shared memory than a smaller GPU has."""
    attention = importlib.import_module("engine.kernels.attention_gpu")
    store = torch.zeros((2, 1, 1, 1, 16, width), dtype=dtype, device=device)
    heads = torch.zeros((2, group + 2, width), dtype=dtype, device=device)
    tables, tokens = torch.zeros((1, 1), dtype=torch.int32, device=device), torch.arange(2, dtype=torch.int32)
    try:
        tried = attention.GpuAttention(store, group, 1.0, None, tables)
        tried.run(0, heads[:, :-1], heads[:, -1:], 0, tried.step_places(torch.zeros_like(tokens), tokens))
    except Exception:  # of Triton, which refuses what does not fit
        return False
    return True


def _operators() -> ModuleType:
    return importlib.import_module("engine.kernels.operators_gpu")
