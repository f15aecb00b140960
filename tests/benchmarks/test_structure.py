"""`make structure` on small made-up checkouts: each count is the one that can be seen by eye."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.structure import call_recorder
from benchmarks.structure.__main__ import main
from benchmarks.structure.copies import find_copies
from benchmarks.structure.graph import Circle, Import, import_graph, module_circles, package_circles, package_order
from benchmarks.structure.names import SharedName, shared_names
from benchmarks.structure.report import measure
from benchmarks.structure.sizes import folders, long_functions, long_modules
from benchmarks.structure.source import SourceTree, read_mapping
from benchmarks.structure.trace import reachable, sorted_out

SUM = """
def {name}({values}):
    total = 0
    for value in {values}:
        if value > 0:
            total += value * value
        else:
            total -= {constant} * (len({values}) + value)
    return total, len({values}), max({values}), min({values}), sorted({values}), any({values}), list({values})
"""


def checkout(folder: Path, **files: str) -> SourceTree:
    """A checkout with these files and their packages: `configs__spec__study` is configs/spec/study.py."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/').replace('INIT', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in list(folder.rglob("*.py")):
        for parent in path.relative_to(folder).parents:
            if str(parent) != ".":
                (folder / parent / "__init__.py").touch()
    return SourceTree.read(folder)


def circles(tree: SourceTree) -> tuple[list[Circle], list[Circle]]:
    imports = import_graph(tree)
    return module_circles(imports), package_circles(imports)


def members(found: list[Circle]) -> list[tuple[str, tuple[str, ...]]]:
    return [(circle.level, circle.members) for circle in found]


def test_every_sort_of_import_is_seen(tmp_path: Path) -> None:
    tree = checkout(
        tmp_path,
        engine__a="import engine.b\nfrom engine import c\nfrom . import d\nimport json\n",
        engine__b="def work():\n    from engine.c import name\n    return name\n",
        engine__c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from engine.d import D\nname = 1\n",
        engine__d="import importlib\nNAMES = ['engine.e', 'no.module']\nimportlib.import_module(NAMES[0])\n",
        engine__e="class E:\n    async def work(self):\n        import engine.a as other\n        return other\n",
    )
    assert import_graph(tree) == [
        Import("engine.a", "engine.b", 1, "top"),
        Import("engine.a", "engine.c", 2, "top"),
        Import("engine.a", "engine.d", 3, "top"),
        Import("engine.b", "engine.c", 2, "lazy"),
        Import("engine.c", "engine.d", 3, "type"),
        Import("engine.d", "engine.e", 2, "name"),
        Import("engine.e", "engine.a", 3, "lazy"),
    ]
    modules, packages = circles(tree)
    assert members(modules) == [("modules", ("engine.a", "engine.b", "engine.c", "engine.d", "engine.e"))]
    assert [level for level, _ in members(packages)] == ["engine"]


def test_a_package_that_imports_its_modules_is_a_circle_only_if_one_imports_it_back(tmp_path: Path) -> None:
    package = {"engine__models__INIT": "from engine.models.llama import Llama\nNAMES = ()\n"}
    apart = checkout(tmp_path / "apart", engine__models__llama="class Llama: ...\n", **package)
    assert circles(apart) == ([], [])
    back = checkout(
        tmp_path / "back", engine__models__llama="from engine.models import NAMES\nclass Llama: ...\n", **package
    )
    modules, packages = circles(back)
    assert members(modules) == [("modules", ("engine.models", "engine.models.llama"))]
    assert packages == []


