"""Select compression passes by hardware: `balanced` and `aggressive` are lists that depend on its capabilities.

    resolve(("balanced",), hardware_of(device, torch.bfloat16))     # ("int8",) on a CPU that multiplies bytes

A level never names a pass that costs accuracy and gives neither speed nor, on the hardware at hand, anything that a
user of the level asks for; where nothing is left, the weights stay in the cell's dtype.
docs/reference/compression.md gives the table and its reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.common.execution import LEVELS
from engine.kernels.quantized import own_path

_FAST = "avx512_vnni"  # other instructions dequantise first, which costs the time saved by fewer bytes
_SPARSE_UNITS = (8, 0)  # compute capability from which NVIDIA GPUs multiply 2:4 weights at double speed
_SPARSE_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Hardware:
    """Properties that determine the passes. `kernels`: instructions of our quantised kernels for this device and dtype,
    empty if there are none; `sparse_units`: whether the device multiplies 2:4 weights faster; `capability`: the compute
    capability of an NVIDIA GPU.
    """

    device: str
    kernels: str = ""
    sparse_units: bool = False
    capability: tuple[int, int] | None = None


def hardware_of(device: torch.device, dtype: torch.dtype) -> Hardware:
    """Return the capabilities of `device` for weights of `dtype`."""
    if device.type == "cpu":
        return Hardware("cpu", kernels="" if dtype is torch.float16 else own_path())
    if device.type == "cuda" and torch.version.cuda:
        capability = torch.cuda.get_device_capability(device)
        sparse_units = capability >= _SPARSE_UNITS and dtype in _SPARSE_DTYPES
        return Hardware("cuda", sparse_units=sparse_units, capability=capability)
    return Hardware(device.type)


def resolve(passes: Sequence[str], hardware: Hardware) -> tuple[str, ...]:
    """Return the passes to run, with levels replaced by their lists; empty for no compression."""
    return tuple(one for name in passes for one in (_level(name, hardware) if name in LEVELS else (name,)))


def _level(name: str, hardware: Hardware) -> tuple[str, ...]:
    if hardware.kernels == _FAST:
        return ("int8",) if name == "balanced" else ("int4",)
    if hardware.sparse_units and name == "aggressive":
        return ("prune_2_4",)
    return ()
