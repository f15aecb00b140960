"""Parse and validate the headers of safetensors files.

A file is 8 bytes with the length of a JSON header, the header, then the tensors without a gap
(https://huggingface.co/docs/safetensors). The engine parses it directly, because it needs each tensor's offset to read
parts of it.

    tensors = stored_tensors([Path("model.safetensors")])
    tensors["model.norm.weight"].offset
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
_LENGTH_BYTES = 8
# The format's limit: a damaged file must not determine how much memory is allocated.
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor: `nbytes` bytes from `offset` of the file, row after row."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return all tensors of the files by name, in file order.

    Raises ValueError, naming the file, for one that is missing, damaged or truncated, or if two files hold the same
    tensor.
    """
    found: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in _tensors_of(path).items():
            if name in found:
                raise ValueError(f"{path}: tensor {name} is also in {found[name].file}; keep one of the two files")
            found[name] = tensor
    return found


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    try:
        return _parse(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{path}: not a whole safetensors file ({reason}); fetch the model again") from error


def _parse(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        first = _LENGTH_BYTES + header_bytes
        if file_bytes < _LENGTH_BYTES or header_bytes > _MOST_HEADER_BYTES or first > file_bytes:
            raise ValueError(f"its {file_bytes} bytes cannot hold a header of {header_bytes} bytes")
        header = json.loads(file.read(header_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, first) for name, entry in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = first
    for name, tensor in ordered.items():
        if tensor.offset != end:
            raise ValueError(f"tensor {name} begins at byte {tensor.offset} instead of {end}")
        end += tensor.nbytes
    if end != file_bytes:
        raise ValueError(f"it has {file_bytes} bytes, its header tells of {end}")
    return ordered


def _stored(path: Path, name: str, entry: Any, first: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the header's entry for {name} is not one") from None
    if dtype is None:
        raise ValueError(f"tensor {name} is of the unknown dtype {entry['dtype']}; known: {', '.join(DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"the header's entry for {name} has a shape or place that is none")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name} of shape {shape} does not fill the {end - begin} bytes it is said to have")
    return StoredTensor(path, dtype, shape, first + begin, end - begin)
