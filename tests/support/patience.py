"""How long tests wait for what ought to come soon.

Such a bound measures nothing: it ends a test that would hang. Tests name what is enough on a quiet machine; one that
others keep busy, or on which a second suite runs, has some times as long.
"""

import time
from collections.abc import Callable

_TIMES = 5.0


def patient(seconds: float) -> float:
    """Return how long to wait for what takes at most so long on a quiet machine."""
    return _TIMES * seconds


def wait_for(condition: Callable[[], object], what: str, seconds: float, pause: float = 0.05) -> float:
    """Return the seconds until the condition held. Raises AssertionError naming it where it never does."""
    began = time.monotonic()
    while not condition():
        assert (waited := time.monotonic() - began) < patient(seconds), f"waited {waited:.0f} s in vain for: {what}"
        time.sleep(pause)
    return time.monotonic() - began
