"""The folder that a script runs in."""

from pathlib import Path

import pytest

from configs.workloads.script import ScriptWorkload
from engine.scripts.workdir import fill_workdir
from tasks.planning.script_inputs import pack_input


@pytest.mark.parametrize("text", ["{{ micro_batch_size * 2 }}", "{{ 1 // 0 }}", "{{ params.lr }}"])
def test_a_template_that_cannot_be_rendered_is_named(text: str, tmp_path: Path) -> None:
    """Arithmetic with a field that is not set was `unsupported operand type(s)`, without the template."""
    (tmp_path / "conf.yaml.j2").write_text(text)
    inputs = (pack_input(tmp_path, "conf.yaml.j2", tmp_path),)
    work = ScriptWorkload(command=("t.py",), inputs=inputs, templates=("conf.yaml.j2",))
    with pytest.raises(ValueError, match=r"^workload\.templates: conf\.yaml\.j2: "):
        fill_workdir(work, tmp_path, tmp_path / "work", {"micro_batch_size": None}, {})
