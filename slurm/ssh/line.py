"""Requests to a host's program and its answers, over one connection (`slurm.ssh.connection` makes it).

    line = Line([connection], process)
    answer, body = await line.answered("look", b"", {"jobs": []}, limit_seconds=30.0)

A slow connection is not a dead one: the time in which bytes come or go counts to no limit, however many there are.
"""

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncssh

_MOVED_BYTES = 64 << 10
Answer = tuple[dict[str, Any], bytes]


class Line:
    """One connection. Used on the loop that it was made on."""

    def __init__(
        self, connections: "Sequence[asyncssh.SSHClientConnection]", process: "asyncssh.SSHClientProcess[bytes]"
    ) -> None:
        self._connections, self._process = connections, process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._writing = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()
        self._carried_seconds = 0.0
        """How long bytes of requests and answers were coming and going so far."""
        self.closed = False
        self._reading = asyncio.create_task(self._read())

    async def answered(
        self, operation: str, body: bytes, arguments: dict[str, Any], limit_seconds: float | None
    ) -> Answer:
        """One request and its answer. Raises TimeoutError where none comes while the line is idle, and as `ask`."""
        loop = asyncio.get_running_loop()
        began, carried_seconds = loop.time(), self._carried_seconds
        asked = asyncio.create_task(self.ask(operation, body, arguments))
        try:
            while not asked.done():
                left = None
                if limit_seconds is not None:
                    left = began + limit_seconds + self._carried_seconds - carried_seconds - loop.time()
                    if left <= 0:
                        raise TimeoutError
                await asyncio.wait([asked], timeout=left)
            return asked.result()
        finally:
            asked.cancel()

    async def ask(self, operation: str, body: bytes, arguments: dict[str, Any]) -> Answer:
        """One request and its answer. Raises OSError where the connection is lost meanwhile."""
        if self.closed:
            raise ConnectionError("the connection is lost")
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        line = json.dumps({"id": number, "op": operation, "body_bytes": len(body), **arguments}).encode() + b"\n"
        try:
            sending = asyncio.create_task(self._send(number, line + body))
            self._sending.add(sending)
            sending.add_done_callback(self._sent)
            # Once begun a request is sent to its end, wanted or not: the next one would be taken for the rest of it.
            await asyncio.shield(sending)
            return await answer
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # looked at, also where sending failed first

    async def _send(self, number: int, request: bytes) -> None:
        async with self._writing:
            if number not in self._waiting:
                return
            since = asyncio.get_running_loop().time()
            for start in range(0, len(request), _MOVED_BYTES):
                self._process.stdin.write(request[start : start + _MOVED_BYTES])
                await self._process.stdin.drain()
                since = self._carried(since)

    def _sent(self, sending: "asyncio.Task[None]") -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # looked at, also where nobody waits for it

    async def _read(self) -> None:
        import asyncssh

        try:
            while told := await self._process.stdout.readline():
                said = json.loads(told)
                number, size = said.pop("id"), said.pop("body_bytes")
                body = await self._body(size)
                if number in self._waiting and not self._waiting[number].done():
                    self._waiting[number].set_result((said, body))
        except (OSError, ValueError, KeyError, asyncio.IncompleteReadError, asyncssh.Error):
            pass
        finally:
            self.closed = True
            self._abort()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the connection is lost"))

    async def _body(self, size: int) -> bytes:
        content, since = bytearray(), asyncio.get_running_loop().time()
        while len(content) < size:
            piece = await self._process.stdout.read(min(size - len(content), _MOVED_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(bytes(content), size)
            content += piece
            since = self._carried(since)
        return bytes(content)

    def _carried(self, since: float) -> float:
        """Count the time until now as one in which bytes moved."""
        now = asyncio.get_running_loop().time()
        self._carried_seconds += now - since
        return now

    def close(self) -> None:
        """End the connection; jobs go on."""
        self.closed = True
        self._reading.cancel()
        self._abort()

    def _abort(self) -> None:
        for connection in self._connections:
            connection.abort()
