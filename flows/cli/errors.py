"""File errors of commands that measure nothing.

guarded(lambda: plainly(work), ...)       # "plan/plan.json: Permission denied", not "completed measurements are kept"
"""

from collections.abc import Callable


def plainly(work: Callable[[], int]) -> int:
    """Run `work`. Raises ValueError for a file that cannot be read or written; BrokenPipeError passes unchanged."""
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ValueError(f"{where}{error.strerror or error}") from error
