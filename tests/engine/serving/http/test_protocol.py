"""What never becomes a request: headers that do not come, or not to their end. And what a response may be made of."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from engine.serving.http.listening import listen
from engine.serving.http.protocol import ApiProtocol, chunk_writer


class QuickProtocol(ApiProtocol):
    header_seconds = 0.4


async def slow_app(scope: object, receive: object, send: object) -> None:
    """Answers after longer than headers may take."""
    await asyncio.sleep(0.8)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]


@contextmanager
def serving(application: Any) -> Iterator[int]:
    """Serve an application; yields the port."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(application, http=QuickProtocol, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(600)


@pytest.fixture
def port() -> Iterator[int]:
    with serving(slow_app) as found:
        yield found


def answer(client: socket.socket) -> bytes:
    """Everything until the server closes, or one whole answer."""
    found = b""
    while not found.endswith(b"ok") and (part := client.recv(4096)):
        found += part
    return found


def test_headers_that_are_not_ended_are_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        head, _, body = answer(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert "headers did not arrive" in json.loads(body)["error"]["message"]


def test_a_connection_without_a_request_is_closed(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        assert answer(client) == b""


def test_headers_that_come_byte_by_byte_are_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        deadline = time.monotonic() + 10
        try:
            while time.monotonic() < deadline:
                client.sendall(b"a")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() < deadline


def test_answers_may_take_longer_and_a_second_request_has_its_own_limit(port: int) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        for _ in range(2):
            client.sendall(request)
            assert answer(client).startswith(b"HTTP/1.1 200")
            time.sleep(0.6)  # a connection may rest between requests
        client.sendall(request[:10])
        assert answer(client).startswith(b"HTTP/1.1 408")


async def chunk_app(scope: Any, receive: object, send: Any) -> None:
    """Sends two parts as ASGI has it and one between them as chunks, where there are any."""
    writer = chunk_writer(scope)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one,", "more_body": True})
    if writer is None:
        await send({"type": "http.response.body", "body": b"without,", "more_body": True})
    else:
        assert writer.ready
        writer.write(b"two," * 100)
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_chunks_written_at_once_are_part_of_the_response(version: str) -> None:
    with serving(chunk_app) as port, socket.create_connection(("127.0.0.1", port), 10) as client:
        for _ in range(2 if version == "1.1" else 1):  # the connection may be used again
            client.sendall(f"GET / HTTP/{version}\r\nHost: x\r\n\r\n".encode())
            with http.client.HTTPResponse(client) as response:
                response.begin()
                body = response.read()
            assert body == b"one," + (b"two," * 100 if version == "1.1" else b"without,") + b"ok"
