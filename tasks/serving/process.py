"""A server's processes on this machine, from the start of its HTTP process to the end of all.

    with ServerProcess(settings, api_key=None) as server:
        about = server.wait_until_ready()         # {"url": ..., "replicas": [...]}

What it starts ends with this process, however that ends.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.common.base import write_atomically
from configs.serving.settings import API_KEY_VARIABLE, ServingSettings

_STOP_SECONDS = 10.0


class ServerFailedError(RuntimeError):
    """The server ended before it was ready; the text says why."""


def first_refusal(settings: ServingSettings, bodies: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what a server would refuse first of these requests: their `number` from 1, `message` and `field`.

    Nothing is loaded. Raises ValueError for a model whose files are wrong.
    """
    path = _written(settings)
    told = subprocess.run(
        [sys.executable, "-m", "engine.serving.http.checking", str(path)],
        env=os.environ | {"PYTHONSAFEPATH": "1"}, input=json.dumps(bodies), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if told.returncode != 0:
        raise ValueError((told.stderr.strip().splitlines() or ["the requests could not be checked"])[-1])
    found: dict[str, Any] | None = json.loads(told.stdout)
    return found


def _written(settings: ServingSettings) -> Path:
    path = Path(settings.folder) / "settings.json"
    write_atomically(path, settings.model_dump_json())
    return path


class ServerProcess:
    """The HTTP process, which starts the ranks. api_key: the bearer token that requests need. program: its module."""

    def __init__(
        self, settings: ServingSettings, api_key: str | None, program: str = "engine.serving.http.main"
    ) -> None:
        self.settings = settings
        path = _written(settings)
        environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
        environment["PYTHONSAFEPATH"] = "1"  # a folder named like one of ours in the working directory is not imported
        if api_key is not None:
            environment[API_KEY_VARIABLE] = api_key
        command = [sys.executable, "-m", program, str(path), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the HTTP process."""
        return self._process.pid

    def wait_until_ready(self) -> dict[str, Any]:
        """Return the server's URL and what its replicas say of themselves. Raises ServerFailedError."""
        while (line := self._lines.get()) is not None:
            said = json.loads(line)
            if "ready" in said:
                ready: dict[str, Any] = said["ready"]
                return ready
        raise ServerFailedError(f"the server ended with exit code {self._process.wait()}")

    def wait(self) -> int:
        """Wait until the server ends; return its exit code."""
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the HTTP process."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the server, without waiting for requests."""
        # The first lets requests end, the second does not. Two equal ones could come together, as one.
        for number in (signal.SIGTERM, signal.SIGINT):
            if self._process.poll() is None:
                self.signal(number)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)
