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
    "engine": {"configs"},
    "slurm": {"configs"},
    "reports": {"configs"},
    "tasks": {"configs", "reports", "slurm"},
    "flows": {"configs", "reports", "slurm", "tasks"},
}
OWNERS = {
    "torch": {"engine"},
    "transformers": {"engine"},
    "safetensors": {"engine"},
    "tokenizers": {"engine"},
    "yaml": {"configs"},
    "submitit": {"slurm"},
    "pandas": {"reports"},
    "pyarrow": {"reports"},
    "scipy": {"reports"},
    "matplotlib": {"reports"},
    "jinja2": {"reports"},
    "prefect": {"tasks", "flows"},
    "huggingface_hub": {"tasks"},
    "typer": {"flows"},
    "rich": {"flows"},
}
MODULES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def imported_packages(path: Path) -> Iterator[str]:
    """First names of everything that a module imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}: absolute imports only"
            yield (node.module or "").split(".")[0]


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


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
        ("engine.worker", {"transformers", "prefect", "pandas"}),
    ],
)
def test_a_fresh_process_stays_light(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not forbidden & set(loaded)
