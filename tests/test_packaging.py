"""The built wheel, unpacked elsewhere: what the commands need is in it, and nothing is read from the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from configs.common.files.project_files import PACKED_BELOW, PROJECT_FILES, ROOT

LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it, by hatchling and its hook."""
    return build("wheel", ROOT, tmp_path_factory.mktemp("dist"))


def build(target: str, source: Path, folder: Path) -> Path:
    """The wheel or source distribution of a checkout, or of what was unpacked from a source distribution."""
    command = [sys.executable, "-P", "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, folder: Path, code: str, *arguments: str) -> str:
    """Standard output of a program that imports the unpacked wheel, started in a folder."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rankwise(installed: Path, folder: Path, *arguments: str) -> str:
    return run(installed, folder, "from flows.cli.main import app; app(prog_name='rankwise')", *arguments)


def test_files_of_the_root_and_the_commit_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in PROJECT_FILES:
            assert archive.read(f"{PACKED_BELOW}/{name}") == (ROOT / name).read_bytes()
        names = archive.namelist()
    assert "configs/built_from.json" in names and "slurm/sbatch_bundle/rankwise.def" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/")) or name.endswith(".pyc")]


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_has_the_same_files_and_commit(wheel: Path, tmp_path: Path) -> None:
    """`python -m build` and `uv build` make the wheel so."""
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(build("wheel", unpacked, tmp_path / "again")) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert other.read("configs/built_from.json") == one.read("configs/built_from.json") != b"{}"


def test_the_installed_code_reads_its_own_files(installed: Path, tmp_path: Path) -> None:
    code = (
        "from configs.common.files.project_files import PROJECT_FILES, project_file\nfrom slurm.staging.version import "
        "code_version\n"
        "print(*map(project_file, PROJECT_FILES), *sorted(code_version()), sep='\\n')"
    )
    *paths, commit, dirty = run(installed, tmp_path, code).splitlines()
    assert paths == [str(installed / PACKED_BELOW / name) for name in PROJECT_FILES]
    assert (commit, dirty) == ("RANKWISE_COMMIT", "RANKWISE_DIRTY")


@pytest.mark.slow
def test_an_example_is_copied_and_planned_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert "quickstart" in rankwise(installed, tmp_path, "examples")
    rankwise(installed, tmp_path, "examples", "quickstart")
    planned = rankwise(installed, tmp_path, "run", "quickstart.yaml", "--dry-run")
    assert "14 cells" in planned and sorted(path.name for path in tmp_path.iterdir()) == [
        "models",
        "prompts.jsonl",
        "quickstart.yaml",
    ]


@pytest.mark.slow
def test_deployments_name_code_that_the_wheel_has(installed: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, yaml\nfrom configs.common.files.project_files import project_file\n"
        "for each in yaml.safe_load(project_file('prefect.yaml').read_text())['deployments']:\n"
        "    module, _, flow = each['entrypoint'].rpartition('.')\n"
        "    found = importlib.import_module(module)\n    print(found.__file__, callable(getattr(found, flow)))"
    )
    lines = run(installed, tmp_path, code).splitlines()
    assert lines == [f"{installed / 'flows' / 'deployed.py'} True"] * 3
