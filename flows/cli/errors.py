"""File errors of commands that measure nothing.

guarded(lambda: plainly(work), ...)       # "plan/plan.json: Permission denied", not "completed measurements are kept"
"""

from collections.abc import Callable


def plainly(work: Callable[[], int], kind: type[ValueError | OSError] = ValueError) -> int:
    """Run `work`. Raises `kind`, of one line, for an error of the system; BrokenPipeError passes unchanged."""
    try:
        return work()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise kind(f"{where}{error.strerror or error}") from error
