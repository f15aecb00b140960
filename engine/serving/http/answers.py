"""Answers in progress on the HTTP side, and where their tokens come from.

answer = TokenQueue(wanted)
router.start(answer)                 # chooses a replica
async for tokens in answer: ...      # all that have come since; raises ApiError where the server fails
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from engine.serving.http.errors import ApiError
from engine.serving.messages import NewToken, WantedAnswer


class TokenQueue:
    """One answer: a queue of its tokens. `cached_tokens`: of the prompt, found in the cache.

    Whoever is slower than the ranks gets several tokens at once, and so less work for each.

    After a failure of the ranks it goes on where it was: the next token depends on the earlier ones alone.
    """

    def __init__(self, wanted: WantedAnswer) -> None:
        self._wanted = wanted
        self.key = wanted.key
        self.cached_tokens: int | None = None
        self.failures = 0
        self._tokens: list[int] = []
        self._unread: list[NewToken] = []
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

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
        self._unread.append(token)
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End the answer with an error, after the tokens that it has."""
        self._error = error
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Sequence[NewToken]]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            tokens, self._unread = self._unread, []
            if tokens:
                yield tokens
                if tokens[-1].reason is not None:
                    return
            if self._error is not None:
                raise self._error
