"""The event loop of all connections of this process, in a thread of its own.

wait_for(something(), seconds=8.0)        # run it there, and wait here
run_on_loop(something())                        # run it there
"""

import asyncio
import atexit
import concurrent.futures
import functools
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

_CLOSE_SECONDS = 2.0
_Result = TypeVar("_Result")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ssh", daemon=True).start()
    atexit.register(_close, loop)
    return loop


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """End what is still under way, so that connections are closed and nothing is told of unfinished tasks."""

    async def end_all() -> None:
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with suppress(Exception):
        asyncio.run_coroutine_threadsafe(end_all(), loop).result(_CLOSE_SECONDS)
    loop.call_soon_threadsafe(loop.stop)


def run_on_loop(work: Coroutine[Any, Any, _Result]) -> "concurrent.futures.Future[_Result]":
    """Run something on the loop; returns at once."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def wait_for(work: Coroutine[Any, Any, _Result], seconds: float | None = None) -> _Result:
    """Run something on the loop and return what it returns. Raises what it raises, and TimeoutError."""
    future = run_on_loop(work)
    try:
        return future.result(seconds)
    except BaseException:
        future.cancel()
        raise
