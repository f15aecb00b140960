"""Bounds of a study's plain data, whoever wrote it: a file, the command line or a form.

    plain_problems({"study": "a\\x1b[31m"})        # ["study: contains the control character \\x1b"]

What is within them can be copied, hashed, printed and used as a path without a further look.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from configs.common.files.reading import brief
from configs.common.printable import printable

_MAX_DEPTH = 50
_MAX_VALUES = 50_000
_MAX_CHARACTERS = 10_000
_MAX_INTEGER = 10**18
_REFUSED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but tab and line ends, which shell lines may hold, and halves of surrogate pairs."""


def plain_problems(data: Mapping[str, Any]) -> list[str]:
    """Return what is out of bounds, each as `dotted.field: what is wrong`; other types than those of JSON pass."""
    problems: list[str] = []
    values = 0
    left: list[tuple[Any, str, int]] = [(data, "", 0)]
    while left:
        value, where, depth = left.pop()
        values += 1
        if depth > _MAX_DEPTH or values > _MAX_VALUES:
            what = f"more than {_MAX_VALUES:,} values" if values > _MAX_VALUES else f"more than {_MAX_DEPTH} levels"
            return [*problems, f"{printable(where, 100)}: {what}"]
        if isinstance(value, Mapping):
            left += [(inner, f"{where}.{key}" if where else str(key), depth + 1) for key, inner in value.items()]
            problems += [f"{where or 'study'}: key {brief(key)}: {found}" for key in value if (found := _wrong(key))]
        elif isinstance(value, list | tuple):
            left += [(inner, f"{where}[{index}]", depth + 1) for index, inner in enumerate(value)]
        elif found := _wrong(value):
            problems.append(f"{printable(where, 100)}: {found}")
    return problems


def _wrong(value: Any) -> str | None:
    if isinstance(value, str):
        if len(value) > _MAX_CHARACTERS:
            return f"{len(value):,} characters, expected at most {_MAX_CHARACTERS:,}"
        found = _REFUSED.search(value)
        return f"contains the control character {printable(found[0])}" if found else None
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        return "number too large, expected at most 18 digits"
    if isinstance(value, float) and not math.isfinite(value):
        return f"got {value}, expected a finite number"
    return None
