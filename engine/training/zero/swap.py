"""A rank's folder for weights and optimizer states that ZeRO offloads to NVMe, in the node's cache.

    swap = SwapFolder(context)
    ...                                     # files in swap.path
    swap.close()

A killed rank cannot remove its files, and they are as large as the model's state. The next one on this machine does:
each rank holds a lock beside its folder, which the kernel releases when the process ends. Machines that share a cache
have folders of their own, because not every network file system shares locks.
"""

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import IO

from configs.common.system.lock_files import locks_needed
from engine.context import Context

_LOCK = ".lock"


class SwapFolder:
    """An empty folder of this process, `path`; those of ended processes of this machine are removed.

    Raises ValueError where the cache's file system has no locks.
    """

    def __init__(self, context: Context) -> None:
        folders = Path(context.job.cache) / "swap" / socket.gethostname()
        folders.mkdir(parents=True, exist_ok=True)
        for lock in folders.glob(f"*{_LOCK}"):
            _remove_if_ended(lock)
        name = f"{context.job.name}-rank{context.rank}-{os.getpid()}"
        self.path, self._lock = folders / name, folders / f"{name}{_LOCK}"
        self._lock.unlink(missing_ok=True)  # of a measurement of this process that failed
        with locks_needed(folders, "have the cache on another one (RANKWISE_CACHE; of a cluster its `shared`)"):
            self._held = _held(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.unlink(missing_ok=True)
        self._held.close()


def _held(lock: Path) -> IO[bytes]:
    """A new lock, held until it is closed. Another rank may take it for an ended one's before it is held."""
    while True:
        file = lock.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):  # removed meanwhile
                if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _remove_if_ended(lock: Path) -> None:
    """Remove the folder beside a lock that no process holds."""
    with suppress(OSError), lock.open("wb") as file:  # OSError: it is held, or another user's
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.with_name(lock.name.removesuffix(_LOCK)), ignore_errors=True)
        lock.unlink()
