"""Half-made folders that a killed process left behind: found by their names and ages, and removed.

remove_abandoned(cache / "onnx", re.compile(r"\\.export-\\w{8}"))
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ABANDONED_SECONDS = 86_400.0
"""Whoever fills a folder writes more often; file systems without locks tell nothing else of it."""


def remove_abandoned(parent: Path, names: re.Pattern[str]) -> None:
    """Remove folders of this user whose whole name matches, in which nothing was changed for a day. Raises nothing.

    Changes are those of the inodes (ctime): times of copied and unpacked files may be those of their sources.
    """
    oldest = time.time() - ABANDONED_SECONDS
    with suppress(OSError):
        with os.scandir(parent) as found:
            entries = list(found)
        for entry in entries:
            with suppress(OSError):
                if names.fullmatch(entry.name) is None or not entry.is_dir(follow_symlinks=False):
                    continue
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and _is_older(Path(entry.path), oldest):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_older(folder: Path, than: float) -> bool:
    """Whether neither the folder nor anything in it was changed since. Raises OSError where it changes now."""
    return all(path.lstat().st_ctime < than for path in _all_of(folder))


def _all_of(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")
