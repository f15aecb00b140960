"""A server's process in a launch: started, waited for, watched, and ended with the launch.

server = RunningServer(command, "http://127.0.0.1:1234", log)
server.wait_until_ready(seconds)
server.check()                     # raises ServerDiedError with the end of its log
"""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from configs.common.files.reading import read_tail
from configs.common.system.proc import end_with_parent
from engine.workloads.servers.commands import ServerCommand, child_environment


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer as another: followed, it would hand the bearer token to whomever it names."""

    def redirect_request(self, *_: Any) -> None:
        return None


# A server of this machine needs no proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
_LOOK_SECONDS = 0.2
_ENDING_SECONDS = 20.0
_MAX_ANSWER_BYTES = 64 << 20


class ServerDiedError(RuntimeError):
    """A server ended, or was never ready."""


class RunningServer:
    """A server that this process has started. exact, name: of its command."""

    def __init__(self, command: ServerCommand, url: str, log: Path) -> None:
        self.command, self.url, self.log = command, url, log
        parent = os.getpid()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command.argv,
                env=child_environment(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=lambda: end_with_parent(signal.SIGTERM, parent),
            )

    def wait_until_ready(self, seconds: float) -> float:
        """Return the seconds until it took requests. Raises ServerDiedError."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds:
            self.check()
            if fetched(self.url + self.command.ready_path) is not None:
                return waited
            time.sleep(_LOOK_SECONDS)
        raise ServerDiedError(
            f"workload.ready_seconds: the server was not ready within {seconds:.0f} s. "
            f"Raise it if the model takes longer to load. End of its log: {self._last_lines()}"
        )

    def check(self) -> None:
        """Raise ServerDiedError where the server has ended."""
        if self._process.poll() is not None:
            raise ServerDiedError(f"the server ended with exit code {self._process.returncode}: {self._last_lines()}")

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def memory_bytes(self) -> int | None:
        """Return the resident memory of its processes; what they share counts once for each."""
        sizes = [_resident(one) for one in self._processes()]
        return sum(sizes) if sizes else None

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds of its processes so far, of those included that have ended and were waited for."""
        times = [_cpu_seconds(one) for one in self._processes()]
        return sum(times) if times else None

    def _processes(self) -> list[psutil.Process]:
        """Return the server's processes; none where it has ended."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def stop(self) -> None:
        """End the server and what it started."""
        with suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING_SECONDS)
            for left in children:
                with suppress(psutil.Error):
                    left.kill()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        # What a server leaves that died by itself has another parent, but its group. A process of the group's number
        # would be a later one, of another group.
        if not psutil.pid_exists(self._process.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        lines = [line for line in read_tail(self.log, 4000).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return " | ".join((errors or lines)[-2:])[-400:] or "it wrote nothing"


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        return float(sum(process.cpu_times()[:4]))  # user and system, its own and those of its ended children
    except psutil.Error:
        return 0.0


def fetched(url: str, token: str | None = None) -> bytes | None:
    """Return the body of a page that answers 200; None where it does not."""
    request = urllib.request.Request(url, headers=_headers(token))
    try:
        with _OPENER.open(request, timeout=5) as answer:
            return bytes(answer.read(_MAX_ANSWER_BYTES))
    except (OSError, ValueError, HTTPException):
        return None


def posted(url: str, body: dict[str, Any], token: str | None, seconds: float) -> tuple[int, Any]:
    """Return status and JSON of an answer. Raises OSError where no answer came."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **_headers(token)})
    try:
        with _OPENER.open(request, timeout=seconds) as answer:
            return answer.status, _parsed(answer.read(_MAX_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _parsed(_read_or_nothing(error))
    except HTTPException as error:  # not HTTP, or cut off
        raise OSError(f"{type(error).__name__}: {error}") from error


def _read_or_nothing(answer: Any) -> bytes:
    try:
        return bytes(answer.read(_MAX_ANSWER_BYTES))
    except HTTPException:  # its status says enough
        return b""


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {}
