"""The folder that a script runs in."""

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from configs.common.execution import Layout
from configs.workloads.script import ScriptWorkload
from engine.planner.choice.script_files import planned_contents
from engine.scripts.workdir import fill_workdir, merged
from tasks.planning.script_inputs import pack_input

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("text", ["{{ micro_batch_size * 2 }}", "{{ 1 // 0 }}", "{{ params.lr }}"])
def test_a_template_that_cannot_be_rendered_is_named(text: str, tmp_path: Path) -> None:
    """Arithmetic with a field that is not set was `unsupported operand type(s)`, without the template."""
    (tmp_path / "conf.yaml.j2").write_text(text)
    inputs = (pack_input(tmp_path, "conf.yaml.j2", tmp_path),)
    work = ScriptWorkload(command=("t.py",), inputs=inputs, templates=("conf.yaml.j2",))
    with pytest.raises(ValueError, match=r"^workload\.templates: conf\.yaml\.j2: "):
        fill_workdir(work, tmp_path, tmp_path / "work", {"micro_batch_size": None}, {})


def _filled(archive: Path, folder: Path) -> None:
    work = ScriptWorkload(command=("t.py",), inputs=(archive.stem,))
    fill_workdir(work, archive.parent, folder, {}, {})


@pytest.mark.filterwarnings("ignore:Python 3.14:DeprecationWarning")  # of the call that stands for an old one
@pytest.mark.parametrize("filters", [True, False], ids=["python that filters", "debian 12's 3.11.2"])
def test_inputs_are_unpacked_by_every_python(filters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not filters:
        whole = tarfile.TarFile.extractall
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.setattr(tarfile.TarFile, "extractall", lambda archive, path: whole(archive, path))
    source = tmp_path / "train"
    (source / "data").mkdir(parents=True)
    (source / "data" / "rows.txt").write_text("1\n")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o700)
    (tmp_path / "inputs").mkdir()
    digest = pack_input(tmp_path, "train", tmp_path / "inputs")
    _filled(tmp_path / "inputs" / f"{digest}.tar", tmp_path / "work")
    assert (tmp_path / "work" / "train" / "data" / "rows.txt").read_text() == "1\n"
    assert (tmp_path / "work" / "train" / "run.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../out.txt", tarfile.REGTYPE), ("/out.txt", tarfile.REGTYPE), ("a/../../out.txt", tarfile.REGTYPE),
     ("link", tarfile.SYMTYPE), ("pipe", tarfile.FIFOTYPE)],
)  # fmt: skip
def test_an_input_of_another_kind_is_refused_before_anything_is_unpacked(
    name: str, kind: bytes, tmp_path: Path
) -> None:
    archive = tmp_path / f"{'0' * 64}.tar"
    with tarfile.open(archive, "w") as packed:
        for each, its_kind in (("first.txt", tarfile.REGTYPE), (name, kind)):
            member = tarfile.TarInfo(each)
            member.type, member.linkname = its_kind, "/etc"
            packed.addfile(member, BytesIO(b""))
    with pytest.raises(ValueError, match="no file inside the folder"):
        _filled(archive, tmp_path / "work")
    assert not list((tmp_path / "work").iterdir())


def test_an_optimizer_of_another_type_has_no_settings_of_the_planners() -> None:
    """`SGD.__init__() got an unexpected keyword argument 'betas'`, DeepSpeed said."""
    work = ScriptWorkload(command=("train.py",), micro_batch_size=4, planned_files={"ds.json": "deepspeed"})
    planned = planned_contents(work, Layout(dp=2, strategy="zero1"), "float32", 1, on_cpu=True)["ds.json"]
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    assert merged(planned, {"optimizer": sgd})["optimizer"] == sgd
    assert merged({"deepspeed": planned}, {"deepspeed": {"optimizer": sgd}})["deepspeed"]["optimizer"] == sgd
    for told in ({"params": {"lr": 0.1}}, {"type": "Adam", "params": {"lr": 0.1}}):
        found = merged(planned, {"optimizer": told})["optimizer"]
        assert found["params"] == planned["optimizer"]["params"] | {"lr": 0.1}
        assert found["type"] == told.get("type", "AdamW")


def test_what_a_script_reads_is_utf8_whatever_the_locale_is(tmp_path: Path) -> None:
    """Templates were rendered, and configuration was written, in the encoding of LANG."""
    (tmp_path / "conf.txt.j2").write_text("{{ params.place }} \u00e9\u4e2d", encoding="utf-8")
    inputs = (pack_input(tmp_path, "conf.txt.j2", tmp_path),)
    work = ScriptWorkload(
        command=("t.py",), inputs=inputs, templates=("conf.txt.j2",), config_files={"c.yaml": {"place": "\u00e9\u4e2d"}}
    )
    program = (
        "import sys; from pathlib import Path; from configs.workloads.script import ScriptWorkload;"
        "from engine.scripts.workdir import fill_workdir; here = Path(sys.argv[1]);"
        "work = ScriptWorkload.model_validate_json(sys.argv[2]);"
        "fill_workdir(work, here, here / 'work', {'params.place': chr(0xe9)}, {})"
    )
    legacy = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), json.dumps(work.model_dump(mode="json"))],
        check=True, env=os.environ | legacy, cwd=ROOT,
    )  # fmt: skip
    assert (tmp_path / "work" / "conf.txt").read_text(encoding="utf-8") == "\u00e9 \u00e9\u4e2d"
    assert (tmp_path / "work" / "c.yaml").read_text(encoding="utf-8") == "place: \u00e9\u4e2d\n"
