"""Find circles of imports, between modules and between packages.

    graph = import_graph(tree)
    module_circles(graph)
    package_circles(graph)

Every import counts: at the top of a module, inside a function, under TYPE_CHECKING, and by name: in a module that
calls `import_module`, a string that is the name of a module of the tree counts as an import of it.

`from package import name` is an edge to the sub-module `name` if there is one, else to the package's `__init__`. A
package that imports its own sub-modules is therefore in a circle only if one of them imports from the package.

Packages are compared level by level: at each package, its direct modules and sub-packages are the nodes, and an
import of anything below one from anything below another is an edge.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from benchmarks.structure.source import Module, SourceTree

Kind = Literal["top", "lazy", "type", "name"]


@dataclass(frozen=True)
class Import:
    """One module imports another. kind: at the top, in a function, for types alone, or by a string."""

    importer: str
    imported: str
    line: int
    kind: Kind


@dataclass(frozen=True)
class Circle:
    """Modules, or children of one package, that all import each other, with the imports that close the circle."""

    level: str
    members: tuple[str, ...]
    imports: tuple[Import, ...]


def import_graph(tree: SourceTree) -> list[Import]:
    """List all imports between modules of the tree; a module that imports itself is left out."""
    found = []
    for module in tree.modules.values():
        visitor = _Imports(module, tree)
        visitor.visit(module.syntax)
        found += [one for one in visitor.found if one.imported != module.name]
    return sorted(set(found), key=lambda one: (one.importer, one.line, one.imported))


class _Imports(ast.NodeVisitor):
    def __init__(self, module: Module, tree: SourceTree) -> None:
        self.found: list[Import] = []
        self._module, self._tree = module, tree
        self._kind: Kind = "top"
        self._by_name = "import_module" in module.text

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno, self._kind)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            package = self._module.source_name.split(".")
            kept = len(package) - node.level + self._module.is_package
            base = ".".join([*package[:kept], *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            self._add(full if full in self._tree.by_source_name else base, node.lineno, self._kind)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._inside("type", node.body)
            self._inside(self._kind, node.orelse)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside("lazy", [*node.decorator_list, node.args, *node.body])

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if self._by_name and isinstance(node.value, str):
            for name in (node.value, f"{self._module.source_name}.{node.value}"):
                if name in self._tree.by_source_name:
                    self._add(name, node.lineno, "name")

    def _inside(self, kind: Kind, nodes: "list[ast.stmt] | list[ast.AST]") -> None:
        before, self._kind = self._kind, kind
        for node in nodes:
            self.visit(node)
        self._kind = before

    def _add(self, name: str, line: int, kind: Kind) -> None:
        while name and name not in self._tree.by_source_name:
            name = name.rpartition(".")[0]
        if name:
            self.found.append(Import(self._module.name, self._tree.by_source_name[name].name, line, kind))


def module_circles(imports: list[Import]) -> list[Circle]:
    """Return groups of modules that reach each other by imports."""
    return _circles("modules", {one: (one.importer, one.imported) for one in imports})


def package_circles(imports: list[Import]) -> list[Circle]:
    """Return, for each package (and the root, "."), groups of its children that reach each other by imports."""
    levels: dict[str, dict[Import, tuple[str, str]]] = {}
    for one in imports:
        divided = _divide(one.importer, one.imported)
        if divided is not None:
            level, *pair = divided
            levels.setdefault(level, {})[one] = (pair[0], pair[1])
    return [circle for level in sorted(levels) for circle in _circles(level, levels[level])]


def _divide(importer: str, imported: str) -> tuple[str, str, str] | None:
    """Return the package where two names part, and its two children; None if one name holds the other."""
    left, right = importer.split("."), imported.split(".")
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    if shared in (len(left), len(right)):
        return None  # a package's own `__init__` and something below it
    level = ".".join(left[:shared]) or "."
    return level, ".".join(left[: shared + 1]), ".".join(right[: shared + 1])


def _circles(level: str, edges: dict[Import, tuple[str, str]]) -> list[Circle]:
    graph = nx.DiGraph(edges.values())
    found = []
    for members in nx.strongly_connected_components(graph):
        if len(members) > 1:
            inner = [one for one, (left, right) in edges.items() if left in members and right in members]
            found.append(Circle(level, tuple(sorted(members)), tuple(inner)))
    return sorted(found, key=lambda circle: circle.members)


def package_order(imports: list[Import], level: str) -> Iterator[tuple[str, str]]:
    """Yield pairs (importer, imported) of different children of a package."""
    pairs = set()
    for one in imports:
        divided = _divide(one.importer, one.imported)
        if divided is not None and divided[0] == level:
            pairs.add(divided[1:])
    yield from sorted(pairs)
