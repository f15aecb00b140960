"""Find public names that several modules define: names that may stand for two things.

    shared_names(tree, imports)

Counted are classes, functions and constants on the top level of a module, without a leading underscore. A name stands
for two things if it is a type's with two definitions, or a function's or constant's of which at least two are imported
by other modules. A function or constant of which fewer are imported is local to its modules. Listed apart, each with
its reason: names that are conventional in a module of their sort, and names that form the interface of modules which
one other module loads by name.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.structure.graph import Import
from benchmarks.structure.source import Module, SourceTree

CONVENTIONAL = {
    "main": "entry point of a command",
    "app": "a command's Typer application",
    "parser": "arguments of a command",
    "DESCRIPTOR": "a kind of workload describes itself",
    "ROOT": "the checkout's folder",
}


Sort = Literal["type", "function", "constant"]


@dataclass(frozen=True)
class SharedName:
    """A name and the modules that define it.

    imported: those of the modules from which others import it. same: all definitions are the same code. reason: why
    it is no defect.
    """

    name: str
    sort: Sort
    modules: tuple[str, ...]
    imported: tuple[str, ...]
    same: bool
    reason: str | None = None

    @property
    def is_ambiguous(self) -> bool:
        return self.reason is None and (self.sort == "type" or len(self.imported) > 1)


def shared_names(tree: SourceTree, imports: list[Import]) -> list[SharedName]:
    """Return every public name of two modules or more: those for two things, then local ones, then those explained."""
    places: dict[str, dict[str, ast.stmt]] = defaultdict(dict)
    used: set[tuple[str, str]] = set()
    for module in tree.modules.values():
        used |= _uses(module, tree)
        for name, node in definitions(module):
            places[name][module.name] = node
    interfaces = _interfaces(imports)
    found = []
    for name, defined in places.items():
        if len(defined) > 1:
            modules = tuple(sorted(defined))
            reason = CONVENTIONAL.get(name) or _loaded_by(modules, interfaces)
            imported = tuple(place for place in modules if (place, name) in used)
            same = len({ast.dump(node) for node in defined.values()}) == 1
            found.append(SharedName(name, _sort(name, defined[modules[0]]), modules, imported, same, reason))
    return sorted(found, key=lambda one: (not one.is_ambiguous, one.reason or "", one.sort, one.name.lower(), one.name))


def definitions(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield public names of a module's top level with the statements that define them."""
    for node in _top_level(module.syntax.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        for name in names:
            if not name.startswith("_"):
                yield name, node


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of the module itself, those under `if` and `try` included."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _top_level([*node.body, *node.orelse, *node.finalbody])
        else:
            yield node


def _sort(name: str, node: ast.stmt) -> Sort:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "function"
    # By the naming convention an alias of a type is in mixed case.
    return "type" if isinstance(node, ast.ClassDef) or (name[0].isupper() and not name.isupper()) else "constant"


def _uses(module: Module, tree: SourceTree) -> set[tuple[str, str]]:
    """(module, name) for each name of another module that this one imports, or reads as an attribute of that module."""
    found: set[tuple[str, str]] = set()
    modules: dict[str, str] = {}
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.Import):
            modules |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in tree.by_source_name:
                    modules[alias.asname or alias.name] = full
                elif node.module in tree.by_source_name:
                    found.add((tree.by_source_name[node.module].name, alias.name))
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            other = tree.by_source_name.get(modules.get(node.value.id, ""))
            if other is not None:
                found.add((other.name, node.attr))
    return found


def _interfaces(imports: list[Import]) -> dict[str, set[str]]:
    """Modules that are loaded by name, by the module that loads them."""
    loaded: dict[str, set[str]] = defaultdict(set)
    for one in imports:
        if one.kind == "name":
            loaded[one.importer].add(one.imported)
    return loaded


def _loaded_by(modules: tuple[str, ...], interfaces: dict[str, set[str]]) -> str | None:
    for loader, loaded in sorted(interfaces.items()):
        if loaded.issuperset(modules):
            return f"interface of the modules that {loader} loads by name"
    return None
