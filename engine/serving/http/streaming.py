"""A streamed response: events of an answer as it grows, sent until its end or its client's.

return EventStream(events(...), ended)          # an ASGI response of server-sent events

Starlette's StreamingResponse does the same in a task group; this is a third of its work for each event. Where the
server has a ChunkWriter, an event needs no task at all.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress

from fastapi import Response
from starlette.types import Receive, Scope, Send

from engine.serving.http.answers import ChoicePiece, GrowingChoice
from engine.serving.http.endpoints import Generation
from engine.serving.http.errors import ApiError
from engine.serving.http.protocol import ChunkWriter
from engine.serving.http.responses import ResponseForm, answered, event_bytes, usage_of
from engine.serving.http.schema import StreamOptions
from engine.serving.messages import NewToken


class EventStream(Response):
    """Sends what `source` yields until its end or until the client goes away; calls `ended` in any case."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], ended: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._source, self._ended = source, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not sending.cancelled():  # the source's time limit ends a send that waits
                sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
            await self._source.aclose()
            self._ended()  # also where the source was never begun

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._source:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Events:
    """The events of a request's answers (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    def __init__(self, form: ResponseForm, choices: Sequence[GrowingChoice], options: StreamOptions | None) -> None:
        self._form, self._choices = form, choices
        self._with_usage = options is not None and options.include_usage
        self._always = self._with_usage and options is not None and bool(options.continuous_usage_stats)
        self._generated = 0

    def opening(self) -> Iterator[bytes]:
        for choice in self._choices:
            opening = self._form.opening(choice)
            if opening is not None:
                yield event_bytes(opening | ({"usage": usage_of(self._choices, 0)} if self._always else {}))

    def of(self, piece: ChoicePiece) -> bytes:
        self._generated += len(answered([piece]))
        if self._always:
            return event_bytes(self._form.event(piece) | {"usage": usage_of(self._choices, self._generated)})
        return self._form.encoded(piece)

    def ending(self) -> bytes:
        usage = event_bytes(self._form.usage_event(self._choices, self._generated)) if self._with_usage else b""
        return usage + b"data: [DONE]\n\n"


async def events(
    service: Generation,
    form: ResponseForm,
    choices: Sequence[GrowingChoice],
    options: StreamOptions | None,
    refused: Callable[[int], None],
    writer: ChunkWriter | None,
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events. Those of tokens that have come together are one piece of bytes.

    With a writer, events may be sent through it while the next piece is awaited.
    """
    made = _Events(form, choices, options)
    source = service.pieces(choices)
    try:
        if opening := b"".join(made.opening()):
            yield opening
        if writer is not None and len(choices) == 1 and not choices[0].text.stops and choices[0].echo is None:
            _send_directly(service, choices[0], made, writer)
        growing = len(choices)
        async for pieces in source:
            growing -= pieces[-1].reason is not None  # of one choice, which may not be the last that has ended
            if pieces[0].choice.answer.scores and pieces[0].echo is not None:  # thousands of tokens, perhaps
                data = b"".join(await asyncio.to_thread(list, map(made.of, pieces)))
            else:
                data = b"".join(map(made.of, pieces))
            yield data if growing else data + made.ending()
    except ApiError as error:
        refused(error.status)
        yield event_bytes(error.body)
    finally:
        with suppress(RuntimeError):
            await source.aclose()


def _send_directly(service: Generation, choice: GrowingChoice, made: _Events, writer: ChunkWriter) -> None:
    """Let the tokens of an answer without stop strings become events when the ranks report them."""

    def send(tokens: Sequence[NewToken]) -> bool:
        if not writer.ready:
            return False
        pieces = [choice.add(token) for token in tokens]
        service.note(choice, len(pieces))
        writer.write(b"".join(map(made.of, pieces)))
        return True

    choice.answer.direct = send
