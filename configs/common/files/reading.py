"""The one reader of files that somebody else, or a crash, may have written or damaged.

    read_bytes(path, RECORD_BYTES)          # regular files alone, at most so many bytes
    read_json_object(path)                  # nested at most 200 deep, whole numbers below 2^64, no NaN
    read_model(path, Record)                # a pydantic model; errors in our words, without pydantic's
    read_tail(path, 10_000)                 # the end of a log
    reason_of(error)                        # of reading: "Permission denied"
    with open_regular(path) as file: ...    # what is read in pieces, such as weights

Raises OSError as the system has it (no such file, permission denied), and ValueError naming the file and what is wrong
with its content. A pipe or a device is never waited for: it is no regular file. A test holds that no other module opens
such files by itself (`tests/test_layers.py`).
"""

import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from configs.common.printable import printable, shortened

MIB = 1 << 20
RECORD_BYTES = 16 * MIB
"""Of a record, an environment, what one process says of itself: a few KB, and more with thousands of ranks."""
PLAN_BYTES = 64 * MIB
"""Of plans, jobs, manifests and tables: they grow with the cells of a study."""
TEXT_BYTES = 256 * MIB
"""Of prompts and examples, line by line."""
SAMPLES_BYTES = 2048 * MIB
"""Of an archive of raw samples, answers with their logits included."""

MAX_JSON_VALUES = 5_000_000
"""In one file; each takes up to 64 bytes of memory."""
_LONG_INTEGER = re.compile(rb"\d{20}")
_MAX_INTEGER = 1 << 64
_SHOWN_PROBLEMS = 3
_SHOWN_CHARACTERS = 60

_Model = TypeVar("_Model", bound=BaseModel)


def open_regular(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading. Raises OSError, and ValueError for anything else or a larger one."""
    descriptor, _ = open_descriptor(path, max_bytes)
    try:
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_descriptor(path: Path, max_bytes: int | None) -> tuple[int, int]:
    """Of a regular file, open for reading, and its size in bytes. Raises as `open_regular`."""
    _check_kind(path, os.stat(path), max_bytes)  # before it is opened: that alone can set off a device
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status, max_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Check a file that a library opens by its name. Raises as `open_regular`."""
    _check_kind(path, os.stat(path), max_bytes)


def read_bytes(path: Path, max_bytes: int = RECORD_BYTES) -> bytes:
    """All bytes of a regular file. Raises OSError, and ValueError for anything else or a larger one."""
    descriptor, size = open_descriptor(path, max_bytes)
    try:
        data = os.read(descriptor, size + 1)  # a buffer of the limit's size would be gigabytes
        while piece := os.read(descriptor, max(MIB, size - len(data))):  # it has grown meanwhile, or is one of /proc
            data += piece
            if len(data) > max_bytes:
                raise _too_large(path, len(data), max_bytes)
    finally:
        os.close(descriptor)
    return data


def reason_of(error: Exception) -> str:
    """What an error says; one of the system without its number and its file, which the message around it names."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def read_text(path: Path, max_bytes: int = RECORD_BYTES, errors: str = "strict") -> str:
    """A text in UTF-8; a byte order mark before it is dropped. Raises as `read_bytes`."""
    try:
        text = read_bytes(path, max_bytes).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return text.removeprefix("\ufeff")


def read_tail(path: Path, max_bytes: int) -> str:
    """The last bytes of a text, such as a log of any size; what is not UTF-8 is replaced. Raises as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - max_bytes))
        return file.read(max_bytes).decode("utf-8", "replace")


def parse_json(data: bytes, where: str, finite: bool = True, bounded: bool = True) -> Any:
    """The value of a JSON text. Raises ValueError, naming `where`, for text that is not JSON or is out of bounds.

    finite: refuse NaN and Infinity, which JSON lacks and Python's writer has. bounded: refuse whole numbers of more
    than 64 bits, with which other programs say that there is no limit.
    """
    _check_size(data, where)
    try:
        value = from_json(data, allow_inf_nan=not finite)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({_json_problem(error)})") from error
    if bounded and _LONG_INTEGER.search(data):
        _check_integers(value, where)
    return value


def read_json(path: Path, max_bytes: int = RECORD_BYTES, finite: bool = True, bounded: bool = True) -> Any:
    """The value in a JSON file. Raises OSError, and ValueError naming the file. finite, bounded: as of `parse_json`."""
    return parse_json(read_bytes(path, max_bytes), str(path), finite, bounded)


