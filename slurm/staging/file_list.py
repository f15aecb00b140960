"""The list of a folder's files that lies in it from when it was whole: disks are cleared of old files, one by one.

    write_list("/shared/rankwise/libraries/.1a2b.work")      # the last thing before it gets its name
    is_whole("/shared/rankwise/libraries/1a2b")              # False: some of them are gone

Python's standard library only: a part of the program that hosts run (`slurm.ssh.node_program`).
"""

import os
from collections.abc import Iterator

LIST = "files.txt"


def write_list(folder: str) -> None:
    """Name every file below a folder in it. Raises OSError."""
    with open(os.path.join(folder, LIST), "wb") as file:
        file.writelines(os.fsencode(name) + b"\n" for name in sorted(_files(folder)))


def is_whole(folder: str) -> bool:
    """Whether a folder has its list, and all that is on it; what was added to it, and what a file holds, counts not."""
    try:
        with open(os.path.join(folder, LIST), "rb") as file:
            listed = file.read().split(b"\n")
    except OSError:
        return False
    return {os.fsdecode(name) for name in listed if name} <= set(_files(folder))


def _files(folder: str) -> Iterator[str]:
    """Paths below the folder. Bytecode is left out: Python makes it anew. Asks for no file by itself, which is slow."""
    start = len(folder.rstrip("/")) + 1
    for place, folders, names in os.walk(folder.rstrip("/")):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.join(place, name)[start:] for name in names if (place, name) != (folder.rstrip("/"), LIST))
