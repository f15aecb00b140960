"""The documented Python surface: its names, and the examples of its document."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from configs.common.files.project_files import ROOT
from tests.support.api_groups import write_checkpoint


def test_names_are_there_and_torch_is_not_loaded_for_them() -> None:
    code = "import sys, engine; assert 'torch' not in sys.modules; engine.barrier(); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "True\n"
    assert sorted(engine._HOMES) == sorted(engine.__all__)
    for name in engine.__all__:
        assert callable(getattr(engine, name)), name
    with pytest.raises(AttributeError, match="no attribute 'NoSuchThing'"):
        _ = engine.NoSuchThing  # type: ignore[attr-defined]


@pytest.mark.nightly
def test_the_examples_of_the_document_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    write_checkpoint(checkpoint)
    text = (ROOT / "docs" / "reference" / "python-api.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 5
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = tmp_path / "two_ranks.py"
    for block in blocks:
        if block.startswith("# two_ranks.py\n"):
            script.write_text(block)
    alone = "\n".join(block for block in blocks if not block.startswith("# two_ranks.py\n"))
    alone = alone.replace("/models/llama", str(checkpoint))
    done = subprocess.run(
        [sys.executable, "-c", alone], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(script)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: loss 0.5" in done.stdout and "gathered 2 tensors" in done.stdout
