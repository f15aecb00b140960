"""The program on a host, started here as a login shell starts it there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.ssh import connection


@pytest.mark.parametrize("module", ["secrets", "types", "platform"])
def test_files_of_the_home_folder_are_not_imported(module: str, tmp_path: Path) -> None:
    """Login shells begin there, and many have a secrets.py: the host was told to lack Python."""
    (tmp_path / f"{module}.py").write_text("raise ImportError('of the user')\n")
    sources = [(name, (connection._ROOT / f"{name.replace('.', '/')}.py").read_text()) for name in connection._PARTS]
    packages = [(name, "") for name in ("slurm", "slurm.staging", "slurm.ssh")]
    asked = {"id": 1, "op": "sizes", "body_bytes": 0, "paths": [str(tmp_path)]}
    done = subprocess.run(
        ["sh", "-c", connection._START, "sh", sys.executable, connection._BOOT], cwd=tmp_path, capture_output=True,
        text=True, input=f"{json.dumps([*packages, *sources])}\n{json.dumps(asked)}\n", timeout=600,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == {"id": 1, "body_bytes": 0, "sizes": [0]}, done.stderr
