"""Locations of the tensors of safetensors files. The engine needs each tensor's offset to read parts of it.

tensors = tensor_locations([Path("model.safetensors")])
tensors["model.norm.weight"].offset
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.common.files import safetensors_header
from configs.common.files.reading import brief

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorLocation:
    """Location of one tensor: `nbytes` bytes from `offset` of the file, row after row."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def is_wide(self) -> bool:
        """Whether it has a floating-point format of 16 bits or more."""
        return self.dtype.is_floating_point and self.dtype.itemsize >= 2


def tensor_locations(files: Iterable[Path]) -> dict[str, TensorLocation]:
    """Return all tensors of the files by name, in file order.

    Raises ValueError, naming the file, for one that is missing, damaged or truncated, or if two files hold the same
    tensor.
    """
    found: dict[str, TensorLocation] = {}
    for path in files:
        for name, tensor in _tensors_of(path).items():
            if name in found:
                raise ValueError(f"{path}: tensor {name} is also in {found[name].file}; keep one of the two files")
            found[name] = tensor
    return found


def _tensors_of(path: Path) -> dict[str, TensorLocation]:
    try:
        header = safetensors_header.header_tensors(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; fetch the model again") from error
    found = {}
    for name, entry in header.items():
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError(
                f"{path}: tensor {brief(name)}: unknown dtype {brief(entry.dtype)}; use one of: {', '.join(DTYPES)}"
            )
        found[name] = TensorLocation(path, dtype, entry.shape, entry.offset, entry.nbytes)
    return found
