"""Answers in progress on the HTTP side, and where their tokens come from.

answer = TokenQueue(wanted)
router.start(answer)                 # chooses a replica
async for token in answer: ...       # raises ApiError where the server fails
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from engine.serving.http.errors import ApiError
from engine.serving.messages import NewToken, WantedAnswer


class TokenQueue:
    """One answer: a queue of its tokens. `cached_tokens`: of the prompt, found in the cache.

    After a failure of the ranks it goes on where it was: the next token depends on the earlier ones alone.
    """

    def __init__(self, wanted: WantedAnswer) -> None:
        self._wanted = wanted
        self.key = wanted.key
        self.cached_tokens: int | None = None
        self.failures = 0
        self._tokens: list[int] = []
        self._queue: asyncio.Queue[NewToken | ApiError] = asyncio.Queue()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._wanted.prompt)

    @property
    def wanted(self) -> WantedAnswer:
        """What is left to be answered."""
        return replace(self._wanted, done=tuple(self._tokens))

    def put(self, token: NewToken) -> None:
        """Add a token that was chosen."""
        self._tokens.append(token.token)
        self._queue.put_nowait(token)

    def fail(self, error: ApiError) -> None:
        """End the answer with an error."""
        self._queue.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[NewToken]:
        while True:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            yield item
            if item.reason is not None:
                return
