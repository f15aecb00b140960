"""An event loop whose timers fire within a fraction of a millisecond.

`epoll_wait` takes whole milliseconds, and Python rounds them up (PEP 475 and bpo-20320): asyncio's timers are half a
millisecond late on average. `select` takes microseconds and can wait for the epoll descriptor itself.
"""

import asyncio
import select
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class PreciseSelector(selectors.EpollSelector):
    """An epoll selector with time-outs of microseconds."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def run_precisely(work: Coroutine[Any, Any, _Result]) -> _Result:
    """As `asyncio.run`, on a loop with precise timers."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(PreciseSelector())) as runner:
        return runner.run(work)