def test_packages_can_form_a_circle_where_modules_do_not(tmp_path: Path) -> None:
    tree = checkout(
        tmp_path,
        engine__models__llama="import engine.loading.header\n",
        engine__models__sizes="",
        engine__loading__header="",
        engine__loading__reader="from engine.models import sizes\n",
        tasks__run="import engine.loading.reader\n",
    )
    modules, packages = circles(tree)
    assert modules == []
    assert members(packages) == [("engine", ("engine.loading", "engine.models"))]
    assert [one.importer for one in packages[0].imports] == ["engine.loading.reader", "engine.models.llama"]
    assert list(package_order(import_graph(tree), ".")) == [("tasks", "engine")]
    assert reachable(import_graph(tree), ["tasks.run"]) == {"tasks.run", "engine.loading.reader", "engine.models.sizes"}


def test_a_mapping_shows_the_graph_as_after_the_move(tmp_path: Path) -> None:
    checkout(
        tmp_path,
        engine__tokens="import engine.share\n",
        engine__share="",
        engine__models__m="import engine.tokens\n",
    )
    file = tmp_path / "mapping.txt"
    file.write_text(
        "# moves\nengine/share.py engine/models/share.py   # lower\n\nengine/tokens.py -> engine/prompts/tokens.py\n"
    )
    mapping = read_mapping(file)
    moved = SourceTree.read(tmp_path, mapping=mapping)
    assert members(circles(moved)[1]) == [("engine", ("engine.models", "engine.prompts"))]
    file.write_text("engine/share.py\n")
    with pytest.raises(ValueError, match="line 1: expected"):
        read_mapping(file)
    with pytest.raises(ValueError, match="are mapped to it"):
        SourceTree.read(tmp_path, mapping=mapping | {"engine/tokens.py": "engine/models/share.py"})


def test_names_of_several_modules_are_told_apart_by_their_use(tmp_path: Path) -> None:
    tree = checkout(
        tmp_path,
        engine__a="class Row: ...\nclass _Own: ...\ndef read(): ...\ndef near(): ...\nLIMIT = 1\ndef main(): ...\n",
        engine__b="Row = int\nclass _Own: ...\ndef read(): ...\ndef near(): ...\nLIMIT: int = 2\ndef main(): ...\n",
        engine__c="from engine import b\nfrom engine.a import LIMIT, near, read\nprint(b.read, LIMIT, near, read)\n",
        slurm__seam="import importlib\nimportlib.import_module({'x': 'slurm.x', 'y': 'slurm.y'}['x'])\n",
        slurm__x="def submit(): ...\n",
        slurm__y="def submit(): ...\n",
    )
    found = {one.name: one for one in shared_names(tree, import_graph(tree))}
    both = ("engine.a", "engine.b")
    assert found.keys() == {"Row", "read", "near", "LIMIT", "main", "submit"}
    assert found["read"] == SharedName("read", "function", both, both, same=True)
    assert found["Row"] == SharedName("Row", "type", both, (), same=False)
    assert found["LIMIT"].imported == found["near"].imported == ("engine.a",)
    assert {name for name, one in found.items() if one.is_ambiguous} == {"Row", "read"}
    assert found["main"].reason == "entry point of a command"
    assert found["submit"].reason == "interface of the modules that slurm.seam loads by name"


def test_copies_are_found_whatever_their_layout_and_names(tmp_path: Path) -> None:
    first = SUM.format(name="first", values="values", constant="3")
    respaced = "# a comment\n" + first.replace("    total = 0\n", '    """Sum."""\n\n    total = 0\n')
    renamed = SUM.format(name="other", values="numbers", constant="7")
    tree = checkout(tmp_path, engine__a=first, engine__b=respaced, tasks__c=renamed, tasks__d="import os\n" * 9)
    exact, *others = find_copies(tree)
    assert (exact.sort, exact.lines) == ("exact", 8)
    assert (exact.left.module, exact.left.first, exact.left.last) == ("engine.a", 2, 9)
    assert (exact.right.module, exact.right.first, exact.right.last) == ("engine.b", 3, 12)
    assert [(one.sort, one.left.module, one.right.module) for one in others] == [
        ("renamed", "engine.a", "tasks.c"),
        ("renamed", "engine.b", "tasks.c"),
    ]


