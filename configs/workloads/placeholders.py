"""Placeholders in a script's command and the arithmetic of its tokens per step. No code is ever evaluated.

filled_text("--lr={params.lr}", {"params.lr": 3e-4})        # "--lr=0.0003"
names_in("{micro_batch_size} * {dp}")                     # {"micro_batch_size", "dp"}
arithmetic("4 * (2 + 6) * 1024")                       # 32768
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping

from configs.common.printable import printable

ParameterValue = bool | int | float | str
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_-]+)*)\}")
_MAX_CHARACTERS = 400
_MAX_NUMBER = 1e15
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max}


def names_in(*texts: str) -> set[str]:
    """The names of all placeholders in texts. Other braces, as of JSON, are text."""
    return {name for text in texts for name in _PLACEHOLDER.findall(text)}


def filled_text(text: str, values: Mapping[str, ParameterValue | None]) -> str:
    """The text with each placeholder's value. Raises KeyError with the name of one that has none."""

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1])
        if found is None:
            raise KeyError(match[1])
        return argument_text(found)

    return _PLACEHOLDER.sub(value, text)


def argument_text(value: ParameterValue) -> str:
    """A value as a script reads it: whole numbers without a point, true and false in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def arithmetic(text: str) -> float:
    """The value of an expression of numbers, + - * / // %, brackets, min() and max().

    Raises ValueError for anything else, and for numbers that are too large.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"got {len(text):,} characters, expected at most {_MAX_CHARACTERS}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body, text)
    except ZeroDivisionError as error:
        raise ValueError(f"{printable(text, 80)}: division by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _refused(text) from error


def _value(node: ast.expr, text: str) -> float:
    found: float
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        found = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_value(node.left, text), _value(node.right, text))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -_value(node.operand, text)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords or not node.args:
            raise _refused(text)
        found = _FUNCTIONS[node.func.id](*_several(node.args, text))
    else:
        raise _refused(text)
    if not abs(found) <= _MAX_NUMBER:  # NaN too
        raise ValueError(f"{printable(text, 80)}: a number beyond {_MAX_NUMBER:g}")
    return found


def _several(nodes: Iterable[ast.expr], text: str) -> list[float]:
    values = [_value(node, text) for node in nodes]
    return values if len(values) > 1 else [values[0], values[0]]


def _refused(text: str) -> ValueError:
    return ValueError(
        f"got {printable(repr(text), 100)}, expected arithmetic of numbers and {{placeholders}} (+ - * / // % min max)"
    )
