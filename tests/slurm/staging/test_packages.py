"""Code, libraries and models in a folder that nodes see: whole or absent, made once, readable for the group."""

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from benchmarks.structure.source import SCRIPTS
from configs.common.base import sha256_of_file
from configs.common.files import abandoned, project_files
from configs.common.files.abandoned import ABANDONED_SECONDS
from configs.common.files.project_files import ROOT
from configs.plans.model_manifest import ModelManifest
from slurm.staging import packages as staging
from slurm.staging.packages import (
    NODE_LIBRARIES,
    common_folder,
    interpreter_script,
    run_digest,
    stage_inputs,
    stage_interpreter,
    stage_model,
)
from slurm.staging.version import BUILT_FROM, code_version
from slurm.staging.wheel import pack_wheel
from tasks.models.sources import resolve_model

MODEL = ROOT / "configs" / "models" / "tiny-stdlib"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that its group may write."""
    folder = tmp_path / "shared disk"
    folder.mkdir()
    folder.chmod(0o2770)
    return folder


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Such a folder, the interpreter that a user of a private umask brought there, and what was said."""
    folder = tmp_path_factory.mktemp("staged") / "shared disk"
    folder.mkdir()
    folder.chmod(0o2770)
    said: list[str] = []
    before = os.umask(0o077)
    try:
        program = stage_interpreter(folder, sys.executable, said.append)
    finally:
        os.umask(before)
    return folder, program, said


@pytest.fixture
def manifest(tmp_path: Path) -> ModelManifest:
    """The manifest of a real model in a folder that a test may damage."""
    shutil.copytree(MODEL, tmp_path / "model")
    return resolve_model("model", None, tmp_path / "cache", tmp_path)


