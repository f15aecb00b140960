"""Errors of commands: a message and an exit code instead of a traceback.

guarded(lambda: plainly(work), ...)       # "plan/plan.json: Permission denied", not "completed measurements are kept"
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from flows.cli.streams import DISK_FAULTS, discard_output

ALL_COMPLETED, OTHER_ERROR, WRONG_STUDY, SOME_UNMEASURED = 0, 1, 2, 3
"""Exit codes."""
MAX_MESSAGE_CHARACTERS = 4000


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


def guarded(work: Callable[[], int], subject: Path, debug: bool, wrong_value: int = OTHER_ERROR) -> int:
    """Run a command and print a message instead of a traceback for errors that a user can correct.

    wrong_value: the exit code of a ValueError, for commands where it always means a wrong argument.
    """
    from configs.common.base import WrongArgument
    from configs.common.printable import printable_lines
    from configs.common.secrets import redacted
    from configs.spec.study import StudyError
    from flows.cli.console import plain_console
    from flows.expected import EXPECTED, sentence_of
    from flows.server.local import LocalServerError

    console = plain_console(stderr=True)
    try:
        return work()
    except StudyError as error:
        caught: BaseException = error
        for problem in error.problems:
            shown = problem if problem.startswith(str(subject)) else f"{subject}: {problem}"
            console.print(printable_lines(redacted(shown), MAX_MESSAGE_CHARACTERS))
        for line in error.more:
            console.print(redacted(line))
        count = error.num_problems
        console.print(f"{count} problem{'s' if count != 1 else ''}, nothing started")
        code = WRONG_STUDY
    except KeyboardInterrupt as error:
        caught = error
        console.print(f"interrupted{left_text()}")
        code = OTHER_ERROR
    except BrokenPipeError as error:
        caught = error  # the reader of the output has closed the pipe
        discard_output()
        code = OTHER_ERROR
    except (*EXPECTED, LocalServerError) as error:
        caught = error
        console.print(printable_lines(redacted(sentence_of(error, begun=_has_begun())), MAX_MESSAGE_CHARACTERS))
        wrong = WRONG_STUDY if isinstance(error, WrongArgument) else wrong_value
        code = wrong if isinstance(error, ValueError) else OTHER_ERROR
    if debug:
        console.print(redacted("".join(traceback.format_exception(caught))), end="")
    return code


def _has_begun() -> bool:
    """Whether a run has begun in this process, so that there may be measurements."""
    from tasks.campaign.progress import current_progress

    return bool(current_progress().study)


def left_text() -> str:
    """What an interrupted run leaves, after the word for it; nothing where none had begun."""
    from tasks.campaign.progress import current_progress

    left = current_progress().left_behind or "all launches ended"
    return f": {left}, completed measurements are kept" if _has_begun() else ""


def guarded_alone(work: Callable[[], int], debug: bool) -> int:
    """Do as `guarded` does, with the standard library alone: for what may find packages broken."""
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


def resolved(path: Path) -> Path:
    """Return the absolute path without links. A link that leads to itself stays, for the system to refuse by name.

    `Path.resolve` raises RuntimeError there before Python 3.13.
    """
    return Path(os.path.realpath(path))
