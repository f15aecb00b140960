"""Errors of the machine in words that suit a command which runs nothing.

guarded(lambda: plainly(work), ...)       # "plan/plan.json: Permission denied", not "what was measured is kept"
"""

from collections.abc import Callable


def plainly(work: Callable[[], int]) -> int:
    """Do it. Raises ValueError for a file that cannot be read or written; a reader that went away stays what it is."""
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ValueError(f"{where}{error.strerror or error}") from error
