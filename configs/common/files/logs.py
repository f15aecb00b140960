"""Logs of processes that run for weeks: their end is kept, so that they fill no disk.

cut_log(folder / "server.log")          # now and then, while others write to it
"""

import os
from contextlib import suppress
from pathlib import Path

from configs.common.files.reading import MIB, open_regular

LOG_BYTES = 16 * MIB
"""A log that is larger is cut."""
KEPT_BYTES = MIB
"""Of its end."""


def cut_log(path: Path) -> None:
    """Leave the end of a log that is too large. Its writers must append (O_APPEND): they go on behind what is left.

    What they write in that very moment is lost. A log that is missing, or cannot be cut, stays as it is.
    """
    with suppress(OSError, ValueError):
        if path.stat().st_size <= LOG_BYTES:
            return
        with open_regular(path) as file:
            file.seek(-KEPT_BYTES, os.SEEK_END)
            end = file.read(KEPT_BYTES)
        os.truncate(path, 0)
        with path.open("ab", buffering=0) as log:
            log.write(end.partition(b"\n")[2] or end)
