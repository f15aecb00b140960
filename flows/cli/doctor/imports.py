"""`rankwise doctor`: who else provides a package called `flows`, `tasks`, `configs`, `engine`, `reports` or `slurm`.

These import names are common. In a shared environment another distribution may install a package of the same name, and
a folder of that name in the working directory precedes ours for `python -m` and for the flow runs that a Prefect worker
starts there. This module compares where each name is imported from with where this installation lies.
"""

import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from configs.common.files.project_files import ROOT
from flows.cli.doctor.checks import DoctorCheck
from slurm.staging.wheel import PACKAGES

_ISOLATED = "install rankwise in an environment of its own: pipx install, or uv tool install (docs/how-to/install.md)"


def check_imports(folder: Path | None = None, path: Sequence[str] | None = None) -> list[DoctorCheck]:
    """Where our packages would be imported from.

    folder: the working directory; default: that of this process. path: the import path; default: `sys.path`.
    """
    folder = (folder or Path.cwd()).absolute()
    path = [entry for entry in (sys.path if path is None else path) if entry not in ("", str(folder))]
    found = []
    for name in PACKAGES:
        installed, here = (_origin(name, entries) for entries in (path, [str(folder), *path]))
        if installed is not None and not _ours(installed):
            found.append(DoctorCheck(f"import {name}", "missing", f"{installed} precedes {ROOT / name}", _ISOLATED))
        elif here is not None and not _ours(here) and here != installed:
            detail = f"{here} shadows {ROOT / name} for `python -m` and for Prefect flow runs started in {folder}"
            found.append(DoctorCheck(f"import {name}", "warning", detail, f"rename {here}, or work in another folder"))
    for name, others in _other_providers(path).items():
        if f"import {name}" not in {check.name for check in found}:
            detail = f"{', '.join(others)} also installs a package called {name}"
            found.append(DoctorCheck(f"import {name}", "warning", detail, _ISOLATED))
    return found or [DoctorCheck("imports", "ok", f"{', '.join(PACKAGES)} from {ROOT}")]


def _origin(name: str, path: Iterable[str]) -> Path | None:
    """The folder that a package is imported from with this import path; None where it is not found."""
    spec: ModuleSpec | None = PathFinder.find_spec(name, list(path))
    if spec is None:
        return None
    if spec.origin is not None:
        origin = Path(spec.origin)
        return origin.parent if spec.submodule_search_locations is not None else origin
    return Path(next(iter(spec.submodule_search_locations or [""])))


def _ours(found: Path) -> bool:
    return found.resolve().parent == ROOT


def _other_providers(path: list[str]) -> dict[str, list[str]]:
    """Distributions other than ours that install files into a package of one of our names, by that name."""
    others: dict[str, set[str]] = {}
    for distribution in importlib.metadata.distributions(path=path):
        if distribution.name == "rankwise":
            continue
        tops = {file.parts[0] for file in distribution.files or () if len(file.parts) > 1}
        for name in tops.intersection(PACKAGES):
            others.setdefault(name, set()).add(f"{distribution.name} {distribution.version}")
    return {name: sorted(found) for name, found in others.items()}