def read_json_object(
    path: Path, max_bytes: int = RECORD_BYTES, finite: bool = True, bounded: bool = True
) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError, and ValueError naming the file where it holds anything else.

    finite, bounded: as of `parse_json`.
    """
    data = read_json(path, max_bytes, finite, bounded)
    if not isinstance(data, dict):
        raise ValueError(f"{path}: got {type(data).__name__}, expected a JSON object")
    return data


def read_model(path: Path, model: type[_Model], max_bytes: int = RECORD_BYTES) -> _Model:
    """The value in a JSON file of ours, which may be padded (blanks or zero bytes at its end).

    Raises OSError, and ValueError naming the file and the field.
    """
    return parse_model(read_bytes(path, max_bytes), model, str(path))


def parse_model(data: bytes, model: type[_Model], where: str) -> _Model:
    """The value of a JSON text. Raises ValueError naming `where` and the field."""
    data = data.rstrip(b" \0")
    _check_size(data, where)
    if _LONG_INTEGER.search(data):
        parse_json(data, where)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(f"{where}: {validation_text(error)}") from error


def as_model(data: Any, model: type[_Model], where: str) -> _Model:
    """Plain data of a file as a model. Raises ValueError naming `where` and the field."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{where}: {validation_text(error)}") from error


def validation_text(error: ValidationError) -> str:
    """What is wrong, by field, in our words: the first few problems and how many more there are."""
    count = error.error_count()
    if count > 1000:
        return f"{count:,} fields are wrong"
    details = error.errors(include_url=False)
    told = [_problem(dict(detail)) for detail in details[:_SHOWN_PROBLEMS]]
    rest = count - len(told)
    return "; ".join(told) + (f"; and {rest} more problem{'' if rest == 1 else 's'}" if rest else "")


def _problem(detail: dict[str, Any]) -> str:
    dotted = ""
    for item in detail["loc"]:
        dotted += f"[{item}]" if isinstance(item, int) else f"{'.' if dotted else ''}{item}"
    text = _problem_text(detail)
    return f"{printable(dotted, 2 * _SHOWN_CHARACTERS)}: {text}" if dotted else text


def _problem_text(detail: dict[str, Any]) -> str:
    kind, context, given = detail["type"], detail.get("ctx", {}), detail.get("input")
    if kind == "json_invalid":
        return f"not JSON ({_json_problem(context.get('error', detail['msg']))})"
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "value_error":
        return printable(str(context.get("error", detail["msg"])), 5 * _SHOWN_CHARACTERS)
    if kind == "string_pattern_mismatch":
        return form_problem(detail)
    if (counted := length_problem(detail)) is not None:
        return counted
    text = printable(detail["msg"][:1].lower() + detail["msg"][1:], 5 * _SHOWN_CHARACTERS)
    return text if isinstance(given, dict | list) else f"{text}, got {brief(given)}"


def form_problem(detail: dict[str, Any]) -> str:
    """What is wrong with a text that its pattern does not match, an error of pydantic."""
    form = str(detail["ctx"]["pattern"]).removeprefix("^").removesuffix("$")
    return f"got {brief(detail.get('input'))}, expected the form {form}"


def length_problem(detail: dict[str, Any]) -> str | None:
    """What is wrong with how many entries a list or a mapping has; None for other errors of pydantic."""
    if detail["type"] not in ("too_short", "too_long"):
        return None
    context = detail["ctx"]
    most = context.get("max_length")
    limit = context["min_length"] if most is None else most
    bound = f"{'least' if most is None else 'most'} {limit:,} {'entry' if limit == 1 else 'entries'}"
    actual = context.get("actual_length")
    got = "more" if actual is None else f"{actual:,}" if actual else "none"
    return f"expected at {bound}, got {got}"


def brief(value: object) -> str:
    """A value as a message shows it, however long it is."""
    if isinstance(value, str):
        return printable(repr(shortened(value, _SHOWN_CHARACTERS)))
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        return "a whole number of more than 64 bits"
    return printable(repr(value), _SHOWN_CHARACTERS)


def _check_kind(path: Path, found: os.stat_result, max_bytes: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{path}: is a folder, expected a file")
    if not stat.S_ISREG(found.st_mode):
        kind = "a named pipe" if stat.S_ISFIFO(found.st_mode) else "a socket" if stat.S_ISSOCK(found.st_mode) else None
        raise ValueError(f"{path}: is {kind or 'a device'}, expected a regular file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise _too_large(path, found.st_size, max_bytes)


def _too_large(path: Path, size: int, max_bytes: int) -> ValueError:
    return ValueError(f"{path}: {size:,} bytes, expected at most {max_bytes:,}")


def _check_size(data: bytes, where: str) -> None:
    """Refuse text of so many values that to parse it alone would exhaust the memory."""
    if len(data) > MAX_JSON_VALUES and data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_JSON_VALUES:
        raise ValueError(f"{where}: more than {MAX_JSON_VALUES:,} values in one file")


def _json_problem(error: object) -> str:
    text = str(error)
    if "recursion limit" in text:
        return "nested more than 200 levels deep"
    if "number out of range" in text:
        return "a number is too long"
    return printable(text, 3 * _SHOWN_CHARACTERS)


def _check_integers(value: Any, where: str) -> None:
    """Refuse whole numbers beyond 64 bits, which no figure of ours has and no float can hold."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
        elif isinstance(item, int) and abs(item) >= _MAX_INTEGER:
            raise ValueError(f"{where}: a whole number of more than 64 bits")
