"""Commit of the running code, from git in a checkout or from the file packed into the wheel.

code_version()        # {"RANKWISE_COMMIT": "0e1f...", "RANKWISE_DIRTY": "0"}, for the environment of the ranks
"""

import functools
import subprocess

from configs.common.files.project_files import ROOT

BUILT_FROM = "configs/built_from.json"
"""In a wheel: the variables that `code_version` gave where it was packed."""


@functools.cache
def code_version() -> dict[str, str]:
    """Commit of the code that runs and whether it was changed since; empty where nothing can say."""
    if not (ROOT / ".git").exists():
        return _packed_version()
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, errors="replace", check=True, timeout=10
        )
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(status, capture_output=True, text=True, errors="replace", check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"RANKWISE_COMMIT": commit.stdout.strip(), "RANKWISE_DIRTY": "1" if changed.stdout.strip() else "0"}


def _packed_version() -> dict[str, str]:
    try:
        from configs.common.files.reading import read_json_object  # needs pydantic, which an isolated build has not

        return read_json_object(ROOT / BUILT_FROM)
    except (ImportError, OSError, ValueError):
        return {}
