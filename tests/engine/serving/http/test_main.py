"""The end of a server: what has begun is answered first, and sent to its end."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Message

from configs.serving.settings import ServingLimits, ServingSettings
from engine.serving.http.app import Server, serving_app
from engine.serving.http.listening import listen, send_rest
from engine.serving.http.main import _drain, _Signals, _Uvicorn
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.replicas import Router
from engine.serving.messages import NewToken

POST = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}


def ready_server(folder: Path, name: str = "m") -> Server:
    """A server whose replica is ready and hears nothing."""
    limits = ServingLimits(drain_seconds=30.0)
    settings = ServingSettings(name=name, manifest="", folder=str(folder), max_length=8, blocks=8, limits=limits)
    metrics = ServerMetrics("m")
    router = Router(settings, folder / "settings.json", metrics)
    router.replicas[0].ready, router.replicas[0]._tell = True, lambda message: None  # type: ignore[method-assign]
    return Server(settings, ServedModel(name, 10, 8, frozenset(), None, None, {}), router, metrics, None)


def test_a_stream_that_its_client_reads_slowly_is_finished(tmp_path: Path) -> None:
    """All tokens are there, so no replica works for it any more."""
    body = json.dumps({"model": "m", "prompt": [1], "max_tokens": 2, "stream": True}).encode()
    sent: list[bytes] = []

    async def scenario() -> tuple[bool, float]:
        server = ready_server(tmp_path)
        router = server.router
        reads = asyncio.Event()
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not asked:
                await asyncio.Event().wait()
            return asked.pop()

        async def send(message: Any) -> None:
            await reads.wait()  # the client's window is full
            sent.append(message.get("body", b""))

        answering = asyncio.create_task(serving_app(server)({**POST}, receive, send))
        while not router.answers:
            await asyncio.sleep(0.01)
        [answer] = router.replicas[0].answers.values()
        answer.put([NewToken(answer.key, 5)])
        answer.put([NewToken(answer.key, 6, "length")])
        router.replicas[0].answers.clear()
        began = time.monotonic()
        draining = asyncio.create_task(_drain(server, _Signals(asyncio.Event())))
        await asyncio.sleep(0.5)
        waited = not draining.done()
        reads.set()
        await asyncio.gather(draining, answering)
        return waited, time.monotonic() - began

    waited, seconds = asyncio.run(scenario())
    assert waited and seconds < 20
    assert b"".join(sent).endswith(b"data: [DONE]\n\n")


def test_a_request_whose_body_is_still_read_is_answered(tmp_path: Path) -> None:
    """No replica works for it yet."""
    body = json.dumps({"model": "m", "prompt": [1], "max_tokens": 1}).encode()

    async def scenario() -> tuple[bool, list[Any]]:
        server = ready_server(tmp_path)
        asks, comes = asyncio.Event(), asyncio.Event()
        sent: list[Any] = []

        async def receive() -> Message:
            asks.set()
            await comes.wait()
            comes.clear()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        answering = asyncio.create_task(serving_app(server)({**POST}, receive, send))
        await asks.wait()
        draining = asyncio.create_task(_drain(server, _Signals(asyncio.Event())))
        await asyncio.sleep(0.3)
        waited = not draining.done()
        comes.set()
        while not server.router.answers:
            await asyncio.sleep(0.01)
        [answer] = server.router.replicas[0].answers.values()
        answer.put([NewToken(answer.key, 5, "length")])
        await asyncio.wait_for(asyncio.gather(draining, answering), 300)
        return waited, sent

    waited, sent = asyncio.run(scenario())
    assert waited and sent[0]["status"] == 200
    assert json.loads(sent[1]["body"])["choices"][0]["text"] == " 5"


def test_an_answer_that_its_client_has_not_read_is_sent_to_its_end(tmp_path: Path) -> None:
    """It lies with the connection, and its request is no longer in progress."""
    name = "m" * (24 << 20)  # more than the buffers of the kernel hold

    async def scenario() -> tuple[bool, bytes]:
        server, signals, loop = ready_server(tmp_path, name), _Signals(asyncio.Event()), asyncio.get_running_loop()
        http = _Uvicorn(uvicorn.Config(serving_app(server), log_level="error", lifespan="off"))
        listener = listen("127.0.0.1", 0)
        listening = asyncio.create_task(http.serve(sockets=[listener]))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not any(one.transport.get_write_buffer_size() for one in http.server_state.connections):
                await asyncio.sleep(0.01)
            end = await _drain(server, signals)
            sending = asyncio.create_task(send_rest(http, listening, end, signals.now))
            await asyncio.sleep(0.5)
            waited, parts = not sending.done(), []
            while part := await loop.sock_recv(client, 1 << 20):
                parts.append(part)
        await asyncio.wait_for(sending, 300)
        await listening
        return waited, b"".join(parts)

    waited, received = asyncio.run(scenario())
    assert waited and json.loads(received.partition(b"\r\n\r\n")[2])["data"][0]["id"] == name


@pytest.mark.parametrize("module", ["engine.serving.http.main", "engine.answering.main"])
def test_settings_that_cannot_be_read_are_told_in_a_line(module: str, tmp_path: Path) -> None:
    """A server of decoders ended with a traceback there, one of encoders did not."""
    (tmp_path / "settings.json").write_text('{"name": 7}')
    command = [sys.executable, "-m", module, str(tmp_path / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"{tmp_path}/settings.json: ")
