"""Studies of scripts that would measure nothing, or something else than is asked for, are refused before they start."""

import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from configs.spec.study import parse_study
from tasks.planning.script_inputs import misplaced, pack_input, replaced_notes, written_twice

SLURM = {"kind": "slurm", "name": "cluster", "partition": "p", "nodes": 2, "ranks_per_node": 1}
WEAK = {"weak": {"kind": "weak", "grow": "dp", "to": 2}}
ONE = {"one": {"kind": "sweep", "over": {"dp": [1]}}}
COUNTED = {"items_per_step": "4 * {dp}", "unit": "sample"}


@pytest.mark.parametrize(
    ("work", "experiments", "targets", "problem"),
    [
        (
            {"launcher": "srun", **COUNTED},
            ONE,
            None,
            "workload.launcher: srun requires targets of kind slurm, got local",
        ),
        ({"launcher": "srun", **COUNTED}, ONE, [SLURM], ""),
        ({"measure": "wall"}, WEAK, None, "experiments.weak: throughput counts steps"),
        ({"measure": "wall"}, ONE, None, ""),
        ({"measure": "wall", **COUNTED}, WEAK, None, ""),
        ({"measure": "probe"}, WEAK, None, ""),
    ],
)
def test_misplaced_launchers_and_units(
    work: dict[str, Any], experiments: dict[str, Any], targets: list[dict[str, Any]] | None, problem: str
) -> None:
    study: dict[str, Any] = {"study": "s", "workload": {"kind": "script", "command": ["t.py"], **work}}
    study |= {"experiments": experiments} | ({} if targets is None else {"targets": targets})
    found = misplaced(parse_study(study))
    assert len(found) == bool(problem)
    assert all(text.startswith(problem) for text in found)


def test_linked_folders_are_packed_with_what_lies_in_them(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "part").mkdir(parents=True)
    (tmp_path / "elsewhere" / "part" / "a.txt").write_text("a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "elsewhere")
    digest = pack_input(tmp_path, "data", tmp_path)
    with tarfile.open(tmp_path / f"{digest}.tar") as archive:
        assert archive.getnames() == ["data/again/part/a.txt", "data/linked/part/a.txt"]


@pytest.mark.parametrize("marks", [["run.lock"], ["plan.json", "study.yaml"]])
def test_run_folders_are_no_part_of_an_input(marks: list[str], tmp_path: Path) -> None:
    """Every run of a study with `inputs: [.]` was of other cells than the one before, and its archives held others."""
    (tmp_path / "train.py").write_text("a")
    inputs = tmp_path / "runs" / "mine" / "inputs"
    inputs.mkdir(parents=True)
    first = pack_input(tmp_path, ".", inputs)
    for name in marks:
        (tmp_path / "runs" / "mine" / name).touch()
    (tmp_path / "runs" / "mine" / "jobs").mkdir()
    os.mkfifo(tmp_path / "runs" / "mine" / "jobs" / "out_0")
    assert pack_input(tmp_path, ".", inputs) == first
    with tarfile.open(inputs / f"{first}.tar") as archive:
        assert archive.getnames() == ["train.py"]


def test_a_file_that_cannot_be_packed_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "latest").symlink_to("gone")
    with pytest.raises(ValueError, match=r"^data: .*/data/latest: No such file or directory$"):
        pack_input(tmp_path, "data", tmp_path)


@pytest.mark.parametrize("to", [".", "data", "elsewhere"])
def test_a_link_to_a_folder_around_it_is_refused(to: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / to)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="data/linked/back: a link to a folder that it lies in"):
        pack_input(tmp_path, "data", tmp_path)


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (
            {"config_files": {"conf/ds.json": {"a": 1}}},
            "workload.config_files: conf/ds.json would replace the file of ",
        ),
        ({"planned_files": {"./conf/ds.json": "deepspeed"}}, "workload.planned_files: conf/ds.json would replace the"),
        (
            {"templates": ["conf/ds.json.j2"]},
            "workload.templates: conf/ds.json would replace the file of that name of ",
        ),
        ({"config_files": {"ds.json": {"a": 1}}}, ""),
    ],
    ids=["written", "planned", "rendered", "elsewhere"],
)
def test_a_file_that_two_fields_name_is_refused(work: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """The script found the last one, and nothing said that the user's own was gone."""
    (tmp_path / "conf").mkdir()
    for name in ("t.py", "conf/ds.json", "conf/ds.json.j2"):
        (tmp_path / name).write_text("{}")
    inputs = ["t.py", "conf/ds.json", "conf/ds.json.j2"]
    told = {"study": "s", "workload": {"kind": "script", "command": ["t.py"], "inputs": inputs, "measure": "wall"}}
    whole = parse_study(told | {"workload": told["workload"] | work, "experiments": ONE})  # type: ignore[operator]
    assert [text[: len(problem)] for text in written_twice(whole, tmp_path)] == [problem] * bool(problem)
    over = {f"workload.{field}": [value] for field, value in work.items()}
    swept = parse_study(told | {"experiments": {"one": {"kind": "sweep", "over": over}}})
    assert len(written_twice(swept, tmp_path)) == bool(problem), "also where a point of a sweep has it"


@pytest.mark.parametrize("given", [".", "conf"])
def test_a_file_of_a_folder_that_is_replaced_is_named(given: str, tmp_path: Path) -> None:
    """A checkout has its ds.json, which a study may well have another one instead of."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text("{}")
    work = {"kind": "script", "command": ["t.py"], "inputs": [given], "measure": "wall"}
    work |= {"config_files": {"conf/ds.json": {"a": 1}}, "planned_files": {"other.json": "torch"}}
    study = parse_study({"study": "s", "workload": work, "experiments": ONE})
    replaced = tmp_path / "conf" / "ds.json"
    told = f"{replaced} is replaced in the script's folder by the file of that name of workload.config_files"
    assert replaced_notes(study, tmp_path) == [told]
    assert written_twice(study, tmp_path) == []
