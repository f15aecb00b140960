"""Which passes run where: `balanced` and `aggressive` are lists that follow what the hardware can do.

    resolve(("balanced",), hardware_of(device, torch.bfloat16))     # ("int8",) on a CPU that multiplies bytes

A level never names a pass that costs accuracy and gives neither speed nor, on the hardware at hand, anything that a
user of the level asks for; where nothing is left, the weights stay in the cell's dtype. docs/compression.md gives the
table and its reasons.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from configs.cell import LEVELS
from engine.kernels.quantized import own_path

_FAST = "avx512_vnni"  # with other instructions weights are widened first, which costs what fewer bytes save
_SPARSE_UNITS = (8, 0)  # compute capability from which NVIDIA GPUs multiply 2:4 weights at double speed
_SPARSE_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Hardware:
    """What decides about passes. `kernels`: instructions of our quantised kernels for this device and dtype, empty
    where there are none; `sparse_units`: whether the device multiplies 2:4 weights faster."""

    device: str
    kernels: str = ""
    sparse_units: bool = False


def hardware_of(device: torch.device, dtype: torch.dtype) -> Hardware:
    """What `device` can do with weights of `dtype`."""
    if device.type == "cpu":
        return Hardware("cpu", kernels="" if dtype is torch.float16 else own_path())
    if device.type == "cuda" and torch.version.cuda:
        capability = torch.cuda.get_device_capability(device)
        return Hardware("cuda", sparse_units=capability >= _SPARSE_UNITS and dtype in _SPARSE_DTYPES)
    return Hardware(device.type)


def resolve(passes: Sequence[str], hardware: Hardware) -> tuple[str, ...]:
    """The passes as they are run, levels replaced by their lists; empty where nothing is to be done."""
    return tuple(one for name in passes for one in (_level(name, hardware) if name in LEVELS else (name,)))


def _level(name: str, hardware: Hardware) -> tuple[str, ...]:
    if hardware.kernels == _FAST:
        return ("int8",) if name == "balanced" else ("int4",)
    if hardware.sparse_units and name == "aggressive":
        return ("prune_2_4",)
    return ()
