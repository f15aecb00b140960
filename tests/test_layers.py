"""The folders depend on each other in one direction, and each third party has one owner."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "typer": {"flows"},
    "rich": {"flows"},
}
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


def test_providers_do_not_know_prefect() -> None:
    for path in (ROOT / "tasks" / "providers").rglob("*.py"):
        assert "prefect" not in imported_packages(path), path


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_shadows_a_folder(path: Path) -> None:
    assert path.stem not in MAY_IMPORT


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("flows.scaling_study", {"torch", "transformers", "matplotlib"}),
        ("flows.cli.main", {"torch", "prefect", "pandas", "matplotlib"}),
        ("slurm.launch", {"torch", "prefect", "numpy"}),
        ("engine", {"torch"}),
        ("engine.planner.families", {"torch", "prefect", "pandas"}),
        ("engine.worker", {"transformers", "prefect", "pandas"}),
        ("engine.training.workload", {"transformers", "deepspeed", "prefect", "pandas"}),
    ],
)
def test_a_fresh_process_stays_light(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not forbidden & set(loaded)
