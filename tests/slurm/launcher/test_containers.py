"""Commands in a container: the words before the command, and real binds made by a stand-in for Apptainer.

Apptainer is not among the packages that can be had where this is developed: `stand_in_apptainer` makes the binds it is
told in a mount namespace of its own, and runs the inner command there.
"""

import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.targets.resources import Container
from configs.targets.target import SlurmTarget
from slurm.launcher.containers import bind, interpreter, wrapped

STAND_IN = Path(__file__).parents[2] / "support" / "stand_in_apptainer"


def can_mount() -> bool:
    """Whether this process may make mounts of its own."""
    asked = ["unshare", "--mount", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    return shutil.which("unshare") is not None and subprocess.run(asked, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="the stand-in for Apptainer makes mounts, which needs root")


def target(**changes: object) -> SlurmTarget:
    container = Container(image="/images/rankwise.sif", binds=["/data:/data:ro"])
    return SlurmTarget.model_validate({"container": container, **changes})


def test_without_a_container_the_command_is_itself() -> None:
    plain = SlurmTarget()
    assert wrapped(["python3", "-m", "slurm.launch"], plain, ["/runs/s"]) == ["python3", "-m", "slurm.launch"]
    assert interpreter(plain) == sys.executable
    assert interpreter(SlurmTarget(python="/env/bin/python")) == "/env/bin/python"
    assert interpreter(target(python="/env/bin/python")) == "python3"


def test_with_a_container_only_words_before_the_command_are_added() -> None:
    command = [interpreter(target()), "-m", "slurm.launch", "/runs/s/jobs/0001/job.json"]
    argv = wrapped(command, target(), ["/runs/s", "/cache", "/runs/s/inputs", "/runs/s"])
    assert argv[-4:] == command and argv[-5] == "/images/rankwise.sif" and argv[:2] == ["apptainer", "exec"]
    binds = [argv[position + 1] for position, word in enumerate(argv) if word == "--bind"]
    assert binds == ["/cache", "/runs/s", "/data:/data:ro"]
    assert argv[argv.index("--pwd") + 1] == "/runs/s" and "--nv" not in argv
    assert "--nv" in wrapped(command, target(gpus_per_node=1), ["/runs/s"])
    shared = wrapped(command, target(shared="/shared"), ["/runs/s"])
    assert shared[shared.index("/shared") - 1 : shared.index("/shared") + 1] == ["--bind", "/shared"]


@given(st.text(st.characters(exclude_characters="\0"), min_size=1).map(lambda text: "/" + text))
def test_any_path_can_be_bound(path: str) -> None:
    option, value = bind(path)
    if option == "--bind":
        assert value == path and not set(value) & set(',:"\\\n')
    else:
        # What Go's encoding/csv, which Apptainer uses, and Python's read is one format: RFC 4180.
        [fields] = csv.reader(io.StringIO(value, newline=""))
        assert fields == ["type=bind", f"source={path}", f"destination={path}"]


@needs_mounts
def test_a_command_sees_what_is_bound_and_nothing_else(tmp_path: Path) -> None:
    image, job, other = tmp_path / "image.sif", tmp_path / "a job, with: all $sorts of 'names\"", tmp_path / "other"
    image.touch()
    for folder in (job, other):
        folder.mkdir()
    (job / "seen").write_text("42")
    (tmp_path / "apptainer").symlink_to(STAND_IN)
    asked = target(container=Container(image=str(image), binds=[], python="python3"))
    script = (
        "import os, pathlib, sys\n"
        "assert pathlib.Path('seen').read_text() == '42', os.getcwd()\n"
        "assert not os.path.exists(sys.argv[1])\n"
        "assert os.environ['GIVEN'] == 'a $b \\n\"c\"' and os.environ['PYTHONNOUSERSITE'] == '1'\n"
        "pathlib.Path(sys.argv[2], 'written').write_text('from inside')\n"
    )
    command = wrapped([interpreter(asked), "-c", script, str(other), str(job)], asked, [str(job)])
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin:/usr/local/bin", "GIVEN": 'a $b \n"c"'}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (job / "written").read_text() == "from inside"
    missing = wrapped([*command[-1:]], asked, [str(tmp_path / "nowhere")])
    refused = subprocess.run(missing, env=environment, capture_output=True, text=True)
    assert refused.returncode != 0 and "doesn't exist" in refused.stderr
