"""A completion server without a model: what it answers, and when, is known beforehand.

    python -m benchmarks.load.server --port 0          # prints its port; answers at once
    python -m benchmarks.load.server --first-seconds 0.02 --chunk-seconds 0.005

It streams `max_tokens` chunks of one token each and the usage. `delays` of `serve` decides the times.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"0\r\n\r\n"


@dataclass
class Script:
    """How the server answers. `refuse` gives (status, text) for a request that is not answered."""

    first_seconds: float = 0.0
    chunk_seconds: float = 0.0
    usage_tokens: Callable[[int], int | None] = lambda chunks: chunks
    refuse: Callable[[dict[str, Any], dict[str, str]], tuple[int, str] | None] = lambda body, headers: None
    cut_after: int | None = None
    """Chunks after which the connection is closed."""
    ends_connections: bool = False
    """Close an idle connection a moment after each response."""
    seen: list[tuple[dict[str, Any], dict[str, str]]] | None = field(default_factory=list)
    """Bodies and headers of the requests; None keeps none."""


class _Session(asyncio.Protocol):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, blank, rest = self.buffer.partition(b"\r\n\r\n")
            if not blank:
                return
            lines = head.decode("latin-1").split("\r\n")[1:]
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers["content-length"])
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            self._answer(json.loads(rest[:length]), headers)

    def _answer(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        script = self.script
        if script.seen is not None:
            script.seen.append((body, headers))
        refused = script.refuse(body, headers)
        if refused is not None:
            status, text = refused
            self.transport.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            return
        count = body["max_tokens"]
        if script.first_seconds == script.chunk_seconds == 0 and script.cut_after is None:
            self.transport.write(_HEAD + b"".join(map(_chunk, range(count))) + self._last(count))
            self._after()
            return
        self.transport.write(_HEAD)
        self._later(script.first_seconds, 0, count)

    def _later(self, seconds: float, sent: int, count: int) -> None:
        asyncio.get_running_loop().call_later(seconds, self._next, sent, count)

    def _next(self, sent: int, count: int) -> None:
        if sent == self.script.cut_after:
            self.transport.close()
            return
        if sent == count:
            self.transport.write(self._last(count))
            self._after()
            return
        self.transport.write(_chunk(sent))
        self._later(self.script.chunk_seconds if sent + 1 < count else 0.0, sent + 1, count)

    def _last(self, count: int) -> bytes:
        finish = _event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        tokens = self.script.usage_tokens(count)
        usage = _event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})
        return finish + (usage if tokens is not None else b"") + _framed(b"data: [DONE]\n\n") + _END

    def _after(self) -> None:
        if self.script.ends_connections:
            asyncio.get_running_loop().call_later(0.01, self.transport.close)


def _event(data: dict[str, Any]) -> bytes:
    return _framed(b"data: " + json.dumps({"object": "text_completion", "model": "m", **data}).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _chunk(number: int) -> bytes:
    if number not in _CHUNKS:
        _CHUNKS[number] = _event({"choices": [{"index": 0, "text": f" {number}", "finish_reason": None}]})
    return _CHUNKS[number]


_CHUNKS: dict[int, bytes] = {}


async def serve(script: Script, port: int, ready: Callable[[int], None]) -> None:
    """Serve on 127.0.0.1 until cancelled; `ready` is called with the port."""
    server = await asyncio.get_running_loop().create_server(lambda: _Session(script), "127.0.0.1", port)
    ready(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


@contextlib.contextmanager
def serving(script: Script) -> Iterator[str]:
    """Serve in a thread; the URL."""
    ports: list[int] = []
    started = Event()
    loop = asyncio.new_event_loop()

    def ready(port: int) -> None:
        ports.append(port)
        started.set()

    task = loop.create_task(serve(script, 0, ready))

    def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = Thread(target=work, daemon=True)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-seconds", type=float, default=0.0)
    parser.add_argument("--chunk-seconds", type=float, default=0.0)
    given = parser.parse_args()
    script = Script(first_seconds=given.first_seconds, chunk_seconds=given.chunk_seconds, seen=None)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(script, given.port, lambda port: print(port, flush=True)))


if __name__ == "__main__":
    main()
