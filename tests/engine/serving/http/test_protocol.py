"""What never becomes a request: headers that do not come, or not to their end."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from engine.serving.http.listening import listen
from engine.serving.http.protocol import ApiProtocol


class QuickProtocol(ApiProtocol):
    header_seconds = 0.4


async def slow_app(scope: object, receive: object, send: object) -> None:
    """Answers after longer than headers may take."""
    await asyncio.sleep(0.8)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"ok"})  # type: ignore[operator]


@pytest.fixture
def port() -> Iterator[int]:
    listener = listen("127.0.0.1", 0)
    http = uvicorn.Server(uvicorn.Config(slow_app, http=QuickProtocol, log_level="error", lifespan="off"))
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1]
    http.should_exit = True
    thread.join(10)


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
