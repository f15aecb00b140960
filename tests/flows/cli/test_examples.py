"""`rankwise examples`: what it lists is true, and a copy measures what the original measures."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.common.files.project_files import shipped_studies
from configs.plans.plan import Plan
from configs.spec.study import load_study
from flows.cli.examples import copy_example, shipped_examples
from flows.cli.main import app
from flows.precheck import check_study

NAMES = (
    "bandwidth",
    "command-dd",
    "command-matmul",
    "command-openssl",
    "command-perf-pipe",
    "command-timeit",
    "compression",
    "openllama-cluster",
    "openllama-small",
    "quickstart",
    "script-accelerate",
    "script-ddp",
    "script-deepspeed",
    "script-hf-trainer",
    "script-jax",
    "script-lightning",
    "serving",
    "ssh-hosts",
    "strategies",
    "training",
    "two-nodes",
)


def test_every_shipped_study_is_an_example() -> None:
    assert tuple(sorted(shipped_studies())) == NAMES == tuple(sorted(shipped_examples()))


def planned(study: Path, scratch: Path) -> Plan:
    return check_study(load_study(study), study.parent, scratch / "cache", scratch / "run")


def test_every_example_is_listed_with_what_it_shows() -> None:
    listed = CliRunner().invoke(app, ["examples"])
    assert listed.exit_code == 0
    lines = listed.stdout.splitlines()
    assert tuple(line.split()[0] for line in lines[1 : 1 + len(NAMES)]) == NAMES
    assert max(map(len, lines)) < 150 and all(name in lines[1 + number] for number, name in enumerate(NAMES))
    quickstart = lines[1 + NAMES.index("quickstart")]
    assert "14" in quickstart and "3 minutes on 2 cores" in quickstart and "correctness of inference" in quickstart


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_stands_alone_and_has_the_cells_of_the_original(name: str, tmp_path: Path) -> None:
    assert copy_example(name, tmp_path / "copy") == 0
    original = shipped_studies()[name]
    copied = tmp_path / "copy" / original.name
    assert "../" not in copied.read_text() and "configs/" not in copied.read_text()
    ours, theirs = planned(original, tmp_path / "one"), planned(copied, tmp_path / "two")
    assert ours.cells.keys() == theirs.cells.keys() and ours.repeats == theirs.repeats
    assert int(shipped_examples()[name]["cells"]) == len(ours.cells)


def test_what_lies_there_is_kept_unless_it_is_the_same(tmp_path: Path) -> None:
    copy = ["examples", "quickstart", "--out", str(tmp_path)]
    assert [CliRunner().invoke(app, copy).exit_code for _ in range(2)] == [0, 0]
    for file in ("prompts.jsonl", "quickstart.yaml"):
        path = tmp_path / file
        before = path.read_text()
        path.write_text("edited")
        refused = CliRunner().invoke(app, copy)
        assert refused.exit_code == 1 and f"{file}: already exists and differs" in refused.output
        assert path.read_text() == "edited"
        path.write_text(before)


def test_an_unknown_example_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["examples", "slowstart", "--out", str(tmp_path / "new")])
    assert refused.exit_code == 2 and "slowstart" in refused.output and "two-nodes" in refused.output
    assert not (tmp_path / "new").exists()
    near = CliRunner().invoke(app, ["examples", "quickstrt"])
    assert near.exit_code == 2 and "no example 'quickstrt' (did you mean quickstart?)" in near.output


def test_a_folder_in_the_way_is_named_without_a_word_on_measurements(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["examples", "quickstart", "--out", str(tmp_path / "file" / "below")])
    assert refused.exit_code == 1 and refused.output.strip().endswith("Not a directory"), refused.output


def test_the_command_that_is_proposed_can_be_pasted(tmp_path: Path) -> None:
    copied = CliRunner().invoke(app, ["examples", "command-timeit", "--out", str(tmp_path / "my 'studies'")])
    proposed = copied.output.strip().splitlines()[-1].removeprefix("To run it: ")
    *command, study = shlex.split(proposed)
    assert command == ["rankwise", "run"] and Path(study).is_file(), proposed
