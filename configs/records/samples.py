"""Reader of archives of raw samples, fast enough for a hundred thousand records, and bounded: others may write them.

    columns = read_samples(path, ("pass_seconds",))      # {"0/pass_seconds": array, "1/pass_seconds": array}
    columns = read_archive(path)                         # all, by their names in the archive

An archive as `numpy.savez` writes it (a zip of uncompressed one-dimensional .npy members) is taken apart here,
checksums verified, in a tenth of the time that `numpy.load` takes. Any other zip (compressed, with a comment, of more
than 65,535 members) goes through `zipfile`. What a header promises is compared with the bytes that are there before
anything is allocated. Formats: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
and https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from configs.common.files.reading import MIB, SAMPLES_BYTES, read_bytes
from configs.common.printable import printable
from configs.records.rates import Column

_END = struct.Struct("<4s4H2LH")  # end of central directory: sizes and place of the directory are fields 5 and 6
_ENTRY = struct.Struct("<4s6H3L5H2L")  # an entry of the central directory, without its name
_LOCAL = struct.Struct("<4s5H3L2H")  # the header before a member's bytes, without its name
_NPY = struct.Struct("<6s2BH")  # magic, version 1.0, length of the header text
_ENCRYPTED = 1
_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?(?:[biuf]\d{1,2}|U[1-9]\d{0,2}))', 'fortran_order': (?:True|False), "
    rb"'shape': \((\d{1,18}),\), \} *\n"
)
_SAMPLE_KEY = re.compile(r"\d{1,7}/.+")
TEXT_COLUMNS = ("collective_operation",)
"""Columns of words; all others hold numbers."""
_UNPACKED_BYTES = 256 * MIB
"""Of an archive that is not as the engine writes it: a compressed one may hold a thousand times its own size."""


class DamagedSamplesError(ValueError):
    """An archive of samples that cannot be read."""

    @property
    def refusal(self) -> OSError | None:
        """The system's error where an archive that may be whole could not be read; None: damaged, or not there."""
        cause = self.__cause__
        return cause if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) else None


def read_samples(path: Path, columns: tuple[str, ...]) -> dict[str, Column]:
    """The named columns of every rank, keyed `<rank>/<column>`. Raises DamagedSamplesError naming the file."""
    return columns_named(read_archive(path, lambda name: name.partition("/")[2] in columns), columns, path)


def columns_named(archive: dict[str, Column], columns: tuple[str, ...], path: Path) -> dict[str, Column]:
    """Those of an archive that `read_samples` gives. Raises DamagedSamplesError naming the file."""
    found = {name: column for name, column in archive.items() if name.partition("/")[2] in columns}
    wrong = next((key for key in found if not _SAMPLE_KEY.fullmatch(key)), None)
    if wrong is not None:
        raise DamagedSamplesError(f"{path}: {printable(wrong, 60)}: expected <rank>/<column>")
    return found


def read_archive(path: Path, wanted: Callable[[str], bool] = lambda _: True) -> dict[str, Column]:
    """The wanted columns by name. Raises DamagedSamplesError naming the file, also where there is none."""
    try:
        data = read_bytes(path, SAMPLES_BYTES)
        try:
            return _plain_archive(data, wanted)
        except (_NotPlainError, struct.error, UnicodeDecodeError):
            return _any_archive(data, wanted)
    except OSError as error:
        raise DamagedSamplesError(f"{path}: {error.strerror or error}") from error
    except (
        ValueError, EOFError, KeyError, RuntimeError, NotImplementedError, struct.error, zipfile.BadZipFile, zlib.error
    ) as error:  # fmt: skip
        reason = printable(str(error).removeprefix(f"{path}: "), 200)
        raise DamagedSamplesError(f"{path}: the record's samples cannot be read ({reason})") from error


class _NotPlainError(Exception):
    """Not an archive as `numpy.savez` writes it, or damaged: zipfile says which."""


def _plain_archive(data: bytes, wanted: Callable[[str], bool]) -> dict[str, Column]:
    """The wanted columns. Raises _NotPlainError, struct.error or UnicodeDecodeError where anything is unusual."""
    end = len(data) - _END.size
    magic, disk, first_disk, here, entries, size, place, comment = _END.unpack_from(data, max(end, 0))
    if magic != b"PK\x05\x06" or disk or first_disk or here != entries or comment or place + size != end:
        raise _NotPlainError
    found: dict[str, Column] = {}
    left = len(data)
    for _ in range(entries):
        entry = _ENTRY.unpack_from(data, place)
        flags, method, checksum, packed, plain, length, extra, remark = (entry[i] for i in (3, 4, 7, 8, 9, 10, 11, 12))
        name = data[place + _ENTRY.size : place + _ENTRY.size + length].decode("ascii")
        if entry[0] != b"PK\x01\x02" or flags & _ENCRYPTED or method or packed != plain or not name.endswith(".npy"):
            raise _NotPlainError
        left -= plain
        if left < 0:  # members that overlap: the same bytes read again and again
            raise _NotPlainError
        key = name.removesuffix(".npy")
        if wanted(key):
            found[key] = _expected(key, _member(data, entry[16], plain, checksum))
        place += _ENTRY.size + length + extra + remark
    if place != end:
        raise _NotPlainError
    return found


def _member(data: bytes, place: int, size: int, checksum: int) -> Column:
    local = _LOCAL.unpack_from(data, place)
    begin = place + _LOCAL.size + local[9] + local[10]
    content = memoryview(data)[begin : begin + size]
    if local[0] != b"PK\x03\x04" or len(content) != size or zlib.crc32(content) != checksum:
        raise _NotPlainError
    return _column(content)


def _column(content: memoryview) -> Column:
    """The array of a .npy member. Raises _NotPlainError or struct.error."""
    magic, major, minor, length = _NPY.unpack_from(content)
    if magic != b"\x93NUMPY" or (major, minor) != (1, 0):
        raise _NotPlainError
    dtype, count = _header(bytes(content[_NPY.size : _NPY.size + length]))
    if len(content) - _NPY.size - length != count * dtype.itemsize:
        raise _NotPlainError
    return np.frombuffer(content, dtype, count, _NPY.size + length)


def _expected(key: str, column: Column) -> Column:
    """The column, if it has the type that its readers expect. Raises _NotPlainError for text instead of numbers."""
    if column.dtype.kind == "U" and key.rpartition("/")[2] not in TEXT_COLUMNS:  # of a part: without its rank
        raise _NotPlainError
    return column


@lru_cache(maxsize=1024)
def _header(text: bytes) -> tuple[np.dtype[np.generic], int]:
    """Type and length of a one-dimensional column, from the text before it."""
    match = _HEADER.fullmatch(text)
    if match is None:
        raise _NotPlainError
    try:
        return np.dtype(match[1].decode()), int(match[2])
    except TypeError as error:  # f3
        raise _NotPlainError from error


def _any_archive(data: bytes, wanted: Callable[[str], bool]) -> dict[str, Column]:
    """As `_plain_archive`, of any zip. Raises ValueError, and what zipfile raises for damaged files."""
    found: dict[str, Column] = {}
    left = _UNPACKED_BYTES
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            key = member.filename.removesuffix(".npy")
            if not wanted(key):
                continue
            left -= member.file_size
            if left < 0:
                raise ValueError(f"unpacked more than {_UNPACKED_BYTES:,} bytes")
            try:
                found[key] = _expected(key, _column(memoryview(archive.read(member))))
            except (_NotPlainError, struct.error) as error:
                raise ValueError(f"{printable(key, 60)}: not a one-dimensional column of numbers") from error
    return found
