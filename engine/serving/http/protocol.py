"""uvicorn's HTTP protocol with what uvicorn lacks: refusals in the form of OpenAI's API for what is no HTTP and never
reaches the application, a limit for the time of a request's headers, and a way to send a piece of a stream that costs a
fraction of ASGI's `send`."""

import asyncio
import json
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.serving.http.errors import ApiError

_CHUNKS = "rankwise.chunks"
"""Of `scope["extensions"]`."""


class ChunkWriter:
    """Writes to a response in progress that has no length, in chunks (RFC 9112, section 7.1), without awaiting.

    writer = chunk_writer(scope)         # None: the client's HTTP has no chunks
    if writer.ready: writer.write(b"...")

    Everything given to ASGI's `send` must have been sent before.
    """

    def __init__(self, protocol: H11Protocol) -> None:
        self._protocol = protocol

    @property
    def ready(self) -> bool:
        """Whether the client reads fast enough, and is there."""
        protocol = self._protocol
        return not (protocol.flow.write_paused or protocol.transport.is_closing())

    def write(self, body: bytes) -> None:
        """Send bytes, of which there must be some."""
        assert body and self._protocol.conn.our_state is h11.SEND_BODY
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def chunk_writer(scope: Scope) -> ChunkWriter | None:
    """Return the writer for a request's response; None where the server or the client has none."""
    writer: ChunkWriter | None = scope.get("extensions", {}).get(_CHUNKS)
    return writer


class ApiProtocol(H11Protocol):
    """For `uvicorn.Config(http=ApiProtocol)`."""

    header_seconds = 15.0
    """From the connection, or the first byte of a later request on it, to the end of the headers."""
    _waits: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        application = self.app

        async def with_chunks(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
                scope["extensions"] = {**scope.get("extensions", {}), _CHUNKS: ChunkWriter(self)}
            await application(scope, receive, send)

        self.app = with_chunks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection."""
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._wait_no_more()
        elif self._waits is None and self.conn.trailing_data[0]:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._waits = self.loop.call_later(self.header_seconds, self._too_late)

    def _wait_no_more(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _too_late(self) -> None:
        self._waits = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the request's headers did not arrive within {self.header_seconds:.0f} s")
        else:
            self.transport.close()  # nothing was asked

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read as HTTP, and close the connection."""
        self._refuse(400, "the request is not valid HTTP/1.1, or its headers are too large")

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(ApiError(status, message).body)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(body.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
