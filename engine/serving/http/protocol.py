"""uvicorn's HTTP protocol, whose own refusals have the form of OpenAI's API too: what is no HTTP never reaches the
application. uvicorn has no limit for the time of a request's headers; this one has."""

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.serving.http.errors import ApiError


class ApiProtocol(H11Protocol):
    """For `uvicorn.Config(http=ApiProtocol)`."""

    header_seconds = 15.0
    """From the connection, or the first byte of a later request on it, to the end of the headers."""
    _waits: asyncio.TimerHandle | None = None

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
