"""Commit of the running code, from git in a checkout or from the file packed into the wheel.

code_version()        # {"RANKWISE_COMMIT": "0e1f...", "RANKWISE_DIRTY": "0"}, for the environment of the ranks
"""

import functools
import os
import subprocess
import sys

from configs.common.files.project_files import ROOT

BUILT_FROM = "configs/built_from.json"
"""In a wheel: the variables that `code_version` gave where it was packed."""

_GIT_SECONDS = 10.0
_OF_A_REPOSITORY = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
)


@functools.cache
def code_version() -> dict[str, str]:
    """Commit of the code that runs and whether it was changed since.

    What nothing can say is left out; why git does not say it is told on standard error. Reading the state of a large
    checkout on a network file system can take longer than is waited for, its commit alone never does.
    """
    if not (ROOT / ".git").exists():
        return _packed_version()
    found: dict[str, str] = {}
    try:
        found["RANKWISE_COMMIT"] = _git("rev-parse", "HEAD")
        found["RANKWISE_DIRTY"] = "1" if _git("status", "--porcelain", "--untracked-files=no") else "0"
    except (OSError, subprocess.SubprocessError) as error:
        unknown = "whether the code was changed since its commit" if found else "the commit of the code"
        print(f"{ROOT}: {unknown} is unknown: {_why(error)}", file=sys.stderr)
    return found


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    # In a hook, or `git rebase --exec`, they name the repository that git works on there, which is another one.
    own = {name: value for name, value in os.environ.items() if name not in _OF_A_REPOSITORY}
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=True, timeout=_GIT_SECONDS, env=own
    ).stdout.strip()


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"git took longer than {_GIT_SECONDS:g} s"
    said = error.stderr.strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
    return said[0] if said else str(error)


def _packed_version() -> dict[str, str]:
    try:
        from configs.common.files.reading import read_json_object  # needs pydantic, which an isolated build has not

        return read_json_object(ROOT / BUILT_FROM)
    except (ImportError, OSError, ValueError):
        return {}
