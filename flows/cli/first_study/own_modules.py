"""The modules of the user's own that a script imports: they are copied with it.

own_modules(Path("train.py"))        # OwnModules(inputs=[.../model.py, .../utils], module=None)

The files are parsed, never imported.
"""

import ast
import os
from dataclasses import dataclass
from pathlib import Path

from configs.common.files.reading import read_bytes

_MAX_BYTES = 4 << 20
_MAX_FILES = 500


@dataclass(frozen=True)
class OwnModules:
    """Files and folders besides the script. module: its name, where it is part of a package that alone can start it."""

    inputs: tuple[Path, ...] = ()
    module: str | None = None


def own_modules(script: Path) -> OwnModules:
    """What lies beside a script and is imported by it, or by what it imports; of a script with relative imports, its
    package.
    """
    script = script.resolve()
    levels = [node.level for node in _imports(script) if isinstance(node, ast.ImportFrom)]
    if not any(levels):
        return OwnModules(tuple(_beside(script.parent, script)))
    package = script.parents[min(max(levels), len(script.parents)) - 1]
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    name = ".".join(script.relative_to(package.parent).with_suffix("").parts)
    return OwnModules((package, *_beside(package.parent, package)), name)


def imported_by_own(script: Path) -> set[str]:
    """First names of all modules that the user's own ones import."""
    return {name for path in own_modules(script).inputs for file in _sources(path) for name in _names(file)}


def _beside(folder: Path, first: Path) -> list[Path]:
    """Modules and packages in a folder that a file or package there imports, and those that they import."""
    found: list[Path] = []
    waiting, seen = [first], {first}
    while waiting:
        for file in _sources(waiting.pop()):
            for name in _names(file):
                path = next((each for each in (folder / name, folder / f"{name}.py") if _is_module(each)), None)
                if path is not None and path not in seen:
                    seen.add(path)
                    found.append(path)
                    waiting.append(path)
    return sorted(found)


def _is_module(path: Path) -> bool:
    return path.is_file() if path.suffix == ".py" else path.is_dir() and bool(_sources(path))


def _sources(path: Path) -> list[Path]:
    """A file, or the Python files of a package, so many as are looked through."""
    if path.is_file():
        return [path]
    found: list[Path] = []
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(each for each in folders if each.isidentifier())
        found += [Path(folder) / each for each in sorted(files) if each.endswith(".py")]
        if len(found) > _MAX_FILES:
            break
    return found[:_MAX_FILES]


def _names(file: Path) -> list[str]:
    """First names of the modules that a file imports by their full names."""
    names: list[str] = []
    for node in _imports(file):
        if isinstance(node, ast.Import):
            names += [alias.name.partition(".")[0] for alias in node.names]
        elif node.module and not node.level:
            names.append(node.module.partition(".")[0])
    return names


def _imports(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Imports of a file; none of one that cannot be read."""
    try:
        tree = ast.parse(read_bytes(file, _MAX_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