def modes(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every folder and file below, with its mode."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            yield path, path.stat().st_mode


def test_the_same_code_gives_the_same_wheel_with_its_commit(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    first, second = pack_wheel(tmp_path / "first"), pack_wheel(tmp_path / "second")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        assert json.loads(archive.read(BUILT_FROM)) == code_version()
        for name in ("constraints.txt", "prefect.yaml"):
            assert archive.read(f"configs/project/{name}") == (ROOT / name).read_bytes()
    assert {"engine/worker.py", "engine/kernels/linear.c", "reports/templates/report.md.j2"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc") or name.startswith("tests")]


@pytest.mark.slow
def test_pip_takes_the_wheel(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    done = subprocess.run([*pip, tmp_path / "there", pack_wheel(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "engine" / "worker.py").read_bytes() == (ROOT / "engine" / "worker.py").read_bytes()


def test_an_interpreter_runs_our_code_from_the_shared_folder(staged: tuple[Path, Path, list[str]]) -> None:
    shared, program, said = staged
    assert len(said) == 1 and said[0].startswith("code: rankwise-")
    code = (
        "import sys, configs, slurm.launch; from slurm.staging.version import code_version; import importlib.metadata;"
        "print(configs.__file__, sys.argv[1], code_version(), importlib.metadata.version('rankwise'), sep='|')"
    )
    done = subprocess.run([program, "-c", code, "a b"], capture_output=True, text=True, cwd="/", timeout=600)
    where, argument, version, release = done.stdout.strip().split("|")
    assert Path(where).is_relative_to(shared / "rankwise" / "code")
    assert argument == "a b" and version == str(code_version()) and release == metadata.version("rankwise")
    assert stage_interpreter(shared, sys.executable, said.append) == program and len(said) == 1
    assert stage_interpreter(shared, "/opt/other/python3", said.append) != program and len(said) == 1


def test_an_interpreter_may_be_named_by_its_environment_and_from_the_home_folder(tmp_path: Path) -> None:
    """Both were started as they were written: a folder cannot be, and no shell had replaced `~`."""
    environment = tmp_path / "my envs" / "python-bench"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    program = tmp_path / "python"
    for named in (str(environment), f"{environment}/bin/python", "~/my envs/python-bench", "python3"):
        program.write_text(interpreter_script("/code", named))
        done = subprocess.run(
            ["sh", str(program), "-c", "import os; print(os.environ['PYTHONPATH'])"], capture_output=True, text=True,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]}, timeout=600,
        )  # fmt: skip
        assert done.stdout == "/code\n", (named, done.stderr)


@pytest.mark.slow
def test_code_that_a_cluster_has_cleared_in_part_is_brought_again(shared: Path) -> None:
    program = stage_interpreter(shared, sys.executable, lambda _: None)
    [folder] = (shared / "rankwise" / "code").iterdir()
    shutil.rmtree(folder / "code" / "slurm")
    (folder / "code" / "configs" / "__init__.py").unlink()
    program.unlink()
    said: list[str] = []
    before = os.umask(0o077)
    try:
        assert stage_interpreter(shared, sys.executable, said.append) == program
    finally:
        os.umask(before)
    assert len(said) == 1 and "of its files were removed from" in said[0]
    assert all(mode & 0o040 for _, mode in modes(folder))
    code = "import configs, slurm.launch; print(configs.__file__, slurm.launch.__file__, sep='|')"
    done = subprocess.run([program, "-c", code], capture_output=True, text=True, cwd="/", timeout=600)
    assert all(Path(each).is_relative_to(folder) for each in done.stdout.strip().split("|")), done.stderr
    assert stage_interpreter(shared, sys.executable, lambda line: pytest.fail(line)) == program


def test_the_group_may_read_all_and_add_its_own(staged: tuple[Path, Path, list[str]]) -> None:
    shared, program, _ = staged
    assert program.stat().st_mode & 0o777 == 0o755
    for folder in (shared / "rankwise", shared / "rankwise" / "code", shared / "rankwise" / "envs"):
        assert folder.stat().st_mode & 0o7777 == 0o2770
    made = [entry for entry in (shared / "rankwise" / "code").iterdir()]
    assert len(made) == 1
    unreadable = [path for path, mode in modes(made[0]) if not mode & 0o040 or (path.is_dir() and not mode & 0o010)]
    assert unreadable == []


def test_a_model_is_brought_once_and_again_when_damaged(shared: Path, manifest: ModelManifest) -> None:
    said: list[str] = []
    path = stage_model(shared, manifest, "m", said.append)
    there = ModelManifest.model_validate_json(path.read_bytes())
    assert there.model_copy(update={"folder": manifest.folder}) == manifest
    assert all(sha256_of_file(Path(there.folder) / name) == file.sha256 for name, file in there.files.items())
    assert len(said) == 1 and "MiB to" in said[0]
    assert stage_model(shared, manifest, "m", said.append, thorough=True) == path and len(said) == 1
    weights = Path(there.folder) / "model.safetensors"
    weights.write_bytes(b"x" * weights.stat().st_size)
    stage_model(shared, manifest, "m", said.append)
    assert len(said) == 1  # of the right size: only a thorough look sees it
    stage_model(shared, manifest, "m", said.append, thorough=True)
    assert "damaged" in said[1] and sha256_of_file(weights) == manifest.files["model.safetensors"].sha256
    path.unlink()
    assert stage_model(shared, manifest, "m", said.append) == path and path.exists()


def test_two_who_find_a_model_damaged_both_have_it_again(
    shared: Path, manifest: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's removal ended in `No such file or directory`, and so its study."""
    path = stage_model(shared, manifest, "m", lambda _: None)
    (path.parent / "files" / "model.safetensors").unlink()
    judged = staging._damaged

    def then_removed(of: Path, thorough: bool) -> list[str]:
        found = judged(of, thorough)
        shutil.rmtree(of.parent)  # by the other
        return found

    monkeypatch.setattr(staging, "_damaged", then_removed)
    stage_model(shared, manifest, "m", lambda _: None)
    monkeypatch.undo()
    assert stage_model(shared, manifest, "m", lambda line: pytest.fail(line), thorough=True) == path
    assert [each.name for each in path.parents[1].iterdir()] == ["m"]


@pytest.mark.parametrize("own", [True, False])
def test_a_file_of_the_cache_is_linked_where_it_is_the_users_own(
    shared: Path, manifest: ModelManifest, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A team's cache has files of others, which can be linked where all may write them; their modes cannot be set."""
    weights = Path(manifest.folder) / "model.safetensors"
    weights.chmod(0o666)
    chmod, geteuid = Path.chmod, os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: geteuid if own else geteuid + 1)

    def refused(path: Path, mode: int) -> None:
        if not own and path.stat().st_ino == weights.stat().st_ino:
            raise PermissionError(1, "Operation not permitted", str(path))
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", refused)
    staged = stage_model(shared, manifest.model_copy(update={"source": "hub"}), "m", lambda _: None)
    there = staged.parent / "files" / "model.safetensors"
    assert (there.stat().st_nlink == 2) is own and there.read_bytes() == weights.read_bytes()


def test_a_source_that_changed_is_refused_and_leaves_nothing(shared: Path, manifest: ModelManifest) -> None:
    (Path(manifest.folder) / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json: content changed since the study began"):
        stage_model(shared, manifest, "m", lambda _: None)
    assert list((shared / "rankwise" / "models").iterdir()) == []


def test_a_synthetic_model_has_its_configuration_there(shared: Path, tmp_path: Path) -> None:
    manifest = resolve_model("synthetic:llama-4m@0", None, tmp_path / "cache", tmp_path)
    there = ModelManifest.model_validate_json(stage_model(shared, manifest, "s", lambda _: None).read_bytes())
    config = Path(there.folder) / "config.json"
    assert json.loads(config.read_bytes()) == manifest.config
    config.unlink()
    stage_model(shared, manifest, "s", lambda _: None)
    assert config.exists()


def test_what_a_killed_run_left_half_made_is_removed(
    shared: Path, manifest: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a model, each as large as it is, stayed on the shared disk for ever."""
    digest = "0123456789abcdef"

    def left() -> list[Path]:
        return [path for path in (shared / "rankwise").glob("*/*") if path.name.startswith(".")]

    for kind, cut in (("models", ""), ("code", ""), ("libraries", ".cleared"), ("envs", "")):
        (shared / "rankwise" / kind / f".{digest}.x1y2z3_4{cut}" / "files").mkdir(parents=True)
    stage_model(shared, manifest, digest, lambda _: None)
    stage_interpreter(shared, sys.executable, lambda _: None)
    assert len(left()) == 4, "somebody may be filling them"
    now = time.time() + 2 * ABANDONED_SECONDS
    monkeypatch.setattr(abandoned, "time", SimpleNamespace(time=lambda: now))
    stage_model(shared, manifest, digest, lambda _: None)
    stage_interpreter(shared, sys.executable, lambda _: None)
    assert left() == []


@pytest.mark.nightly
def test_two_who_push_at_once_do_not_meet(shared: Path, manifest: ModelManifest) -> None:
    failures: list[BaseException] = []

    def push() -> None:
        try:
            stage_model(shared, manifest, "m", lambda _: None)
            stage_interpreter(shared, sys.executable, lambda _: None)
        except BaseException as error:
            failures.append(error)

    pushers = [threading.Thread(target=push) for _ in range(4)]
    for pusher in pushers:
        pusher.start()
    for pusher in pushers:
        pusher.join()
    assert failures == []
    for kind in ("models", "code", "envs"):
        assert len(list((shared / "rankwise" / kind).iterdir())) == 1  # and nothing under a temporary name
    assert stage_model(shared, manifest, "m", lambda line: pytest.fail(line), thorough=True).exists()


def test_inputs_are_copied_by_name(shared: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "aa.jsonl").write_text("{}")
    for _ in range(2):
        assert (stage_inputs(inputs, shared / "run") / "aa.jsonl").read_text() == "{}"


def test_inputs_of_any_size_are_copied_and_no_unfinished_one(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's inputs may have 16 GiB: of more than 2 the launch failed. What a kill had left went along for ever."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "ab.tar").write_bytes(bytes(100))
    (inputs / ".x4j5").write_bytes(bytes(100))
    monkeypatch.setattr(staging, "SAMPLES_BYTES", 99, raising=False)
    there = stage_inputs(inputs, shared / "large")
    assert [path.name for path in there.iterdir()] == ["ab.tar"] and (there / "ab.tar").stat().st_size == 100
    assert (there / "ab.tar").stat().st_mode & 0o777 == 0o644


def test_a_missing_shared_folder_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        common_folder(tmp_path / "nowhere", "rankwise")


def test_runs_of_one_name_are_told_apart() -> None:
    digests = {run_digest(Path("/home/a/runs/s")), run_digest(Path("/home/b/runs/s"))}
    assert len(digests) == 2 and all(len(digest) == 8 for digest in digests)


@pytest.mark.slow
def test_libraries_that_a_cluster_has_cleared_in_part_are_installed_again(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str]) -> None:
        if "venv" in command[1:4]:
            for name in ("bin/python", "lib/torch/nn.py", "lib/torch/__pycache__/nn.pyc"):
                path = Path(command[-1]) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()

    monkeypatch.setattr(staging, "_run", run)
    said: list[str] = []
    program = stage_interpreter(shared, None, said.append)
    [folder] = (shared / "rankwise" / "libraries").iterdir()
    (folder / "lib" / "torch" / "__pycache__" / "nn.pyc").unlink()  # as Python makes it anew
    (folder / "lib" / "added.py").touch()
    assert stage_interpreter(shared, None, said.append) == program and len(said) == 2
    for gone in ("lib/torch/nn.py", "files.txt"):
        (folder / gone).unlink()
        said.clear()
        assert stage_interpreter(shared, None, said.append) == program
        assert said == [
            f"libraries: installing into {folder} again, since files of it were removed (once, takes minutes)"
        ]
        assert (folder / gone).exists() and (folder / "bin" / "python").exists()
        assert [*(shared / "rankwise" / "libraries").iterdir()] == [folder], "nothing is left of the former"


def test_what_pip_says_is_told(shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "constraints.txt").write_text("accelerate==0.0.1\n")
    monkeypatch.setattr(project_files, "ROOT", tmp_path / "root")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ValueError, match=r"-m pip --python .*exit code 1\n(.*\n)*.*accelerate"):
        staging._stage_libraries(shared, lambda _: None)
    assert list((shared / "rankwise" / "libraries").iterdir()) == []


def test_an_isolated_build_knows_its_commit_and_files() -> None:
    """`pip install .` builds where hatchling alone is installed."""
    code = (
        "import sys; sys.modules['pydantic'] = None\n"
        "from configs.common.files.project_files import packed_files\n"
        "from slurm.staging.version import code_version\n"
        "print(len(packed_files()), sorted(code_version()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, _, names = done.stdout.partition(" ")
    assert int(count) > 0 and names.strip() == str(sorted(code_version()))


def imports_of(folder: str) -> set[str]:
    """Top names of what the modules of a folder import when they are imported, not within functions.

    Scripts of shipped studies are inputs of a launch, in the user's environment, and nobody's modules.
    """
    found = set()
    modules = [path for path in (ROOT / folder).rglob("*.py") if path.parent != ROOT.joinpath(*SCRIPTS)]
    for path in modules:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names) - {"configs", "engine", "slurm"}


def test_nodes_get_all_that_the_ranks_import() -> None:
    names = {
        "yaml": "pyyaml",
        "pynvml": "nvidia-ml-py",
        "pydantic_core": "pydantic",
        "starlette": "fastapi",
        "h11": "uvicorn",
        "prometheus_client": "prometheus-client",
    }
    needed = {names.get(name, name) for folder in ("configs", "engine") for name in imports_of(folder)}
    # Triton comes with torch's builds for GPUs.
    optional = {"onnx", "onnxruntime", "onnxscript", "tensorrt", "triton"}
    assert needed - optional <= set(NODE_LIBRARIES)
    required = {Requirement(line).name.lower() for line in metadata.requires("rankwise") or []}
    assert set(NODE_LIBRARIES) <= required
