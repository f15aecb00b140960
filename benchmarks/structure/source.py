"""Read the Python files of a checkout, without importing any of them.

    tree = SourceTree.read(Path("."))
    tree.modules["engine.planner.selector"].lines

A mapping from old to new paths gives the tree as it will be after a move: imports are still resolved by the old
names, every module then bears its new one.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

PRODUCT = ("configs", "engine", "slurm", "reports", "tasks", "flows")
SCRIPTS = ("configs", "studies", "scripts")
"""Programs of shipped studies: data, run by launchers of their own and imported by nothing."""


@dataclass(frozen=True)
class Module:
    """One Python file. path: relative to the checkout, after the mapping; name: dotted, without `__init__`."""

    name: str
    path: PurePosixPath
    text: str
    source_name: str

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def folder(self) -> str:
        return str(self.path.parent)


@dataclass(frozen=True)
class SourceTree:
    """All modules of a checkout by dotted name; source_names: the same by the name that imports use."""

    modules: Mapping[str, Module]

    @classmethod
    def read(
        cls, root: Path, folders: Iterable[str] = PRODUCT, mapping: Mapping[str, str] | None = None
    ) -> "SourceTree":
        """Read every .py file below the folders. Raises ValueError if two files are mapped to one path."""
        modules: dict[str, Module] = {}
        for folder in folders:
            for file in sorted((root / folder).rglob("*.py")):
                if file.relative_to(root).parts[: len(SCRIPTS)] == SCRIPTS:
                    continue
                old = file.relative_to(root).as_posix()
                path = PurePosixPath((mapping or {}).get(old, old))
                module = Module(module_name(path), path, file.read_text(encoding="utf-8"), module_name(Path(old)))
                if module.name in modules:
                    raise ValueError(f"{path}: both {old} and {modules[module.name].source_name} are mapped to it")
                modules[module.name] = module
        return cls(modules)

    def within(self, folders: Iterable[str]) -> "SourceTree":
        """Only the modules in these top-level folders: a mapping may have moved others out."""
        kept = set(folders)
        return SourceTree({name: one for name, one in self.modules.items() if one.path.parts[0] in kept})

    @cached_property
    def by_source_name(self) -> Mapping[str, Module]:
        return {module.source_name: module for module in self.modules.values()}


def module_name(path: Path | PurePosixPath) -> str:
    """Return the dotted name of a file relative to its root; a package has that of its folder."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_mapping(file: Path) -> dict[str, str]:
    """Read lines `old/path.py new/path.py`; lines of other forms must be empty or begin with #."""
    mapping: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split("#")[0].replace("->", " ").split()
        if not words:
            continue
        if len(words) != 2:
            raise ValueError(f"{file}, line {number}: expected `old/path.py new/path.py`, got {line!r}")
        mapping[words[0]] = words[1]
    return mapping
