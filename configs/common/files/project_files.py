"""Files of the project that installed packages read: `prefect.yaml` and `constraints.txt` of the root, shipped studies.

    project_file("prefect.yaml")            # <checkout>/prefect.yaml, or configs/project/prefect.yaml of a wheel
    shipped_studies()["quickstart"]         # configs/studies/quickstart.yaml

A checkout holds each file of the root once. `hatch_build.py`, and `slurm.staging.wheel` for the nodes of a cluster, put
copies into the wheel.
"""

from pathlib import Path

import configs

ROOT = Path(configs.__file__).resolve().parent.parent
"""The folder in which our packages lie: a checkout, or where a wheel was installed."""

PROJECT_FILES = ("constraints.txt", "prefect.yaml")
PACKED_BELOW = "configs/project"
"""In a wheel: the folder of the copies."""


def project_file(name: str) -> Path:
    """Path of one of PROJECT_FILES, which need not exist: a wheel could have been built without it."""
    assert name in PROJECT_FILES, name
    packed = ROOT / PACKED_BELOW / name
    return packed if packed.is_file() else ROOT / name


def packed_files() -> dict[str, Path]:
    """Where each copy belongs in a wheel, and the file it is a copy of."""
    return {f"{PACKED_BELOW}/{name}": path for name in PROJECT_FILES if (path := project_file(name)).is_file()}


def shipped_studies() -> dict[str, Path]:
    """Study files that come with Rankwise, by name as a user writes it: `two-nodes` for `two_nodes.yaml`."""
    return {path.stem.replace("_", "-"): path for path in sorted((ROOT / "configs" / "studies").glob("*.yaml"))}
