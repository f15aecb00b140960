"""Flow runs are named after their study, whatever its file is called."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import flows.deployed
import flows.scaling_study
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
