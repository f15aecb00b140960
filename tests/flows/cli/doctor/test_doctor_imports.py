"""`rankwise doctor` names what shadows our packages: real folders and a real second distribution."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.common.files.project_files import ROOT
from flows.cli.doctor.imports import check_imports

DOCTOR = "import sys; from flows.cli.main import app; sys.argv = ['rankwise', 'doctor', '--json']; app()"


def diagnosed(folder: Path, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and checks by name of a doctor that is started in a folder, as the installed command is."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", DOCTOR],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)}


def package(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("")
    return folder / name


def distribution(folder: Path, name: str, *packages: str) -> None:
    """What pip leaves of a small distribution."""
    for each in packages:
        package(folder, each)
    about = folder / f"{name}-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (about / "RECORD").write_text("".join(f"{each}/__init__.py,,\n" for each in packages))


def test_nothing_is_said_where_nothing_shadows(tmp_path: Path) -> None:
    (check,) = check_imports(tmp_path)
    assert check.state == "ok" and check.detail.endswith(f"from {ROOT}")
    (tmp_path / "tasks").mkdir()  # without __init__.py it does not precede a package
    assert check_imports(tmp_path) == [check]


@pytest.mark.slow
def test_a_folder_in_the_working_directory_is_named(tmp_path: Path) -> None:
    theirs = package(tmp_path, "tasks")
    imported = [sys.executable, "-c", "import tasks; print(tasks.__file__)"]
    done = subprocess.run(imported, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(theirs / "__init__.py")  # the harm that is warned of
    _, checks = diagnosed(tmp_path)
    assert checks["import tasks"]["state"] == "warning"
    assert str(theirs) in checks["import tasks"]["detail"] and str(theirs) in checks["import tasks"]["remedy"]
    assert "imports" not in checks and "import flows" not in checks


@pytest.mark.slow
def test_another_distribution_that_precedes_ours_is_named_and_the_doctor_fails(tmp_path: Path) -> None:
    distribution(tmp_path / "site", "taskmaster", "reports", "tasks")
    (tmp_path / "work").mkdir()
    code, checks = diagnosed(tmp_path / "work", PYTHONPATH=str(tmp_path / "site"))
    assert code == 1
    for name in ("reports", "tasks"):
        assert checks[f"import {name}"]["state"] == "missing"
        assert str(tmp_path / "site" / name) in checks[f"import {name}"]["detail"]
        assert "pipx" in checks[f"import {name}"]["remedy"]


def test_another_distribution_behind_ours_is_named(tmp_path: Path) -> None:
    distribution(tmp_path / "site", "taskmaster", "tasks")
    (tmp_path / "work").mkdir()
    (check,) = check_imports(tmp_path / "work", [*sys.path, str(tmp_path / "site")])
    assert check.state == "warning" and "taskmaster 1.5 also installs a package called tasks" in check.detail
