"""HTTP/1.1 connections to one server over asyncio, parsed by h11; arrival times are taken before anything is parsed.

    pool = ConnectionPool(endpoint, token)
    await pool.resolve()
    reply, sent = await pool.post(body, timeout_seconds=300, keep_text=False)
    pool.close()

Chosen by measurement (docs/measurements/load.md): httpx cannot send 500 requests/s here; aiohttp takes as much CPU time
as this and reads the clock later, when its own reader is scheduled.
"""

import asyncio
import socket
import ssl
from time import monotonic
from urllib.parse import urlsplit

import h11

from configs.load.job import Endpoint
from configs.load.samples import Outcome
from engine.load.replies import Reply

_CONNECT_SECONDS = 30.0
_FAILED_IN_A_ROW = 3
_PATH = "/v1/completions"


class _Connection(asyncio.Protocol):
    """One connection; at most one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self.answered = False
        self._http = h11.Connection(h11.CLIENT)
        self._reply: Reply | None = None
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    @property
    def reusable(self) -> bool:
        return not self.lost and self._http.our_state is h11.IDLE

    def send(self, head: h11.Request, body: bytes, reply: Reply) -> asyncio.Future[None]:
        """Write a request; the future ends with the response or the connection."""
        assert self.transport is not None
        self._reply, self.answered = reply, False
        self._waiter = asyncio.get_running_loop().create_future()
        pieces = (self._http.send(head), self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage()))
        self.transport.write(b"".join(piece for piece in pieces if piece))
        return self._waiter

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        reply = self._reply
        if reply is None:
            self.close()  # bytes that nobody asked for
            return
        self.answered = True
        try:
            self._http.receive_data(data)
            self._take_events(reply, now)
        except h11.RemoteProtocolError as error:
            reply.fail(Outcome.MALFORMED, f"not HTTP/1.1: {error}")
            self._finish()
            self.close()

    def _take_events(self, reply: Reply, now: float) -> None:
        pieces: list[bytes] = []
        ended = False
        while not ended:
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.Response):
                kinds = [value for name, value in event.headers if name == b"content-type"]
                reply.begin(event.status_code, kinds[0].decode("latin-1") if kinds else "")
            elif isinstance(event, h11.EndOfMessage):
                ended = True
            elif not isinstance(event, h11.InformationalResponse):  # nothing more to read, or the connection's end
                break
        if pieces:
            reply.receive(b"".join(pieces), now)
        if ended:
            reply.end()
            if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                self._http.start_next_cycle()
            self._finish()
        elif reply.outcome is not None and self._waiter is not None:  # an error in the middle of a stream
            self._finish()
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        reply = self._reply
        if reply is not None and self._waiter is not None:
            try:  # a response without a length ends with its connection
                self._http.receive_data(b"")
                self._take_events(reply, monotonic())
            except h11.RemoteProtocolError:
                pass
            reply.fail(Outcome.CONNECTION, f"connection lost: {error or 'closed by the server'}")
            self._finish()

    def _finish(self) -> None:
        waiter, self._waiter, self._reply = self._waiter, None, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        self.lost = True
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
        self._target = f"{parts.path}{_PATH}"
        self._headers = [
            ("host", parts.netloc),
            ("content-type", "application/json"),
            ("accept", "text/event-stream"),
            ("accept-encoding", "identity"),
        ]
        if token is not None:
            self._headers.append(("authorization", f"Bearer {token}"))
        self._addresses: list[str] = []
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
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
        head = h11.Request(
            method="POST", target=self._target, headers=[*self._headers, ("content-length", str(len(body)))]
        )
        for used_again in (True, False):
            try:
                connection, idle = await self._connection(used_again, deadline)
            except OSError as error:
                reply.fail(Outcome.CONNECTION, f"no connection: {error.strerror or error}")
                return reply, sent
            waiter = connection.send(head, body, reply)
            sent = monotonic()
            timer = loop.call_at(deadline, self._time_out, connection, reply, timeout_seconds)
            try:
                await waiter
            finally:
                timer.cancel()
                self._give_back(connection)
            if not (idle and reply.outcome == Outcome.CONNECTION and not connection.answered):
                break
            reply = Reply(keep_text)
        return reply, sent

    async def _connection(self, used_again: bool, deadline: float) -> tuple[_Connection, bool]:
        """A connection, and whether it was idle before. Raises OSError."""
        while used_again and self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
        loop = asyncio.get_running_loop()
        name = self._host if self._tls else None
        problem: OSError | None = None
        for address in self._addresses[:_FAILED_IN_A_ROW]:
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + _CONNECT_SECONDS)):
                    _, connection = await loop.create_connection(
                        _Connection, address, self._port, ssl=self._tls, server_hostname=name
                    )
            except TimeoutError:
                problem = OSError("the server did not accept it in time")
            except OSError as error:
                problem = error
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
        reply.fail(Outcome.TIMEOUT, f"no complete answer within {seconds:g} s")
        connection.close()

    def close(self) -> None:
        """Close all connections; requests in flight end with Outcome.CONNECTION."""
        for connection in [*self._open]:
            connection.close()
        self._open.clear()
