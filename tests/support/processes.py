"""Processes of this machine, found by what they were started with."""

from pathlib import Path

import psutil


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those whose command line names the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
