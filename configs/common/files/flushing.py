"""Files that are on disk before they get the name by which they are found: a crash of the machine must not tear them.

flush_file(path)
flush_all(folder)        # every file below it, and the entries of its folders
"""

import os
from pathlib import Path


def flush_file(path: Path) -> None:
    """Flush a file that somebody else has written, or the entries of a folder, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Flush every file below a folder, and the entries of its folders, but for its own. Raises OSError."""
    for path in folder.rglob("*"):
        flush_file(path)
