"""Checked numbers of a config.json: sizes within bounds, finite reals; every message names the key.

check_finite(data)                                          # ValueError: config.json: rope_theta is NaN
hidden = size_of(data["hidden_size"], "hidden_size", MAX_SIZE)
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from configs.common.printable import printable

_UNBOUNDED = ("time_step_limit",)
"""Of Mamba 2, whose published files have Infinity there."""
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
"""Far more than any model has; so that a damaged file cannot determine how much memory and time are used."""


def check_finite(data: Mapping[str, Any], where: str = "config.json") -> None:
    """Raise ValueError for a number that is NaN or infinite, wherever it stands; JSON has neither."""
    for dotted, value in _numbers(data, ""):
        if not math.isfinite(value) and not (math.isinf(value) and dotted.startswith(_UNBOUNDED)):
            said = "NaN" if math.isnan(value) else "infinite"
            raise ValueError(f"{where}: {printable(dotted, 80)} is {said}, expected a finite number")


def size_of(value: Any, name: str, largest: int, smallest: int = 1) -> int:
    """Return a size stated in a config.json. Raises ValueError naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"config.json: {name} {short_value(value)}, expected a whole number")
    if not smallest <= value <= largest:
        raise ValueError(
            f"config.json: {name} {short_value(value)}, expected a whole number from {smallest} to {largest:,}"
        )
    return int(value)


def size_pair(value: Any, name: str) -> tuple[int, int]:
    """Return a height and a width, stated as one number or as two. Raises ValueError naming the key."""
    pair = value if isinstance(value, list | tuple) and len(value) == 2 else (value, value)
    return size_of(pair[0], name, MAX_SIZE), size_of(pair[1], name, MAX_SIZE)


def real_number(value: Any, name: str) -> float:
    """Return a number stated in a config.json. Raises ValueError naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {name} {short_value(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"config.json: {name} {short_value(value)} is too large") from None


def short_value(value: Any) -> str:
    """Return a value of a config.json for a message, of bounded length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _numbers(value: Any, dotted: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield dotted, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(one, f"{dotted}.{name}" if dotted else str(name))
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _numbers(one, f"{dotted}[{place}]")
