"""Count files and lines: by folder, loose in a folder, and of long modules and functions.

folders(tree); long_modules(tree); long_functions(tree)
"""

import ast
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.structure.source import SourceTree

MAX_LOOSE = {"engine": 3}
MAX_LOOSE_ELSEWHERE = 14
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Folder:
    """A folder with Python files. loose: files that lie in it directly, `__init__.py` left out; files, lines: below."""

    path: str
    loose: int
    files: int
    lines: int

    @property
    def is_crowded(self) -> bool:
        return self.loose > MAX_LOOSE.get(self.path, MAX_LOOSE_ELSEWHERE)


@dataclass(frozen=True)
class Long:
    """A module or function that is longer than it should be."""

    name: str
    lines: int


def folders(tree: SourceTree) -> list[Folder]:
    """Return all folders of the tree, by path."""
    loose: dict[str, int] = defaultdict(int)
    files: dict[str, int] = defaultdict(int)
    lines: dict[str, int] = defaultdict(int)
    for module in tree.modules.values():
        loose[module.folder] += not module.is_package
        for folder in (module.path.parent, *module.path.parent.parents):
            if str(folder) != ".":
                files[str(folder)] += 1
                lines[str(folder)] += module.lines
    return [Folder(path, loose[path], files[path], lines[path]) for path in sorted(files)]


def long_modules(tree: SourceTree) -> list[Long]:
    """Return modules of more than 400 lines, the longest first."""
    found = [Long(str(module.path), module.lines) for module in tree.modules.values()]
    return _longest([one for one in found if one.lines > MAX_MODULE_LINES])


def long_functions(tree: SourceTree) -> list[Long]:
    """Return functions of more than 60 lines, decorators and docstring included, the longest first."""
    found = []
    for module in tree.modules.values():
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                length = (node.end_lineno or node.lineno) - first + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(Long(f"{module.path}:{node.lineno} {node.name}", length))
    return _longest(found)


def _longest(found: list[Long]) -> list[Long]:
    return sorted(found, key=lambda one: (-one.lines, one.name))
