"""A command in a container: with one and without one a job differs only by the words before its command.

    wrapped([interpreter(target), "-m", "slurm.launch", "/runs/s/jobs/0001/job.json"], target, ["/runs/s", "/cache"])
    # -> apptainer exec --nv --pwd /runs/s --bind /runs/s --bind /cache rankwise.sif python3 -m slurm.launch ...

Folders keep their paths inside, so that job.json says the same in both. Apptainer hands the environment of the
host on, SLURM_* and CUDA_VISIBLE_DEVICES included, and shares /tmp, /dev/shm, the network and the processes' names
(https://apptainer.org/docs/user/latest/, "Bind Paths and Mounts" and "Environment and Metadata"). Singularity takes
the same arguments. Under pyxis srun itself starts its tasks in the image (`srun_container`).
"""

import csv
import io
import os
import shutil
import sys
from collections.abc import Sequence

from configs.targets.resources import ScheduledTarget

_PROGRAMS = ("apptainer", "singularity")


def interpreter(target: ScheduledTarget) -> str:
    """The Python that has Rankwise on the target's nodes, or in its container."""
    if target.container is not None:
        return target.container.python
    return target.python or sys.executable


def wrapped(command: Sequence[str], target: ScheduledTarget, folders: Sequence[str]) -> list[str]:
    """The command as the target's nodes must start it; without a container that is the command itself.

    folders: absolute paths that the job reads or writes; the first is its working directory in the container.
    """
    if target.container is None or target.container.runtime == "pyxis":
        return list(command)
    argv = [_program(), "exec", *(["--nv"] if target.gpus_per_node else [])]
    # Packages below a home folder, which Apptainer mounts, must not take the place of the image's.
    argv += ["--env", "PYTHONNOUSERSITE=1", "--pwd", folders[0]]
    for folder in _outermost([*folders, *([target.shared] if target.shared else [])]):
        argv += bind(folder)
    for given in target.container.binds:
        argv += ["--bind", given]
    return [*argv, target.container.image, *command]


def srun_container(folders: Sequence[str], target: ScheduledTarget) -> list[str]:
    """Options of srun by which pyxis starts its tasks in an image; none without it.

    https://github.com/NVIDIA/pyxis: --container-mounts takes SRC:DST[:FLAGS], separated by commas. What the target
    sets up runs inside. Raises ValueError for a folder that the option cannot represent.
    """
    if target.container is None or target.container.runtime != "pyxis":
        return []
    mounts = []
    for folder in _outermost([*folders, *([target.shared] if target.shared else [])]):
        if {",", ":"} & {*folder}:
            raise ValueError(f"path {folder!r}: pyxis does not support commas and colons. Use another folder")
        mounts.append(f"{folder}:{folder}")
    mounts += target.container.binds
    return [
        f"--container-image={target.container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={folders[0]}",
    ]


def bind(folder: str) -> list[str]:
    """The arguments that make a folder visible in the container, under its own path."""
    if not {",", ":", '"', "\\", "\n", "\r"} & set(folder):
        return ["--bind", folder]
    # --bind divides at commas and colons; --mount reads one line of CSV, in which a quoted field may hold anything.
    line = io.StringIO()
    csv.writer(line).writerow(["type=bind", f"source={folder}", f"destination={folder}"])
    return ["--mount", line.getvalue().removesuffix("\r\n")]


def _outermost(folders: Sequence[str]) -> list[str]:
    """Each folder once, without those below another."""
    distinct = sorted({os.path.normpath(folder) for folder in folders})
    kept: list[str] = []
    for folder in distinct:
        if not any(os.path.commonpath([folder, outer]) == outer for outer in kept):
            kept.append(folder)
    return kept


def _program() -> str:
    """What the submitting machine has, since that is what the nodes have; Apptainer where it has neither."""
    return next((name for name in _PROGRAMS if shutil.which(name)), _PROGRAMS[0])
