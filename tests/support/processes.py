"""Processes of this machine, found by what they were started with; any of them may end while it is looked at."""

from contextlib import suppress
from pathlib import Path

import psutil


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those whose command line names the folder."""
    return [process for process in psutil.process_iter() if str(folder) in command_line(process)]


def command_line(process: psutil.Process) -> str:
    """What it was started with; nothing of one that has ended or may not be read."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; a zombie has."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
