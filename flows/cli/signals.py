"""Signals of commands in the foreground.

with sigterm_as_interrupt():
    work()                   # KeyboardInterrupt on SIGTERM too
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on Ctrl-C; also in a script's background, where SIGINT is ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
