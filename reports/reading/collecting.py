"""Python's collector of cycles beside millions of objects that hold none: the records of a large run.

with uncollected(): ...        # nothing is collected
with set_apart(): ...          # what is there now is not looked through again; what is made meanwhile is collected
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector, which would go through all that was read again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def set_apart() -> Iterator[None]:
    """With what is there now left out of collections, as for figures, which do hold cycles and are large."""
    if gc.get_freeze_count():  # within another one, or in a parent of forks
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
