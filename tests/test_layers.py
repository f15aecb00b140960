"""The folders depend on each other in one direction, and each third party has one owner."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.structure.graph import Import, import_graph, module_circles, package_circles, package_order
from benchmarks.structure.source import SCRIPTS, SourceTree

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
OUTSIDE_THE_WHEEL = ("benchmarks", "tests")
"""What no module of the product may import: users do not have it."""
OWNERS = {
    "torch": {"engine"},
    "transformers": {"engine"},
    "safetensors": {"engine"},
    "tokenizers": {"engine"},
    "sentencepiece": {"engine"},
    "onnx": {"engine"},
    "onnxruntime": {"engine"},
    "onnxscript": {"engine"},
    "tensorrt": {"engine"},
    "yaml": {"configs"},
    "submitit": {"slurm"},
    "asyncssh": {"slurm"},
    "pandas": {"reports"},
    "pyarrow": {"reports"},
    "scipy": {"reports", "engine.planner"},
    "matplotlib": {"reports"},
    "typst": {"reports"},
    "jinja2": {"reports", "engine", "tasks"},  # reports; chat templates; templates of scripts
    "fastapi": {"engine"},
    "uvicorn": {"engine", "flows"},
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
    "configs": (
        "serving",
        "plans",
        "records",
        "hardware",
        "spec",
        "targets",
        "workloads",
        "load",
        "inputs",
        "families",
        "common",
    ),
    "engine": (
        "agents",
        "worker",
        "workloads",
        "serving",
        "load",
        ("peers", "inference", "training"),
        "correctness",
        "prompts",
        "models",
        "loading",
        "rank",
        ("parallel", "kernels"),
    ),
    "slurm": ("sbatch_bundle", "schedulers", "forking", "launch", "launcher", "ssh", "staging"),
}
"""Inside a package: what stands left may import what stands right; for those in one group no circle is enough."""
MODULES = sorted(
    path
    for folder in MAY_IMPORT
    if "." not in folder
    for path in (ROOT / folder).rglob("*.py")
    if path.parent != ROOT.joinpath(*SCRIPTS)
)


@functools.cache
def nodes_of(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Call, ...]:
    """Imports and calls of a module, also inside functions."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


def imported_packages(path: Path) -> Iterator[str]:
    """Packages (ours: folders) of everything that a module imports, also inside functions."""
    for node in nodes_of(path):
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


def test_imports_point_down() -> None:
    """Of all modules at once, as all rules below that look at each: thousands of tests would take a minute to make."""
    wrong = {}
    for path in MODULES:
        folder, imported = folder_of(path), set(imported_packages(path))
        foreign = imported & {*MAY_IMPORT, *OUTSIDE_THE_WHEEL} - {folder} - MAY_IMPORT[folder]
        stolen = {name for name in imported & OWNERS.keys() if folder not in OWNERS[name]}
        if foreign | stolen:
            owned = [f"{name} belongs to {sorted(OWNERS[name])}" for name in sorted(stolen)]
            wrong[str(path.relative_to(ROOT))] = [*(f"{folder} may not import {name}" for name in foreign), *owned]
    assert len(MODULES) > 900 and wrong == {}


def test_tests_share_helpers_through_support_alone() -> None:
    tree = SourceTree.read(ROOT, ["tests"])
    shared = {f"{one.importer}:{one.line} imports {one.imported}" for one in import_graph(tree)
              if not one.imported.startswith("tests.support")}  # fmt: skip
    assert shared == set()


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


