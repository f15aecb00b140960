"""Find copies: six or more lines of code that stand in two places.

    find_copies(tree)

Lines are compared by their tokens, so layout, comments and docstrings do not count; imports, and lines of brackets
alone, are left out. Two sorts are told apart:

exact      the same tokens
renamed    the same tokens but for names and literals, renamed alike throughout each window of six lines. Only windows
           with control flow or several calls count: rows of a table and fields of a class are of one shape everywhere
"""

import ast
import io
import keyword
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.structure.source import Module, SourceTree

MIN_LINES = 6
_MIN_EXACT_TOKENS = 30
_MIN_RENAMED_TOKENS = 60
_MIN_RENAMED_STATEMENTS = 3
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_STATEMENTS = {"if", "for", "while", "with", "try", "return", "raise", "def", "except", "yield"}


_Start = tuple[str, int]
"""A module, and the index of a window's first line among its lines of code."""
_Match = tuple[_Start, _Start]


@dataclass(frozen=True)
class Line:
    """One line of code: its number, and its tokens as (is it a name or a literal, text)."""

    number: int
    tokens: tuple[tuple[bool, str], ...]

    @property
    def is_brackets(self) -> bool:
        return all(text in "()[]{},:" for _, text in self.tokens)


@dataclass(frozen=True)
class Place:
    """Lines of a module, both included."""

    module: str
    first: int
    last: int


@dataclass(frozen=True)
class Copy:
    """A pair of places with the same code. lines: of code, without comments and blank ones."""

    sort: Literal["exact", "renamed"]
    lines: int
    left: Place
    right: Place


def find_copies(tree: SourceTree) -> list[Copy]:
    """Return pairs of copies, as long as they go, exact ones first; renamed ones that overlap those are left out."""
    lines = {name: code_lines(module) for name, module in sorted(tree.modules.items())}
    exact = _pairs(lines, "exact")
    renamed = [
        one
        for one in _pairs(lines, "renamed")
        if not any(_overlap(one.left, other.left) and _overlap(one.right, other.right) for other in exact)
    ]
    return [*exact, *renamed]


def code_lines(module: Module) -> list[Line]:
    """Lines with code, without docstrings, imports and lines of brackets alone."""
    left_out = _left_out(module.syntax)
    tokens: dict[int, list[tuple[bool, str]]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in _LAYOUT and token.start[0] not in left_out:
            is_name = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            is_literal = token.type in (tokenize.STRING, tokenize.NUMBER)
            tokens[token.start[0]].append((is_name or is_literal, token.string))
    found = [Line(number, tuple(one)) for number, one in sorted(tokens.items())]
    return [line for line in found if not line.is_brackets]


def _left_out(syntax: ast.Module) -> set[int]:
    """Numbers of the lines of imports and docstrings."""
    found: set[int] = set()
    for node in ast.walk(syntax):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _pairs(lines: dict[str, list[Line]], sort: Literal["exact", "renamed"]) -> list[Copy]:
    windows: dict[int, list[_Start]] = defaultdict(list)
    form = _exact if sort == "exact" else _renamed
    for module, code in lines.items():
        for start in range(len(code) - MIN_LINES + 1):
            found = form(code[start : start + MIN_LINES])
            if found is not None:
                windows[hash(found)].append((module, start))
    matches = {
        (left, right)
        for places in windows.values()
        for index, left in enumerate(places)
        for right in places[index + 1 :]
        if left[0] != right[0] or right[1] - left[1] >= MIN_LINES
    }
    runs = (run for run in _runs(matches) if sort == "renamed" or _is_long(lines, run))
    return [_copy(sort, lines, run) for run in runs]


def _exact(window: list[Line]) -> object | None:
    return tuple(line.tokens for line in window)


def _is_long(lines: dict[str, list[Line]], run: list[_Match]) -> bool:
    (module, start), _ = run[0]
    return (
        sum(len(line.tokens) for line in lines[module][start : start + len(run) + MIN_LINES - 1]) >= _MIN_EXACT_TOKENS
    )


def _renamed(window: list[Line]) -> object | None:
    texts = [text for line in window for _, text in line.tokens]
    if len(texts) < _MIN_RENAMED_TOKENS or sum(text in _STATEMENTS for text in texts) < _MIN_RENAMED_STATEMENTS:
        return None
    numbers: dict[str, int] = {}
    return tuple(
        tuple(numbers.setdefault(text, len(numbers)) if can_differ else text for can_differ, text in line.tokens)
        for line in window
    )


def _runs(
    matches: set[tuple[tuple[str, int], tuple[str, int]]],
) -> Iterator[list[tuple[tuple[str, int], tuple[str, int]]]]:
    """Windows that follow each other in both places, as one run each."""
    left_over = set(matches)
    for match in sorted(matches):
        if match in left_over:
            run = []
            while match in left_over:
                left_over.remove(match)
                run.append(match)
                (left, start), (right, other) = match
                match = ((left, start + 1), (right, other + 1))
            yield run


def _copy(sort: Literal["exact", "renamed"], lines: dict[str, list[Line]], run: list[_Match]) -> Copy:
    count = len(run) + MIN_LINES - 1
    left, right = (
        Place(module, lines[module][start].number, lines[module][start + count - 1].number) for module, start in run[0]
    )
    return Copy(sort, count, left, right)


def _overlap(one: Place, other: Place) -> bool:
    return one.module == other.module and one.first <= other.last and other.first <= one.last
