"""A process that has imported what launches need and forks their launchers, so that none of them imports it again.

It has only imported: no model, no device, no threads, no process group. It speaks to the process that submits jobs
over a socket, one JSON object a line, and ends when that closes it; launchers that it has forked go on. So one parent
may serve many launches, but never two repeats of a cell (`slurm.forking.parents`).

    python -m slurm.forking.fork_parent FOLDER      (in which the socket lies, and nothing that is needed later)

First it is told its environment, and begins anew with that, since libraries read theirs when they are imported:

    {"environment": {...}}                                                        it answers: {}
    {"preload": "/runs/s/jobs/0001/job.json"}, or null for launchers alone         {"unfit": null}, or why not
    {"launch": "/runs/s/jobs/0001/job.json"}                                      {"pid": 4711}
    {"start": 4711}                                                               (no answer)

A launcher that was forked waits to be told to start, and ends where the connection closes before: the other side has
then given it up, perhaps for a launch of the same job elsewhere, and two would write one record.
"""

import importlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.common.system.collector import imported_for_good
from configs.common.system.forking import COMMAND_LINE_BYTES, fork, run_module, set_command_line, unfit_to_fork

_MODULE = "slurm.forking.fork_parent"
_LAUNCHER = "slurm.launch"
_PRELOADING = "engine.agents.preloading"
_AGENTS = ("engine.agents.torchrun_agent", "torch.distributed.run")


def main(arguments: list[str]) -> int:
    """Serve until the other side closes the socket; then remove the folder."""
    folder, *connected = arguments
    if connected:
        set_command_line([sys.executable, "-m", _MODULE, folder])  # without what only made room
        with socket.socket(fileno=int(connected[0])) as connection:
            code = serve(connection)
        shutil.rmtree(folder, ignore_errors=True)
        return code
    with socket.socket(socket.AF_UNIX) as connection:
        with socket_in(Path(folder)) as path:
            connection.connect(path)
        environment = _read(connection)["environment"]
        connection.set_inheritable(True)
        again = [sys.executable, "-m", _MODULE, folder, str(connection.fileno()), "-" * COMMAND_LINE_BYTES]
        os.execve(sys.executable, again, environment)


@contextmanager
def socket_in(folder: Path) -> Iterator[str]:
    """The address of the socket in a folder, however long its path is: an address has 108 bytes (unix(7))."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def serve(connection: socket.socket) -> int:
    """Import and fork as told."""
    connection.sendall(b"{}\n")
    importlib.import_module(_LAUNCHER)
    while request := _read(connection):
        if "preload" in request:
            _answer(connection, {"unfit": _preload(request["preload"])})
        else:
            _launch(request["launch"], connection)
    return 0


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _read(connection: socket.socket) -> dict[str, Any]:
    """The next request; {} at the end. No byte of the one after it: a launch may follow a start at once."""
    received = b""
    while not received.endswith(b"\n"):
        try:
            waiting = connection.recv(65536, socket.MSG_PEEK)
            received += connection.recv(waiting.find(b"\n") + 1 or len(waiting))
        except ConnectionResetError:
            return {}
        if not waiting:
            return {}
    request: dict[str, Any] = json.loads(received)
    return request


def _preload(job_json: str | None) -> str | None:
    """Import what the ranks of such a job need. Returns why this process cannot be forked now."""
    from slurm.staging.version import code_version

    try:
        code_version()  # its answer is kept
        if job_json is not None:
            with imported_for_good(_PRELOADING):
                importlib.import_module(_PRELOADING).preload(Path(job_json))
                for name in _AGENTS:
                    importlib.import_module(name)
    except Exception as error:  # whatever a library raises when it is imported; a rank says it to its own log
        return f"{type(error).__name__}: {error}"
    return unfit_to_fork()


def _launch(job_json: str, connection: socket.socket) -> None:
    waiting, confirmed = os.pipe()

    def run() -> int:
        connection.close()
        os.close(confirmed)
        started = os.read(waiting, 1)
        os.close(waiting)
        if not started:
            return 1
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return run_module(_LAUNCHER, [job_json], dict(os.environ))

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets launchers that end
    try:
        try:
            pid = fork(run).pid
        except OSError as error:
            return _answer(connection, {"error": error.strerror or str(error)})
        finally:
            os.close(waiting)
        _answer(connection, {"pid": pid})
        if _read(connection) == {"start": pid}:
            os.write(confirmed, b"1")
    finally:
        os.close(confirmed)


if __name__ == "__main__":
    # Without the interpreter's own way to its end, which takes long with so many modules.
    os._exit(main(sys.argv[1:]))
