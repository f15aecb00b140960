"""Answers in progress on the HTTP side, and where their tokens come from.

answer = Answer(wanted)
router.start(answer)                 # chooses a replica
async for token in answer: ...       # raises ApiError where the server fails
"""

import asyncio
from collections.abc import AsyncIterator

from engine.serving.http.errors import ApiError
from engine.serving.messages import NewToken, WantedAnswer


class Answer:
    """One answer: a queue of its tokens. `cached_tokens`: of the prompt, found in the cache."""

    def __init__(self, wanted: WantedAnswer) -> None:
        self.wanted = wanted
        self.cached_tokens = 0
        self.delivered = 0
        self._queue: asyncio.Queue[NewToken | ApiError] = asyncio.Queue()

    def put(self, token: NewToken) -> None:
        """Add a token that was chosen."""
        self._queue.put_nowait(token)

    def fail(self, error: ApiError) -> None:
        """End the answer with an error."""
        self._queue.put_nowait(error)

    def forget(self) -> None:
        """Drop tokens that nobody has taken, before the request is tried again."""
        while not self._queue.empty():
            self._queue.get_nowait()

    async def __aiter__(self) -> AsyncIterator[NewToken]:
        while True:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            self.delivered += 1
            yield item
            if item.reason is not None:
                return
