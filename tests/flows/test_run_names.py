"""Flow runs are named after their study, whatever its file is called."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import flows.deployed
import flows.scaling_study
from configs.spec.form import StudyForm
from configs.spec.short_form import ShortStudy
from tests.support.run_folders.studies import write_study


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = write_study(tmp_path, "of-the-team")
    return path.rename(path.with_name("study.yaml"))


def test_a_run_of_a_file_is_named_by_its_study(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, named in ((flows.scaling_study, "_flow_run_name"), (flows.deployed, "_sweep_name")):
        for study, expected in ((str(written), "of-the-team"), (str(written.with_name("gone.yaml")), "gone")):
            run = SimpleNamespace(parameters={"study": study}, name="fervent-void")
            monkeypatch.setattr(module, "flow_run", run)
            assert getattr(module, named)() == expected
    written.write_text("study: [wrong\n")
    assert flows.deployed._sweep_name() == "gone"
    monkeypatch.setattr(flows.deployed, "flow_run", SimpleNamespace(parameters={"study": str(written)}, name=None))
    assert flows.deployed._sweep_name() == "study"
    monkeypatch.setattr(flows.deployed, "flow_run", SimpleNamespace(parameters={"study": "quickstart"}, name=None))
    assert flows.deployed._sweep_name() == "quickstart"


@pytest.mark.parametrize(
    ("filled", "name"),
    [
        ({"name": "mine"}, "mine"),
        ({"name": "my-study", "yaml": "study: pasted\nworkload: {kind: noop}\n"}, "pasted"),
        ({"name": "mine", "yaml": "workload: {kind: noop}\n"}, "mine"),
        ({"name": "mine", "yaml": "study: [wrong\n"}, "mine"),
        ({"name": "mine", "yaml": "study: a name/that is none\n"}, "mine"),
        ({"name": "mine", "advanced": ["study=larger"]}, "larger"),
        ({"name": "mine", "ranks": 0}, "mine"),
        ({}, "my-study"),
        (None, "my-study"),
        (ShortStudy(name="from-python"), "from-python"),
    ],
)
def test_a_run_of_the_short_form_is_named_by_the_study_that_it_measures(
    filled: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its run folder and its artifacts are: a pasted file has a name of its own."""
    run = SimpleNamespace(parameters={"study": filled}, name="fervent-void")
    monkeypatch.setattr(flows.deployed, "flow_run", run)
    assert flows.deployed._short_name() == name


@pytest.mark.parametrize(
    ("filled", "name"),
    [
        ({"study": "mine"}, "mine"),
        ({}, "from-the-form"),
        (None, "from-the-form"),
        (StudyForm(), "from-the-form"),
        (StudyForm(study="from-python"), "from-python"),
        ([], "study"),
    ],
)
def test_a_run_of_the_form_is_named_by_the_study_that_it_measures(
    filled: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose form was left out, or filled in from Python, was named `study`."""
    monkeypatch.setattr(flows.deployed, "flow_run", SimpleNamespace(parameters={"study": filled}, name="fervent-void"))
    assert flows.deployed._form_name() == name


def test_a_sweep_is_named_by_its_study_with_the_assignments(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"study": str(written), "assignments": ["study=every-night"]}
    monkeypatch.setattr(flows.deployed, "flow_run", SimpleNamespace(parameters=given, name=None))
    assert flows.deployed._sweep_name() == "every-night"
