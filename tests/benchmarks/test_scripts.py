"""Shipped studies of scripts and the example gate: what `make bench-scripts` and `make bench-gate` rest on."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.scripts.bench import LIBRARIES, MAX_LINES, added_lines
from benchmarks.scripts.gate import EXAMPLE, NORMAL, SLOWED
from configs.common.files.project_files import shipped_studies
from configs.spec.study import load_study
from flows.cli.examples import copy_example


@pytest.mark.parametrize("name", LIBRARIES)
def test_shipped_scripts_have_few_lines_for_rankwise_and_name_their_source(name: str, tmp_path: Path) -> None:
    copy_example(f"script-{name}", tmp_path)
    study = tmp_path / shipped_studies()[f"script-{name}"].name
    (script,) = (tmp_path / "scripts").glob("*.py")
    text = script.read_text()
    assert added_lines(study) <= MAX_LINES
    assert added_lines(study) == len(re.findall(r"^from rankwise_probe|^ +step\(|set_log_level", text, re.M))
    said = ast.get_docstring(ast.parse(text)) or ""
    assert "Written from https://" in said and "Lines for Rankwise: " in " ".join(said.split())
    assert load_study(study).workload.inputs == (f"scripts/{script.name}",)  # type: ignore[union-attr]


def test_the_gate_measures_two_versions_of_the_script() -> None:
    text = (EXAMPLE / "train.py").read_text()
    assert text.count(NORMAL) == 1 and text.replace(NORMAL, SLOWED) != text
    study = load_study(EXAMPLE / "gate.yaml")
    assert set(study.experiments) == {"gate"}
    assert "rankwise compare runs/gate --within gate --undisturbed --junit" in (EXAMPLE / "gate.yml").read_text()


def test_the_workflow_of_the_gate_finds_both_versions(tmp_path: Path) -> None:
    """It ran the study inside one of the two checkouts, where the paths to both led nowhere."""
    steps = yaml.safe_load((EXAMPLE / "gate.yml").read_text())["jobs"]["gate"]["steps"]
    for step in steps:
        if step.get("uses", "").startswith("actions/checkout"):
            shutil.copytree(EXAMPLE, tmp_path / step["with"]["path"])
    (commands,) = (step["run"] for step in steps if "rankwise run" in step.get("run", ""))
    validated = re.sub(r"rankwise run (\S+).*", rf"{Path(sys.executable).with_name('rankwise')} validate \1", commands)
    done = subprocess.run(["sh", "-ec", validated], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert "valid. 2 cells, 18 measurements" in done.stdout, done.stderr
