"""When Python's garbage collector looks: not while modules are imported, and seldom among half a million objects.

    with imported_for_good("torch"):
        import torch                     # what is there at the end is never looked at again
    collect_seldom()                     # in a program that ends soon, or keeps most of what it makes

An import only adds objects that live as long as the process; the collector looks at all of them again and again, for an
eighth of the time that the import takes.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 50_000
"""Objects that may be garbage before the collector looks: at most some 10 MB. Python's own number is 700."""


@contextmanager
def imported_for_good(module: str) -> Iterator[None]:
    """Let the collector rest, and then leave alone all objects that exist at the end, also in children by fork(2).

    Does nothing where `module` was imported before: the process has computed since, and garbage that the collector has
    not found yet would stay for ever.
    """
    if module in sys.modules:
        yield
        return
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def collect_seldom() -> None:
    """Let the collector look after 50,000 new objects instead of 700. Not in a rank: what it keeps may hold tensors."""
    gc.set_threshold(_NEW_OBJECTS, 20, 100)
