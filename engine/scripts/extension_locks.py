"""Locks of torch's compiler cache: one that a killed compilation left makes every later script wait for it forever.

    held = held_by(pids)                    # before the processes are killed
    remove_locks(held)                      # afterwards
    remove_locks(abandoned(environment))    # before a script is started

torch.utils.cpp_extension compiles an operator (DeepSpeed's, for one) under a lock that is a file, created exclusively
and kept open by the process that compiles (torch 2.13, torch/utils/file_baton.py). A process that is killed leaves the
file, and nothing else tells whether anybody still compiles.
"""

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_NAME, _BUILD = "lock", "build.ninja"
_ABANDONED_SECONDS = 600.0
"""Age from which a lock that no process of this host holds is abandoned: another host may share the folder."""


def held_by(pids: Iterable[int]) -> set[Path]:
    """Locks of compilations that these processes hold."""
    return {path for pid in pids for path in _open_files(pid) if path.name == _NAME and _is_lock(path)}


def abandoned(environment: Mapping[str, str]) -> set[Path]:
    """Old locks in the cache that a script with this environment will use, which no process of this host holds."""
    now = time.time()
    old = set()
    for path in _cache(environment).glob(f"**/{_NAME}"):
        with suppress(OSError):
            if _is_lock(path) and now - path.stat().st_mtime > _ABANDONED_SECONDS:
                old.add(path.resolve())
    if not old:
        return set()
    return old - {path for pid in os.listdir("/proc") if pid.isdigit() for path in _open_files(int(pid))}


def remove_locks(paths: Iterable[Path]) -> None:
    """Remove locks; one that is gone already, or cannot be removed, is left."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _cache(environment: Mapping[str, str]) -> Path:
    """The folder that torch uses (torch.utils.cpp_extension.get_default_build_root)."""
    if told := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(told)
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path(environment.get("XDG_CACHE_HOME") or Path(home) / ".cache") / "torch_extensions"


def _is_lock(path: Path) -> bool:
    """Whether this is the lock of a compilation: an empty file beside what ninja is told, or alone."""
    with suppress(OSError):
        beside = {each.name for each in path.parent.iterdir()} - {_NAME}
        return (
            not path.is_symlink() and path.is_file() and path.stat().st_size == 0 and (_BUILD in beside or not beside)
        )
    return False


def _open_files(pid: int) -> set[Path]:
    found = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found.add(Path(os.readlink(entry.path)))
    return found
