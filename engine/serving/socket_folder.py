"""Where the Unix sockets between a server's HTTP process and its ranks lie: on the machine itself, by a short path.

A socket's path has at most 107 bytes (man 7 unix), and a folder that the nodes of a cluster share may take no sockets.
The folder's name follows from the server's, so that a server that is started again after a kill uses it again.
"""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

_PLACE = Path("/tmp")


def socket_folder(server: str) -> Path:
    """Return the folder for a server whose own folder is `server`."""
    digest = hashlib.sha256(os.path.realpath(server).encode()).hexdigest()[:16]
    # TMPDIR may be long, or on a shared disk; it counts in a container whose only writable folder it names.
    place = _PLACE if os.access(_PLACE, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return place / f"rankwise-{os.getuid()}-{digest}"


def make_private(folder: Path) -> None:
    """Make the folder, which nobody else may enter. Raises PermissionError: somebody else made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: belongs to another user or is open to others. Remove it")
