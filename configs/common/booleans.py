"""Booleans where numbers belong: pydantic reads `repeats: yes` as 1 without a word.

boolean_problems({"repeats": True}, Measuring(repeats=1))    # ["repeats: expected a number, got true: ..."]
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

YAML_BOOLEANS = "unquoted, yes, no, on and off mean true or false"


def boolean_problems(
    given: Mapping[str, Any], made: BaseModel | Mapping[str, Any], hint: str = f": {YAML_BOOLEANS}"
) -> list[str]:
    """Name each field of a file that has true or false where the value made of it has a number, as `dotted.field: why`.

    given: plain data; made: what was validated of it, whose fields bear the names of the data's keys. hint: what
    explains it, of YAML by default.
    """
    return [f"{where}: expected a number, got {word}{hint}" for where, word in _taken_as_numbers(given, made, "")]


def _taken_as_numbers(given: Any, made: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(given, bool):
        if isinstance(made, int | float) and not isinstance(made, bool):
            yield where, str(given).lower()
    elif isinstance(given, Mapping):
        for key, value in given.items():
            inner = made.get(key) if isinstance(made, Mapping) else getattr(made, str(key), None)
            yield from _taken_as_numbers(value, inner, f"{where}.{key}" if where else str(key))
    elif isinstance(given, list | tuple) and isinstance(made, list | tuple) and len(given) == len(made):
        for index, (value, inner) in enumerate(zip(given, made, strict=True)):
            yield from _taken_as_numbers(value, inner, f"{where}[{index}]")
