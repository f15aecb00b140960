"""Standard streams of a command that was started without some of them, as by `rankwise run study.yaml <&-` or a daemon,
or where they cannot hold every character or take no more.

open_missing_streams()           # sys.stdin, stdout and stderr are files from here on
print_every_character()          # \u2013 where the locale has no dash
with whole_output():             # a full disk is told
    work()
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""A full disk or quota and a failing device: another path of the same disk would be no better."""


def open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed, which Python has as None.

    The next file or socket would get its number else, and with it what children print, or what is read as their input.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)
        if opened == number:
            os.set_inheritable(opened, True)
        setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8"))


def print_every_character() -> None:
    """Print as an escape what the encoding of standard output lacks (Latin-1, ASCII), instead of an error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def whole_output() -> Iterator[None]:
    """Write out what standard output still buffers when the block ends; exit code 1 where that fails.

    Left to the interpreter, a full disk behind `> FILE` is a message in its own words and exit code 120. A reader that
    has gone (`| true`) is no news to anybody.
    """
    try:
        yield
    except OSError as error:
        # Without a buffer (PYTHONUNBUFFERED, as in most containers) it is the printing itself that fails.
        if error.errno not in DISK_FAULTS:
            raise
        discard_output()
        print(error.strerror, file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            discard_output()  # which is flushed once more at exit
            if not isinstance(error, BrokenPipeError):
                print(f"standard output: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None


def discard_output() -> None:
    """Let standard output, whose reader or disk takes no more, end in the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
