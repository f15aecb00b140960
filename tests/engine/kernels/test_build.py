"""Where compiled kernels are kept: on a disk from which code can be loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
from engine.kernels import build
from engine.kernels.linear import why_no_cpu_kernels
print(why_no_cpu_kernels() or build._cache_folder())
"""
ISOLATED = ["unshare", "--mount", "--propagation", "private"]


def loaded(script: str, *folders: Path) -> str:
    """Where the kernels lie, or why there are none, of a process that the script starts in mounts of its own."""
    done = subprocess.run(
        [*ISOLATED, "sh", "-ec", script, "sh", sys.executable, PROGRAM, *map(str, folders)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANKWISE_KERNELS": "on"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(
    subprocess.run([*ISOLATED, "true"], capture_output=True).returncode != 0, reason="mounts need to be root"
)
def test_kernels_lie_where_code_can_be_loaded(tmp_path: Path) -> None:
    """As in containers, whose temporary file systems Docker mounts noexec."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    for folder in (home, temporary):
        folder.mkdir()
    noexec = 'mount -t tmpfs -o noexec none "$3"; '
    run = 'XDG_CACHE_HOME="$3" TMPDIR="$4" exec "$1" -c "$2"'
    assert loaded(noexec + run, home, temporary) == str(temporary / f"rankwise-kernels-{os.getuid()}")
    said = loaded(noexec + noexec.replace("$3", "$4") + run, home, temporary)
    assert said == (
        f"linear.c: no code can be loaded from {home} or {temporary} (mounted noexec, or not writable); "
        "set XDG_CACHE_HOME to a folder of another disk"
    )
