"""What can happen to a request to a cloud of the tests, whichever cloud it is, and the HTTP server that lets it happen.

class FakeCloud(FaultyCloud): ...        # says what a request is, what it does, and how it is refused
"""

import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.clouds.hosts import Hosts

Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Call:
    """One request, as far as a fault can choose it."""

    action: str
    region: str = ""
    zone: str | None = None
    market: str = "on_demand"
    text: str = ""


@dataclass
class Fault:
    """What happens to the next `times` calls of an action; -1: to all. Fields that are None match everything.

    code: refuse. lose: do it and close the connection. late_seconds: close the connection, do it afterwards.
    """

    action: str
    code: str | None = None
    region: str | None = None
    zone: str | None = None
    market: str | None = None
    times: int = -1
    lose: bool = False
    late_seconds: float | None = None
    after: int = 0
    hook: Callable[[], None] | None = None

    def takes(self, call: Call) -> bool:
        """Whether it happens to this call; counts it."""
        wanted = ((self.region, call.region), (self.zone, call.zone), (self.market, call.market))
        if self.times == 0 or not re.fullmatch(self.action, call.action):
            return False
        if any(asked is not None and asked != given for asked, given in wanted):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return True


class FaultyCloud:
    """A server with faults, machines and the variables that point a client at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[Fault] = []
        self.calls: list[Call] = []
        self.hosts = Hosts(folder / "hosts")
        self.shutdown_seconds = 0.0
        self.secrets: list[str] = []
        self._before: dict[str, str | None] = {}

    def left(self) -> list[str]:
        """Everything that is there, asked past all faults, and the machines that run."""
        raise NotImplementedError

    def orphan(self, labels: dict[str, str]) -> None:
        """Leave a disk and an address of a run behind, in a region that no test names."""
        raise NotImplementedError

    def describe(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Call:
        """Say what a request is."""
        raise NotImplementedError

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Do what the cloud does, faults aside."""
        raise NotImplementedError

    def refuse(self, code: str) -> Answer:
        """Refuse a request."""
        raise NotImplementedError

    def count(self, action: str) -> int:
        """How often an action was called."""
        return sum(call.action == action for call in self.calls)

    def serve(self) -> str:
        """Start the server; returns its address."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def point_here(self, environment: dict[str, str]) -> None:
        """Set environment variables until `stop_serving`."""
        self._before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)

    def stop_serving(self) -> None:
        """Restore the variables and end the server."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._server.shutdown()
        self._server.server_close()

    def _respond(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        """The answer, or None: the connection is closed without one."""
        call = self.describe(method, path, headers, body)
        self.calls.append(call)
        fault = next((fault for fault in self.faults if fault.takes(call)), None)
        if fault is not None and fault.hook is not None:
            fault.hook()
        if fault is not None and fault.late_seconds is not None:
            threading.Timer(fault.late_seconds, self.answer, (method, path, headers, body)).start()
            return None
        if fault is not None and fault.code is not None:
            return self.refuse(fault.code)
        answer = self.answer(method, path, headers, body)
        return None if fault is not None and fault.lose else answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                return

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = cloud._respond(self.command, self.path, dict(self.headers.items()), body)
                if answer is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, kept, data = answer
                try:
                    self.send_response(status)
                    for name, value in kept.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True  # the caller has been killed

            do_GET = do_DELETE = do_PATCH = do_PUT = do_POST

        return Handler
