"""Put all figures of a checkout together, as one value, as plain text and as JSON.

figures = measure(root, mapping, traced=None)
print(text(figures)); json.dumps(as_json(figures))
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.structure.copies import Copy, Place, find_copies
from benchmarks.structure.graph import Circle, import_graph, module_circles, package_circles
from benchmarks.structure.names import SharedName, shared_names
from benchmarks.structure.sizes import (
    MAX_FUNCTION_LINES,
    MAX_LOOSE,
    MAX_LOOSE_ELSEWHERE,
    MAX_MODULE_LINES,
    Folder,
    Long,
    folders,
    long_functions,
    long_modules,
)
from benchmarks.structure.source import PRODUCT, SourceTree
from benchmarks.structure.trace import Trace, reachable

_SHOWN_IMPORTS = 6


@dataclass(frozen=True)
class Figures:
    """What `make structure` prints. reachable: modules that a run may import; trace: None where none was made."""

    root: str
    trace: Trace | None
    reachable: int
    folders: list[Folder]
    outside: list[Folder]
    module_circles: list[Circle]
    package_circles: list[Circle]
    names: list[SharedName]
    copies: list[Copy]
    long_modules: list[Long]
    long_functions: list[Long]

    @property
    def summary(self) -> dict[str, int | None]:
        """The counts that are compared before and after."""
        top = [folder for folder in self.folders if "/" not in folder.path]
        return {
            "files to read for one measurement": len(self.trace.way) + len(self.trace.nouns) if self.trace else None,
            "of these on its way": len(self.trace.way) if self.trace else None,
            "all files that take part": self.trace.files if self.trace else None,
            "modules that a run may import": self.reachable,
            "crowded folders": sum(folder.is_crowded for folder in self.folders),
            "circles of modules": len(self.module_circles),
            "circles of packages": len(self.package_circles),
            "files": sum(folder.files for folder in top),
            "lines": sum(folder.lines for folder in top),
            "names that stand for two things": sum(one.is_ambiguous for one in self.names),
            "exact pairs of copies": sum(one.sort == "exact" for one in self.copies),
            "renamed pairs of copies": sum(one.sort == "renamed" for one in self.copies),
            f"modules over {MAX_MODULE_LINES} lines": len(self.long_modules),
            f"functions over {MAX_FUNCTION_LINES} lines": len(self.long_functions),
        }


def measure(root: Path, mapping: dict[str, str] | None = None, traced: Trace | None = None) -> Figures:
    """Read a checkout, as it is or as it will be under a mapping of paths."""
    tree = SourceTree.read(root, mapping=mapping)
    product = tree.within(PRODUCT)
    imports = import_graph(product)
    return Figures(
        root=str(root),
        trace=traced,
        reachable=len(reachable(imports)),
        folders=folders(product),
        outside=folders(SourceTree.read(root, ("benchmarks", "tests"))),
        module_circles=module_circles(imports),
        package_circles=package_circles(imports),
        names=shared_names(product, imports),
        copies=find_copies(product),
        long_modules=long_modules(product),
        long_functions=long_functions(product),
    )


def as_json(figures: Figures) -> dict[str, Any]:
    """Return everything in plain values, the summary first."""
    return {"summary": figures.summary, **asdict(figures)}


def text(figures: Figures) -> str:
    """Return all tables, the summary last."""
    parts = [
        _trace_text(figures.trace) if figures.trace else "",
        _section("Folders", _folder_lines(figures.folders)),
        _section("Outside the product", _folder_lines([one for one in figures.outside if one.path.count("/") < 2])),
        _section("Circles of modules", _circle_lines(figures.module_circles)),
        _section("Circles of packages", _circle_lines(figures.package_circles)),
        _section("Names that stand for two things", _name_lines(one for one in figures.names if one.is_ambiguous)),
        _section(
            "Names of several modules, used in at most one of them from outside",
            _name_lines(one for one in figures.names if not one.is_ambiguous and not one.reason),
        ),
        _section("Names of several modules, with a reason", _name_lines(one for one in figures.names if one.reason)),
        _section("Copies of six lines or more", _table([_copy_row(one) for one in figures.copies])),
        _section(
            f"Modules over {MAX_MODULE_LINES} lines", _table([(one.name, one.lines) for one in figures.long_modules])
        ),
        _section(
            f"Functions over {MAX_FUNCTION_LINES} lines",
            _table([(one.name, one.lines) for one in figures.long_functions]),
        ),
        _section(
            f"Structure of {figures.root}",
            _table([(name, "not traced" if value is None else value) for name, value in figures.summary.items()]),
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _trace_text(trace: Trace) -> str:
    return "\n\n".join(
        (
            _section(f"Files on the way of one measurement ({len(trace.way)})", _by_folder(trace.way)),
            _section(f"Files to look up beside them ({len(trace.nouns)})", _by_folder(trace.nouns)),
            _section(f"Other files that take part ({len(trace.helpers)})", _by_folder(trace.helpers)),
        )
    )


def _by_folder(files: Sequence[str]) -> list[str]:
    found: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        found.setdefault(folder, []).append(name.removesuffix(".py"))
    return _table([(folder, " ".join(names)) for folder, names in found.items()])


def _folder_lines(found: list[Folder]) -> list[str]:
    rows: list[tuple[object, ...]] = [("folder", "loose", "files", "lines", "")]
    for folder in found:
        aim = MAX_LOOSE.get(folder.path, MAX_LOOSE_ELSEWHERE)
        remark = f"more loose files than {aim}" if folder.is_crowded else ""
        name = "  " * folder.path.count("/") + folder.path.rpartition("/")[2]
        rows.append((name, folder.loose, folder.files, folder.lines, remark))
    return _table(rows)


def _circle_lines(circles: list[Circle]) -> list[str]:
    lines = []
    for circle in circles:
        lines.append(f"{circle.level}: {', '.join(circle.members)}")
        for one in circle.imports[:_SHOWN_IMPORTS]:
            lines.append(f"    {one.importer}:{one.line} imports {one.imported} ({one.kind})")
        if len(circle.imports) > _SHOWN_IMPORTS:
            lines.append(f"    and {len(circle.imports) - _SHOWN_IMPORTS} more imports")
    return lines


def _name_lines(names: Iterable[SharedName]) -> list[str]:
    return _table(
        [
            (one.name, one.sort, "same code" if one.same else "", " ".join(one.modules), one.reason or "")
            for one in names
        ]
    )


def _copy_row(copy: Copy) -> tuple[object, ...]:
    return copy.sort, copy.lines, _place(copy.left), _place(copy.right)


def _place(place: Place) -> str:
    return f"{place.module}:{place.first}-{place.last}"


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, "=" * len(title), *(lines or ["none"])])


def _table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns as wide as their longest cell; numbers to the right."""
    if not rows:
        return []
    widths = [max(len(str(row[index])) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            str(cell).rjust(width) if isinstance(cell, int) else str(cell).ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
