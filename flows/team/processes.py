"""Find, query and end the processes of a team's set-up.

All have the set-up's folder in their environment, so they are found even if their parent was killed.
supervisord is queried through its socket: http://supervisord.org/api.html
"""

import http.client
import os
import socket
import time
import xmlrpc.client
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from flows.team.setup import FOLDER_VARIABLE


def log_program_line(text: str) -> None:
    """One line in the log of a program."""
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}", flush=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """All living processes of the set-up in this folder, flow runs and their launches included.

    By whatever path it was named: a home folder may be a link.
    """
    found, real = [], os.path.realpath(folder)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            named = process.environ().get(FOLDER_VARIABLE)
            if named and os.path.realpath(named) == real and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def supervisord_of(folder: Path) -> psutil.Process | None:
    """The set-up's supervisord, if it runs."""
    for process in processes_of(folder):
        with suppress(psutil.Error):
            if "supervisor.supervisord" in process.cmdline():
                return process
    return None


def flow_processes() -> list[psutil.Process]:
    """Flow runs that this process, a Prefect worker, has started: its children, each in a session of its own."""
    living = []
    for process in psutil.Process().children():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == process.pid and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def end_flow_runs_left() -> None:
    """Kill what belongs to a flow run of this set-up and still lives, such as launches whose flow run was killed."""
    for process in processes_of(Path(os.environ[FOLDER_VARIABLE])):
        with suppress(psutil.Error):
            if "PREFECT__FLOW_RUN_ID" in process.environ():
                process.kill()


def end_all(folder: Path, seconds: float) -> int:
    """Ask supervisord to end all; kill what is left after a while. Returns how many had to be killed."""
    supervisord = supervisord_of(folder)
    asked = [supervisord] if supervisord else processes_of(folder)
    for process in asked:
        with suppress(psutil.Error):
            process.terminate()
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, 5)
    return len(left)


@dataclass(frozen=True)
class SupervisedProgram:
    """What supervisord says of a program: its state (http://supervisord.org/subprocess.html) and more in words."""

    name: str
    state: str
    description: str
    pid: int

    @property
    def failing(self) -> bool:
        """Whether it ended when it should have started."""
        return self.state in ("BACKOFF", "FATAL", "EXITED")


def programs(control: Path) -> dict[str, SupervisedProgram] | None:
    """Programs by name, asked through supervisord's socket; None where nobody answers."""
    proxy = xmlrpc.client.ServerProxy("http://localhost", transport=_UnixTransport(control))
    try:
        told: Any = proxy.supervisor.getAllProcessInfo()
    except (OSError, http.client.HTTPException, xmlrpc.client.Error):
        return None
    finally:
        proxy("close")()
    return {
        entry["name"]: SupervisedProgram(entry["name"], entry["statename"], entry["description"], entry["pid"])
        for entry in told
    }


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._kept: _UnixConnection | None = None

    def make_connection(self, host: object) -> http.client.HTTPConnection:
        self._kept = _UnixConnection(self._path)
        return self._kept

    def close(self) -> None:
        if self._kept:
            self._kept.close()
