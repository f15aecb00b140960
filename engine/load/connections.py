"""HTTP/1.1 connections to one server over asyncio; arrival times are taken before anything is parsed.

    pool = ConnectionPool(endpoint, token)
    await pool.resolve()
    reply, sent = await pool.post(body, timeout_seconds=300, keep_text=False)
    pool.close()

A client of its own by measurement: httpx cannot send 500 requests/s on a slow machine, and aiohttp reads the clock
later, when its own reader is scheduled.
"""

import asyncio
import errno
import os
import socket
import ssl
from time import monotonic
from urllib.parse import urlsplit

from configs.load.job import Endpoint
from configs.load.samples import RequestOutcome
from engine.load.replies import Reply
from engine.load.responses import NotHttpError, ResponseReader

_CONNECT_SECONDS = 30.0
_FAILED_IN_A_ROW = 3
_PATH = "/v1/completions"
NO_CONNECTION = "no connection"
"""How the message of a request begins that got none."""
_OUT_OF_SOCKETS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
"""Errors of this machine, of which the server knows nothing."""


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answered = False
        self._lost = False
        self._reader: ResponseReader | None = None
        self._begun = False
        self._reply: Reply | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    @property
    def reusable(self) -> bool:
        return not self._lost and (self._reader is None or self._reader.reusable)

    def send(self, request: bytes, reply: Reply) -> asyncio.Future[None]:
        """Write a request; the future ends with the response or the connection."""
        assert self.transport is not None
        self._reader, self._reply = ResponseReader(), reply
        self.answered = self._begun = False
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        reader, reply = self._reader, self._reply
        if reader is None or reply is None:
            self.close()  # bytes that nobody asked for
            return
        self.answered = True
        try:
            body = reader.feed(data)
        except NotHttpError as error:
            reply.fail(RequestOutcome.MALFORMED, f"not HTTP/1.1: {error}")
            self._finish()
            self.close()
            return
        self._take(reader, reply, body, now)

    def _take(self, reader: ResponseReader, reply: Reply, body: bytes, now: float) -> None:
        if reader.status is not None and not self._begun:
            self._begun = True
            reply.begin(reader.status, reader.header(b"content-type").decode("latin-1"))
            coding = reader.header(b"content-encoding").decode("latin-1")
            if reader.status == 200 and coding.lower() not in ("", "identity"):
                reply.fail(RequestOutcome.MALFORMED, f"content-encoding: got {coding}, though identity was asked for")
        if body:
            reply.receive(body, now)
        if reader.ended:
            reply.end()
            self._finish()
        elif reply.outcome is not None:  # an error in the middle of a stream
            self._finish()
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        reader, reply = self._reader, self._reply
        if reader is None or reply is None:
            return
        reader.end_of_connection()
        self._take(reader, reply, b"", monotonic())
        reply.fail(RequestOutcome.CONNECTION, f"connection lost: {error or 'closed by the server'}")
        self._finish()

    def _finish(self) -> None:
        waiter, self._waiter, self._reply = self._waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def interrupt(self) -> None:
        """End the request in flight, if there is one, as what it is: the server did not close."""
        if self._reply is not None:
            self._reply.fail(RequestOutcome.CONNECTION, "interrupted")
        self.close()

    def close(self) -> None:
        self._lost = True
        if self.transport is not None:
            self.transport.abort()


class ConnectionPool:
    """Idle connections are used again, the last one first; there are as many as requests in flight."""

    def __init__(self, endpoint: Endpoint, token: str | None) -> None:
        parts = urlsplit(endpoint.url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        lines = [
            f"POST {parts.path}{_PATH} HTTP/1.1",
            f"host: {parts.netloc}",
            "content-type: application/json",
            "accept: text/event-stream",
            "accept-encoding: identity",
        ]
        if token is not None:
            lines.append(f"authorization: Bearer {token}")
        self._head = "\r\n".join(lines).encode("ascii")
        self._addresses: list[str] = []
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Timeout] = set()
        self._closed: str | None = None
        self.connections = 0

    async def resolve(self) -> None:
        """Resolve the host once, so that no request waits for it. Raises OSError naming the host."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(f"{self._host}: {error.strerror or error}") from error
        self._addresses = [str(each[4][0]) for each in found]

    async def post(self, body: bytes, timeout_seconds: float, keep_text: bool) -> tuple[Reply, float | None]:
        """Send a request and await its response; when its last byte was written, None where it never was.

        A connection that the server closed while it was idle is replaced once, since the request was not answered.
        """
        reply, sent = Reply(keep_text), None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        request = b"%s\r\ncontent-length: %d\r\n\r\n%s" % (self._head, len(body), body)
        for used_again in (True, False):
            try:
                connection, idle = await self._connection(used_again, deadline)
            except OSError as error:
                kind, what = RequestOutcome.CONNECTION, NO_CONNECTION
                if error.errno in _OUT_OF_SOCKETS:
                    kind, what = RequestOutcome.DROPPED, "not sent"
                reply.fail(kind, f"{what}: {error.strerror or error}")
                return reply, sent
            waiter = connection.send(request, reply)
            sent = monotonic()
            timer = loop.call_at(deadline, self._time_out, connection, reply, timeout_seconds)
            try:
                await waiter
            finally:
                timer.cancel()
                self._give_back(connection)
            if not (idle and reply.outcome == RequestOutcome.CONNECTION and not connection.answered):
                break
            reply = Reply(keep_text)
        return reply, sent

    async def _connection(self, used_again: bool, deadline: float) -> tuple[_Connection, bool]:
        """A connection, and whether it was idle before. Raises OSError, also once the pool is closed."""
        if self._closed is not None:
            raise OSError(self._closed)
        while used_again and self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
            self._open.discard(connection)  # the server has closed it meanwhile
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        problem: OSError | None = None
        for address in self._addresses[:_FAILED_IN_A_ROW]:
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + _CONNECT_SECONDS)) as limit:
                    self._connecting.add(limit)
                    try:
                        _, connection = await loop.create_connection(
                            _Connection, address, self._port, ssl=self._tls, server_hostname=name
                        )
                    finally:
                        self._connecting.discard(limit)
            except TimeoutError:
                if self._closed is not None:
                    raise OSError(self._closed) from None
                problem = OSError("the server did not accept it in time")
            except OSError as error:
                problem = error
                if error.errno and str(error.strerror).startswith("Connect call failed"):  # asyncio's, without a reason
                    problem = OSError(error.errno, os.strerror(error.errno))
            else:
                self.connections += 1
                self._open.add(connection)
                return connection, False
        raise problem or OSError(f"{self._host}: no address")

    def _give_back(self, connection: _Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
            self._open.discard(connection)

    @staticmethod
    def _time_out(connection: _Connection, reply: Reply, seconds: float) -> None:
        reply.fail(RequestOutcome.TIMEOUT, f"no complete answer within {seconds:g} s")
        connection.close()

    def close(self, why: str = "interrupted") -> None:
        """Close all connections; requests in flight end with Outcome.CONNECTION, and no others begin.

        why: of those that had no connection yet.
        """
        self._closed = why
        for limit in self._connecting:
            limit.reschedule(asyncio.get_running_loop().time())
        for connection in [*self._open]:
            connection.interrupt()
        self._open.clear()
