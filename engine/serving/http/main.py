"""The HTTP process of a server: it starts the ranks and answers requests until SIGTERM.

    python -m engine.serving.http.main SETTINGS_JSON [PARENT_PID]         # ends with its parent, if given

The bearer token is taken from RANKWISE_API_KEY. When the server takes requests, one line of JSON on standard output
says so: {"ready": {"url": ..., "replicas": [...]}}. SIGTERM lets requests in progress end; a second one, or Ctrl-C,
does not.
"""

import asyncio
import gc
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from configs.serving.settings import ServingSettings, own_api_key
from engine.serving.http.app import Server, serving_app
from engine.serving.http.listening import listen, listener_url, run_http, send_rest
from engine.serving.http.metrics import ServerMetrics
from engine.serving.http.model import ServedModel
from engine.serving.http.protocol import ApiProtocol
from engine.serving.http.replicas import Router

_LOOK_SECONDS = 0.1
_HEADER_BYTES = 64 << 10


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: the process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


async def serve(settings: ServingSettings, path: Path) -> int:
    """Serve until a signal ends it. Returns the exit code: 1 if the ranks could not be started."""
    listener = listen(settings.host, settings.port)
    metrics = ServerMetrics(settings.name, settings.layout.dp)
    router = Router(settings, path, metrics)
    server = Server(settings, ServedModel.read(settings), router, metrics, own_api_key())
    http = _Uvicorn(
        uvicorn.Config(
            serving_app(server),
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            http=ApiProtocol,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            lifespan="off",
        )
    )
    stop = asyncio.Event()
    signals = _Signals(stop)
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, signals.take, one)
    for replica in router.replicas:
        await replica.start()
    gc.freeze()  # libraries, tokenizer and application stay until the end
    listening = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        code = await _until_stopped(server, http, listener, stop)
        if not code:
            end = await _drain(server, signals)
            await send_rest(http, listening, end, signals.now)
    finally:
        await asyncio.gather(*(replica.stop() for replica in router.replicas))
        http.should_exit = http.force_exit = True
        await asyncio.gather(listening, return_exceptions=True)
    return code


class _Signals:
    """SIGTERM once: drain. Anything more: end now."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop, self.now = stop, asyncio.Event()

    def take(self, number: int) -> None:
        if self._stop.is_set() or number == signal.SIGINT:
            self.now.set()
        self._stop.set()


async def _until_stopped(server: Server, http: uvicorn.Server, listener: socket.socket, stop: asyncio.Event) -> int:
    told = False
    while not stop.is_set():
        failed = [one for one in server.router.replicas if one.cannot_start]
        if failed:
            print(f"the ranks cannot be started; see {failed[0].log}", file=sys.stderr)
            return 1
        if not told and http.started and server.router.ready:
            _tell_ready(server, listener)
            told = True
        await asyncio.sleep(_LOOK_SECONDS)
    return 0


def _tell_ready(server: Server, listener: socket.socket) -> None:
    about = [replica.about for replica in server.router.replicas]
    print(json.dumps({"ready": {"url": listener_url(listener), "replicas": about}}), flush=True)


async def _drain(server: Server, signals: _Signals) -> float:
    """Take no more requests, and wait for those in progress. Returns until when, of `time.monotonic`."""
    server.draining = True
    end = time.monotonic() + server.settings.limits.drain_seconds
    while server.in_progress and time.monotonic() < end and not signals.now.is_set():
        await asyncio.sleep(_LOOK_SECONDS)
    return end


def main(arguments: list[str]) -> int:
    """Run the HTTP process. Returns the exit code."""
    return run_http(arguments, serve)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