def test_no_module_shadows_a_folder() -> None:
    assert not [path for path in MODULES if path.stem in MAY_IMPORT]


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
        ("engine.serving.http.main", {"torch", "transformers", "prefect", "pandas"}),
        ("engine.load.__main__", {"torch", "transformers", "prefect", "pandas", "scipy"}),
        ("engine.workloads.train", {"transformers", "deepspeed", "prefect", "pandas"}),
    ],
)
def test_a_fresh_process_stays_light(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not forbidden & set(loaded)


READERS_OF_THEIR_OWN = {
    "configs/common/system/cores.py": "/proc and /sys",
    "configs/common/system/memory.py": "/proc and /sys",
    "configs/common/system/proc.py": "/proc",
    "configs/common/files/flushing.py": "a file or folder, to flush it",
    "configs/common/files/reading.py": "the bounded reader",
    "engine/kernels/build.py": "our own C sources",
    "engine/kernels/linear.py": "no file: a function of a library in C",
    "engine/loading/access.py": "weights in pieces, by the ranges of a header that was checked",
    "engine/loading/page_cache.py": "weights in pieces",
    "engine/loading/read_ahead.py": "weights in pieces",
    "engine/parallel/shared_memory.py": "a segment of another rank",
    "engine/probe/rankwise_probe/recording.py": "a file that it makes itself, with the standard library alone",
    "engine/profiling/trace.py": "what torch wrote a moment before, in a folder of its own",
    "engine/rank/processes.py": "a block that this process allocated",
    "engine/scripts/outputs.py": "pipes that it made itself, never waited for",
    "engine/scripts/rank_start.py": "/dev/null",
    "engine/tools/calibrate.py": "/sys",
    "engine/tools/convert.py": "pickles, in a process of its own",
    "engine/training/checkpoints/streams.py": "files that it writes",
    "engine/training/data/text.py": "memory-mapped tokens, after check_regular",
    "engine/training/network.py": "/proc",
    "engine/training/task_types/images.py": "images, after check_regular",
    "engine/workloads/noop.py": "/proc",
    "slurm/forking/fork_parent.py": "a folder, to stay in it",
    "slurm/launcher/job_files.py": "a block that this process allocated",
    "slurm/launcher/processes.py": "/sys",
    "slurm/launcher/profilers.py": "/proc",
    "slurm/sbatch_bundle/scripts.py": "our own templates",
    "slurm/ssh/node_files.py": "on a host, with the standard library alone",
    "slurm/ssh/node_program.py": "on a host, with the standard library alone: regular files",
    "slurm/staging/file_list.py": "on a host, with the standard library alone",
    "slurm/staging/wheel.py": "our own code",
    "tasks/providers/leases.py": "a lock, to hold it",
    "tasks/campaign/run_lock.py": "a lock, after check_regular",
    "flows/cli/doctor/optional.py": "/proc and /sys",
    "flows/server/process.py": "a lock",
    "flows/cli/engines/command.py": "a lock, to see who holds it",
    "configs/serving/installations.py": "a lock, to hold it",
    "configs/common/system/lock_files.py": "locks, never waited for",
}
"""Modules that open files otherwise than through `configs.common.files.reading`, and what they open."""


_READERS = {
    *("open", "read_text", "read_bytes", "load", "safe_open", "load_file", "read_csv", "read_parquet", "read_table"),
    "ParquetFile",
}


def reads(path: Path) -> Iterator[str]:
    """Calls of a module that open a file by its name to read it."""
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name not in _READERS:
            continue
        owner = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        text = ast.unparse(node)
        if name in ("read_text", "read_bytes"):
            opens = bool(owner) and not re.match(r"\(?Path\(f?'/(proc|sys)/", owner)
        elif name == "open" and owner == "os":
            opens = "O_WRONLY" not in text and "os.devnull" not in text
        elif name == "open":
            opens = owner != "self" and _opens_to_read(node, bool(owner))
        else:
            opens = name != "load" or owner in ("np", "numpy", "torch")
        if opens:
            yield f"line {node.lineno}: {text[:80]}"


def _opens_to_read(call: ast.Call, method: bool) -> bool:
    """Whether the mode of `open(path, mode)` or `path.open(mode)` reads; openers of addresses have no mode."""
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[0 if method else 1 :][:1]
    given = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
    return (
        "r" in given[0] or "+" in given[0] if given else not (method and (call.args or "timeout" in ast.unparse(call)))
    )


def test_files_of_others_are_read_within_bounds() -> None:
    """A pipe, a device or a file of 50 GB in a run folder, a cache or a model must stop nobody."""
    names = {str(path.relative_to(ROOT)): path for path in MODULES}
    found = {name: list(reads(path)) for name, path in names.items() if name not in READERS_OF_THEIR_OWN}
    unbounded = {name: calls for name, calls in found.items() if calls}
    assert unbounded == {}, "use configs.common.files.reading, or say in READERS_OF_THEIR_OWN why not"


def test_readers_of_their_own_are_still_needed() -> None:
    for name in READERS_OF_THEIR_OWN:
        assert (ROOT / name).is_file() and list(reads(ROOT / name)), f"{name} opens no file by itself"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.read_text()", True),
        ("(folder / 'a').read_bytes()", True),
        ("Path('/proc/self/stat').read_text()", False),
        ("path.open()", True),
        ("path.open('rb')", True),
        ("path.open('wb')", False),
        ("open(path, 'a+')", True),
        ("open(path, mode='w')", False),
        ("np.load(path)", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", False),
        ("opener.open(url, timeout=3)", False),
    ],
)
def test_reads_are_found(tmp_path: Path, code: str, found: bool) -> None:
    (tmp_path / "module.py").write_text(code)
    assert bool(list(reads(tmp_path / "module.py"))) is found
