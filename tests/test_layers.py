"""The folders depend on each other in one direction, and each third party has one owner."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.structure.graph import Import, import_graph, module_circles, package_circles, package_order
from benchmarks.structure.source import SourceTree

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "configs": set(),
    "engine.planner": {"configs"},
    "engine": {"configs", "engine.planner"},
    "slurm": {"configs", "engine.planner"},
    "reports": {"configs", "engine.planner"},
    "tasks": {"configs", "engine.planner", "reports", "slurm"},
    "flows": {"configs", "engine.planner", "reports", "slurm", "tasks"},
}
OWNERS = {
    "torch": {"engine"},
    "transformers": {"engine"},
    "safetensors": {"engine"},
    "tokenizers": {"engine"},
    "onnx": {"engine"},
    "onnxruntime": {"engine"},
    "onnxscript": {"engine"},
    "tensorrt": {"engine"},
    "yaml": {"configs"},
    "submitit": {"slurm"},
    "pandas": {"reports"},
    "pyarrow": {"reports"},
    "scipy": {"reports", "engine.planner"},
    "matplotlib": {"reports"},
    "jinja2": {"reports"},
    "prefect": {"tasks", "flows"},
    "huggingface_hub": {"tasks"},
    "datasets": {"tasks"},
    "boto3": {"tasks"},
    "google": {"tasks"},
    "azure": {"tasks"},
    "typer": {"flows"},
    "rich": {"flows"},
}
ORDER = {
    "configs": ("plans", "hardware", "spec", "workloads", "common"),
    "engine": (
        "agents",
        "worker",
        "workloads",
        ("peers", "inference", "training", "serving"),
        "correctness",
        "prompts",
        "models",
        "loading",
        "rank",
        ("parallel", "kernels"),
    ),
    "slurm": ("sbatch_bundle", "schedulers", "forking", "launch", "launcher", "staging"),
}
"""Inside a package: what stands left may import what stands right; for those in one group no circle is enough."""
MODULES = sorted(path for folder in MAY_IMPORT if "." not in folder for path in (ROOT / folder).rglob("*.py"))


def imported_packages(path: Path) -> Iterator[str]:
    """Packages (ours: folders) of everything that a module imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (package_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}: absolute imports only"
            yield from {package_of(f"{node.module}.{alias.name}") for alias in node.names}


def package_of(name: str) -> str:
    """The planner is a folder of its own inside the engine."""
    return "engine.planner" if name.startswith("engine.planner") else name.split(".")[0]


def folder_of(path: Path) -> str:
    return package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    folder = folder_of(path)
    imported = set(imported_packages(path))
    foreign = imported & MAY_IMPORT.keys() - {folder} - MAY_IMPORT[folder]
    assert not foreign, f"{folder} may not import {foreign}"
    stolen = {name for name in imported & OWNERS.keys() if folder not in OWNERS[name]}
    assert not stolen, f"{stolen} belong to {[OWNERS[name] for name in stolen]}"


@functools.cache
def imports() -> list[Import]:
    """All imports of the product: inside functions, for types alone and by name too."""
    return import_graph(SourceTree.read(ROOT))


def test_no_modules_import_each_other() -> None:
    assert not module_circles(imports())


def test_no_packages_import_each_other() -> None:
    """At each level, between the modules and sub-packages of a package."""
    circles = package_circles(imports())
    assert not [(circle.level, circle.members) for circle in circles]


@pytest.mark.parametrize("package", ORDER)
def test_imports_inside_a_package_point_one_way(package: str) -> None:
    place = {
        f"{package}.{name}": index
        for index, group in enumerate(ORDER[package])
        for name in ([group] if isinstance(group, str) else group)
    }
    pairs = package_order(imports(), package)
    wrong = [(left, right) for left, right in pairs if {left, right} <= place.keys() and place[left] > place[right]]
    assert not wrong


def test_packages_below_the_tasks_import_no_prefect() -> None:
    """`tasks` holds the Prefect tasks themselves; of its packages `prefect_api` alone knows Prefect."""
    below = [path for path in (ROOT / "tasks").rglob("*.py") if path.parent.name not in ("tasks", "prefect_api")]
    assert len(below) > 20
    assert not [path for path in below if "prefect" in imported_packages(path)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_shadows_a_folder(path: Path) -> None:
    assert path.stem not in MAY_IMPORT


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("flows.scaling_study", {"torch", "transformers", "matplotlib"}),
        ("flows.cli.main", {"torch", "prefect", "pandas", "matplotlib"}),
        ("slurm.launch", {"torch", "prefect", "numpy"}),
        ("reports.render", {"torch", "prefect", "pandas"}),
        ("engine", {"torch"}),
        ("engine.planner.families", {"torch", "prefect", "pandas"}),
        ("engine.worker", {"transformers", "prefect", "pandas"}),
        ("engine.workloads.train", {"transformers", "deepspeed", "prefect", "pandas"}),
    ],
)
def test_a_fresh_process_stays_light(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not forbidden & set(loaded)
