"""Parse and validate the header of a safetensors file, in plain Python.

    header_tensors(Path("model.safetensors"))["model.norm.weight"].shape          # (64,)

A file is 8 bytes with the length of a JSON header, the header, then the tensors without a gap
(https://huggingface.co/docs/safetensors/index#format). The header is read from the first bytes, so a truncated download
is found in milliseconds.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.common.files.reading import brief, open_regular, parse_json

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""As in the reference implementation (MAX_HEADER_SIZE in safetensors/src/tensor.rs)."""
_MAX_AXES = 64
_MAX_SIZE = 1 << 63
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_WIDE = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of one tensor: `nbytes` bytes from byte `offset` of the file, row after row."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def is_wide(self) -> bool:
        """Whether it has a floating-point format of 16 bits or more."""
        return self.dtype in _WIDE


def header_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, in file order.

    Raises OSError, and ValueError naming the file for one that is damaged or truncated.
    """
    try:
        return _read(path)
    except ValueError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path}: truncated or damaged: {reason}; fetch or copy it again") from error


def _read(path: Path) -> dict[str, StoredTensor]:
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        first = file.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        begin = _LENGTH_BYTES + length
        if len(first) < _LENGTH_BYTES or not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError(f"its {file_bytes} bytes do not begin with a safetensors header")
        if begin > file_bytes:
            raise ValueError(f"expected at least {begin} bytes (the header alone), found {file_bytes}")
        header = parse_json(file.read(length), "header")
    if not isinstance(header, dict):
        raise ValueError(f"header: got {type(header).__name__}, expected a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, begin) for name, entry in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = begin
    for name, tensor in ordered.items():
        if tensor.offset != end:
            raise ValueError(f"tensor {brief(name)} begins at byte {tensor.offset} instead of {end}")
        end += tensor.nbytes
    if end != file_bytes:
        raise ValueError(f"expected {end} bytes by its header, found {file_bytes}")
    return ordered


def _stored(path: Path, name: str, entry: Any, first: int) -> StoredTensor:
    where = f"tensor {brief(name)}"
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: got {type(entry).__name__}, expected dtype, shape and data_offsets")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise ValueError(f"{where}: dtype: got {brief(dtype)}, expected a name such as F32")
    if not _are_sizes(shape) or len(shape) > _MAX_AXES:
        raise ValueError(f"{where}: shape: got {brief(shape)}, expected at most {_MAX_AXES} whole numbers")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{where}: data_offsets: got {brief(offsets)}, expected two whole numbers")
    begin, end = offsets
    bits = _DTYPE_BITS.get(dtype)  # None: a dtype newer than this table
    if end < begin or (bits is not None and math.prod(shape) * bits != (end - begin) * 8):
        raise ValueError(f"{where} of shape {brief(tuple(shape))} does not fill its {end - begin} bytes")
    return StoredTensor(path, dtype, tuple(shape), first + begin, end - begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < _MAX_SIZE for number in value)
