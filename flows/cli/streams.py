"""Standard streams of a command that was started without some of them, as by `rankwise run study.yaml <&-` or a daemon.

open_missing_streams()           # sys.stdin, stdout and stderr are files from here on
"""

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
