"""The process of a server's HTTP side, the socket on which it takes requests, and the end of its connections.

A socket that asyncio is given keeps the kernel's default, by which a small piece of an answer waits until the client
has acknowledged the one before it, up to 40 ms later: a token of a stream, or a body after its headers.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvicorn

from configs.common.files.reading import PLAN_BYTES, read_model
from configs.common.system.open_files import allow_connections
from configs.common.system.proc import end_with_parent
from configs.serving.settings import ServingSettings

_LOOK_SECONDS = 0.1


def run_http(arguments: list[str], serve: Callable[[ServingSettings, Path], Coroutine[Any, Any, int]]) -> int:
    """Run an HTTP process by its command line, SETTINGS_JSON [PARENT_PID]. Returns the exit code."""
    path = Path(arguments[0]).resolve()
    if len(arguments) > 1:
        end_with_parent(signal.SIGTERM, int(arguments[1]))
    allow_connections()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a text has one thread; the cores are the ranks'
    try:
        return asyncio.run(serve(read_model(path, ServingSettings, PLAN_BYTES), path))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket whose connections send at once. Raises ValueError for an address that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listener


def listener_url(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def send_rest(http: uvicorn.Server, listening: "asyncio.Task[None]", end: float, now: asyncio.Event) -> None:
    """Close the socket and connections without a request, and wait until the others have sent what they have left.

    listening: the task of `http`. end: of `time.monotonic`; it ends then, or where `now` is set.
    """
    http.should_exit = True
    while not listening.done() and time.monotonic() < end and not now.is_set():
        await asyncio.sleep(_LOOK_SECONDS)
