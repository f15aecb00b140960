"""Answers in progress on the HTTP side, and where their tokens come from.

answer = TokenQueue(wanted)
router.start(answer)                 # chooses a replica
async for tokens in answer: ...      # those that have come since; raises ApiError where the server fails
choice = GrowingChoice(index, 0, answer, AnswerText(tokenizer), time.perf_counter())
piece = choice.add(token)            # what may be sent of it now
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.serving.http.text import AnswerText, EchoedPrompt
from engine.serving.messages import NewToken, ScoredToken, WantedAnswer

_MOST_AT_ONCE = 64
"""Tokens: a client that did not read for long, and then does, holds up no other for longer than their events take."""


class TokenQueue:
    """One answer: a queue of its tokens. `cached_tokens`: of the prompt, found in the cache. `scores`: of the prompt.

    Whoever is slower than the ranks gets several tokens at once, and so less work for each.

    After a failure of the ranks it goes on where it was: the next token depends on the earlier ones alone.
    `direct` may be given a function that takes tokens at once and returns True, or returns False without having taken
    any; it is called where nothing waits to be read, so that the order is kept, and never with the last token.
    """

    def __init__(self, wanted: WantedAnswer) -> None:
        self._wanted = wanted
        self.key = wanted.key
        self.cached_tokens: int | None = None
        self.scores: tuple[ScoredToken, ...] = ()
        self.failures = 0
        self._tokens: list[int] = []
        self._unread: deque[NewToken] = deque()
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._reader_waits = False
        self.direct: Callable[[Sequence[NewToken]], bool] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._wanted.prompt)

    @property
    def wanted(self) -> WantedAnswer:
        """What is left to be answered."""
        return replace(self._wanted, done=tuple(self._tokens))

    def put(self, tokens: Sequence[NewToken]) -> None:
        """Add tokens that were chosen."""
        self._tokens += [one.token for one in tokens]
        if self._reader_waits and self.direct is not None and tokens[-1].reason is None:
            try:
                if self.direct(tokens):
                    return
            except Exception as error:  # whatever it is: it ends this answer, and no other
                self.fail(error)
                return
        self._unread += tokens
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the answer with an error, after the tokens that it has."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._reader_waits = False  # it has not run yet, but has something to read
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Sequence[NewToken]]:
        while True:
            if not self._unread:
                if self._error is not None:
                    raise self._error
                self._changed.clear()
                self._reader_waits = True
                try:
                    await self._changed.wait()
                finally:
                    self._reader_waits = False
                continue
            tokens = [self._unread.popleft() for _ in range(min(len(self._unread), _MOST_AT_ONCE))]
            yield tokens
            if tokens[-1].reason is not None:
                return


@dataclass
class GrowingChoice:
    """One answer to a prompt as it grows. index: among all of the request; choice: among those to the same prompt.

    start: characters of the prompt before it, where log-probabilities are wanted. echo: the prompt, where it belongs to
    the answer. only_echo: the token that is computed behind it does not.
    """

    index: int
    choice: int
    answer: TokenQueue
    text: AnswerText
    began: float
    last: float | None = None
    reason: str | None = None
    start: int = 0
    echo: EchoedPrompt | None = None
    only_echo: bool = False
    _begun: bool = False

    def add(self, token: NewToken) -> "ChoicePiece":
        """Add a token to the text; return what may be sent now."""
        offset = self.start + len(self.text.text)
        echo, self._begun = None if self._begun else self.echo, True
        if self.only_echo:
            self.reason = "length"
            return ChoicePiece(self, "", token, self.reason, offset, echo)
        # An end-of-text token has no text.
        text = "" if token.reason == "stop" else self.text.add(token.token)
        if self.text.stopped:
            self.reason = "stop"
        elif token.reason is not None:
            self.reason, text = token.reason, text + self.text.end()
            self.reason = "stop" if self.text.stopped else self.reason
        # Also without text, so that its time can be seen.
        return ChoicePiece(self, text, token, self.reason, offset, echo)


class ChoicePiece(NamedTuple):
    """What one token adds to a choice. reason: why the choice ends with it.

    offset: the place of the token's first character, counted from the beginning of the prompt. echo: the prompt, which
    comes before the first token.
    """

    choice: GrowingChoice
    text: str
    token: NewToken
    reason: str | None
    offset: int = 0
    echo: EchoedPrompt | None = None