def test_a_renaming_that_swaps_two_names_is_no_copy(tmp_path: Path) -> None:
    text = SUM.format(name="first", values="values", constant="3")
    swapped = text.replace("value * value", "total * value").replace("first", "second")
    tree = checkout(tmp_path, engine__a=text, engine__b=swapped)
    assert find_copies(tree) == []


def test_sizes_count_what_lies_in_a_folder_and_below(tmp_path: Path) -> None:
    long = "def long():\n" + "    pass\n" * 60
    tree = checkout(
        tmp_path,
        **{f"engine__m{number}": "x = 1\n" for number in range(4)},
        engine__models__deep__d=long + "x = 1\n" * 340,
        tasks__t="@staticmethod\ndef short():\n" + "    pass\n" * 58,
    )
    found = {one.path: (one.loose, one.files, one.lines, one.is_crowded) for one in folders(tree)}
    assert found == {
        "engine": (4, 8, 405, True),
        "engine/models": (0, 3, 401, False),
        "engine/models/deep": (1, 2, 401, False),
        "tasks": (1, 2, 60, False),
    }
    assert [(one.name, one.lines) for one in long_modules(tree)] == [("engine/models/deep/d.py", 401)]
    assert [(one.name, one.lines) for one in long_functions(tree)] == [("engine/models/deep/d.py:1 long", 61)]


def test_the_recorder_tells_the_way_from_what_is_called(tmp_path: Path) -> None:
    product = tmp_path / "product"
    checkout(
        product,
        tasks__go=(
            "from configs import noun\nfrom tasks import keep\ndef go(path):\n    noun.name()\n    keep.keep(path)\n"
        ),
        tasks__keep=(
            "from configs import helper, noun, unused\n"
            "def keep(path):\n    helper.half(noun.name())\n    open(path, 'w').close()\n"
        ),
        configs__noun="def name():\n    return 2\n",
        configs__helper="def half(number):\n    return number / 2\n",
        configs__unused="def once():\n    return 1\nVALUE = once()\ndef never(): ...\n",
    )
    (tmp_path / "sitecustomize.py").write_text(Path(call_recorder.__file__).read_text())
    for name in ("calls", "runs"):
        (tmp_path / name).mkdir()
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{product}",
        "RANKWISE_TRACE_ROOT": f"{product}/",
        "RANKWISE_TRACE_FOLDER": str(tmp_path / "calls"),
        "RANKWISE_TRACE_RUNS": str(tmp_path / "runs"),
    }
    code = f"from tasks.go import go; go({str(tmp_path / 'runs' / 'part.json')!r}); import os; os._exit(0)"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd=tmp_path)
    [calls] = (tmp_path / "calls").glob("*.calls")
    found = sorted_out(calls.read_text().splitlines())
    assert found.way == ("tasks/go.py", "tasks/keep.py")
    assert found.nouns == ("configs/noun.py",)
    assert found.helpers == ("configs/helper.py",)


def test_the_command_prints_every_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout(
        tmp_path,
        engine__a="import engine.b\nclass Row: ...\n",
        engine__b="def f():\n    import engine.a\nclass Row: ...\n",
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("x = 1\n" * 5)
    assert main(["--root", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = found["summary"]
    assert summary == measure(tmp_path).summary
    assert (summary["circles of modules"], summary["circles of packages"]) == (1, 1)
    assert (summary["files"], summary["lines"], summary["names that stand for two things"]) == (3, 5, 1)
    assert summary["files to read for one measurement"] is None
    assert found["outside"] == [{"path": "tests", "loose": 1, "files": 1, "lines": 5}]
    assert main(["--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert (
        "modules: engine.a, engine.b\n    engine.a:1 imports engine.b (top)\n    engine.b:2 imports engine.a (lazy)"
        in printed
    )
    assert ["circles", "of", "modules", "1"] in [line.split() for line in printed.splitlines()]
