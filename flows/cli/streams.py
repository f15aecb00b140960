"""Standard streams of a command that was started without some of them, as by `rankwise run study.yaml <&-` or a daemon,
or where they cannot hold every character.

open_missing_streams()           # sys.stdin, stdout and stderr are files from here on
print_every_character()          # \u2013 where the locale has no dash
"""

import io
import os
import sys


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
