"""File errors of commands that measure nothing.

guarded(lambda: plainly(work), ...)       # "plan/plan.json: Permission denied", not "completed measurements are kept"
"""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""A full disk or quota and a failing device: another path of the same disk would be no better."""


def plainly(work: Callable[[], int], kind: type[ValueError | OSError] = ValueError) -> int:
    """Run `work`. Raises `kind`, of one line, for an error of the system; BrokenPipeError passes unchanged.

    OSError, of one line, where the disk is full: commands whose ValueErrors are wrong arguments end with another code.
    """
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        told = OSError if error.errno in DISK_FAULTS else kind
        raise told(f"{where}{error.strerror or error}") from error


def guarded_alone(work: Callable[[], int], debug: bool) -> int:
    """Do as `flows.cli.run.guarded` does, with the standard library alone: for what may find packages broken."""
    try:
        return plainly(work)
    except KeyboardInterrupt as error:
        caught: BaseException = error
        said = "interrupted"
    except BrokenPipeError as error:
        caught, said = error, ""
        discard_output()
    except (OSError, ValueError) as error:
        caught, said = error, str(error)
    if said:
        print(said, file=sys.stderr)
    if debug:
        traceback.print_exception(caught)
    return 1


def discard_output() -> None:
    """Let standard output, whose reader or disk takes no more, end in the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def resolved(path: Path) -> Path:
    """Return the absolute path without links. A link that leads to itself stays, for the system to refuse by name.

    `Path.resolve` raises RuntimeError there before Python 3.13.
    """
    return Path(os.path.realpath(path))
