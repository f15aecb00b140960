"""Connections to a server: what becomes of requests when the pool is closed, and when this machine has no sockets."""

import asyncio
import errno
import gzip
import os
from typing import Any

import pytest

from configs.load.job import Endpoint
from configs.load.samples import RequestOutcome
from engine.load.connections import ConnectionPool
from engine.load.replies import Reply

_ANSWER = b'data: {"choices": [{"text": " a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(_ANSWER)


@pytest.mark.parametrize(("begins", "message"), [(False, "no connection: interrupted"), (True, "interrupted")])
def test_a_pool_that_is_closed_sends_no_request_again(begins: bool, message: str) -> None:
    """The server answers one request, and then none, on whichever connection; or it only begins to."""
    connections = 0

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections == 1:
            writer.write(_HEAD + _ANSWER)
            await reader.readuntil(b"\r\n\r\n")
            if begins:
                writer.write(_HEAD)
        await reader.read()
        writer.close()

    async def scenario() -> tuple[Reply, Reply]:
        server = await asyncio.start_server(answer_one, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(Endpoint(url=f"http://127.0.0.1:{port}", model="m"), None)
        await pool.resolve()
        first, _ = await pool.post(b"", 60.0, False)
        waiting = asyncio.create_task(pool.post(b"", 60.0, False))
        await asyncio.sleep(0.05)
        pool.close()
        second, _ = await asyncio.wait_for(waiting, 300)
        server.close()
        return first, second

    first, second = asyncio.run(scenario())
    assert first.outcome == RequestOutcome.COMPLETED
    assert second.outcome == RequestOutcome.CONNECTION and connections == 1
    assert second.message == message


def test_connections_that_a_server_closes_while_they_are_idle_are_forgotten() -> None:
    """As servers do after some seconds: a run of days would keep each of them."""

    async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_HEAD + _ANSWER)
        await writer.drain()
        writer.close()

    async def scenario() -> tuple[set[RequestOutcome | None], int, int]:
        server = await asyncio.start_server(answer_and_close, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(Endpoint(url=f"http://127.0.0.1:{port}", model="m"), None)
        await pool.resolve()
        outcomes = set()
        for _ in range(20):
            reply, _ = await pool.post(b"", 60.0, False)
            outcomes.add(reply.outcome)
            while any(connection.reusable for connection in pool._idle):
                await asyncio.sleep(0.001)
        kept = len(pool._open)
        pool.close()
        server.close()
        return outcomes, pool.connections, kept

    outcomes, made, kept = asyncio.run(scenario())
    assert outcomes == {RequestOutcome.COMPLETED} and made == 20 and kept <= 1


@pytest.mark.parametrize(
    ("number", "outcome", "message"),
    [
        (errno.EMFILE, RequestOutcome.DROPPED, "not sent: Too many open files"),
        (errno.ECONNREFUSED, RequestOutcome.CONNECTION, "no connection: Connection refused"),
        (None, RequestOutcome.CONNECTION, "no connection: interrupted"),
    ],
)
def test_what_this_machine_lacks_is_not_the_servers_fault(
    number: int | None, outcome: RequestOutcome, message: str
) -> None:
    """None: the server does not accept, until the pool is closed."""

    async def connect(*arguments: Any, **options: Any) -> Any:
        if number is not None:
            raise OSError(number, os.strerror(number))
        await asyncio.Event().wait()

    async def scenario() -> Reply:
        pool = ConnectionPool(Endpoint(url="http://127.0.0.1:9", model="m"), None)
        await pool.resolve()
        asyncio.get_running_loop().create_connection = connect  # type: ignore[method-assign]
        waiting = asyncio.create_task(pool.post(b"", 60.0, False))
        await asyncio.sleep(0.01)
        if number is None:
            pool.close()
        return (await asyncio.wait_for(waiting, 300))[0]

    reply = asyncio.run(scenario())
    assert (reply.outcome, reply.message) == (outcome, message)


def test_a_compressed_answer_is_named() -> None:
    """A proxy compresses though it is asked not to: its stream was said to end before the answer did."""
    body = gzip.compress(_ANSWER)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"

    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await reader.read()
        writer.close()
        closed.set()

    async def scenario() -> Reply:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pool = ConnectionPool(Endpoint(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", model="m"), None)
        await pool.resolve()
        reply, _ = await pool.post(b"", 60.0, False)
        pool.close()
        await closed.wait()
        server.close()
        await asyncio.sleep(0)  # the transport's own end
        return reply

    reply = asyncio.run(scenario())
    assert (reply.outcome, reply.http_status) == (RequestOutcome.MALFORMED, 200)
    assert reply.message == "content-encoding: got gzip, though identity was asked for"
