"""Shared base of all models: frozen values, content hashes, atomic files.

One schema version applies to everything written to disk. Increment it when an older reader would misread a new
file, or a new reader an older file. Until the first release every other version is rejected
(`configs.records.record.check_schema`).
"""

import hashlib
import json
import os
import re
import stat
import sys
import tempfile
from datetime import UTC, datetime
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PositiveFloat

from configs.common.files.reading import open_regular

SCHEMA_VERSION = 3
_DESCRIPTORS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


class Frozen(BaseModel):
    """An immutable value without unknown keys, infinities or NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def plain_integer(value: Any) -> Any:
    """Return an integer of numpy or pandas as Python's, which alone json and pydantic take; anything else as it is."""
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, Integral) else value


class WrongArgument(ValueError):
    """Something that the user named on the command line is not there, or not what the command takes: exit code 2."""


def canonical_json(data: Any) -> str:
    """Serialise to canonical JSON: sorted keys, no spaces, ASCII only."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def content_hash(data: Any, digits: int = 16) -> str:
    """Return the first `digits` hexadecimal digits of SHA-256 over `canonical_json(data)`."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()[:digits]


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, read in chunks."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expanded(path: str | Path) -> Path:
    """Return a path with `~` and `~user` replaced. That of a user whom this machine does not have stays as it is."""
    return Path(os.path.expanduser(path))


def write_atomically(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write under a temporary name in the same folder, flush to disk, then rename.

    A reader sees the old file or the new one, never a part of it. Raises OSError (a full disk,
    a folder that cannot be written) and leaves no temporary file behind. Until the file
    has its `mode` only its owner may read it. A device or a pipe (`/dev/stdout`, `>(jq .)`) is written into: root
    would replace `/dev/null` for everybody.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if _is_stream(path):
            if sys.stdout is not None:
                sys.stdout.flush()
            with path.open("ab") as stream:  # where /dev/stdout is a file, what was printed before stays in it
                stream.write(data)
        else:
            _write_and_rename(path, data, mode)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # not the temporary name, which nobody asked for
        raise


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    named = path.parent in _DESCRIPTORS  # by which a file is reached that has another name
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or (named and stat.S_ISREG(mode))


def _write_and_rename(path: Path, data: bytes, mode: int) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def utc_now() -> str:
    """Return the current time as `2026-01-31T12:00:00.000000+00:00`."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


PERIOD_PATTERN = r"\s*(\d+(?:\.\d+)?)\s*(s|m|h)?\s*"
_SECONDS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def period_seconds(value: object) -> object:
    """Seconds of `30s`, `2m`, `1.5h` or a number; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(PERIOD_PATTERN, value)
    if found is None:
        raise ValueError(f"invalid duration {value!r}. Use seconds or a suffix: 30s, 2m, 1h")
    return float(found[1]) * _SECONDS[found[2]]


Period = Annotated[PositiveFloat, BeforeValidator(period_seconds)]
