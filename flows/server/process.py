"""The process of the local Prefect server: it serves API and UI, and ends when no run needs it any more.

A run cannot end the server: it may be killed, and others may share the server. Every run therefore holds a shared
lock on `lease.lock`, which the kernel releases however the run ends, and the server ends itself when nobody has held
one for a while. `server.lock` serialises a run that starts or joins a server and a server that ends itself.

The process inherits a socket that already listens: the port is nobody else's from the first moment, and requests wait
in the socket's queue until the server answers. A server that was killed is not started again: the runs that used it
continue without one.

    python -m flows.server.process FOLDER LISTENER LINGER_SECONDS     # by flows.server.local
"""

import contextlib
import fcntl
import gc
import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from configs.common.files.reading import read_json_object
from configs.common.system.proc import is_alive, network_namespace, start_ticks

NICE = 10
"""Of a server beside measured ranks. Two busy processes on 2 cores let a query wait 0.13 s at nice 10, 0.7 s and up to
7 s at nice 19 (12 queries each, twice): a run's end, some thirty queries, would then take minutes."""
SERVER_POLL_SECONDS = 0.5
END_SECONDS = 5.0


@dataclass(frozen=True)
class LocalServer:
    """Content of server.json: the server of a data folder.

    `network` tells network namespaces of one host apart: loopback of one is not that of another.
    """

    host: str
    network: str | None
    pid: int
    pid_started: int
    port: int
    url: str
    started_at: str
    version: str

    @property
    def here(self) -> bool:
        """Whether this process reaches the server's loopback."""
        return (self.host, self.network) == (socket.gethostname(), network_namespace())

    @property
    def alive(self) -> bool:
        """Whether that very process still runs (a pid alone may be another's by now)."""
        return is_alive(self.pid, self.pid_started)


def prefect_version() -> str:
    """Version of the installed Prefect, without importing it."""
    return importlib.metadata.version("prefect")


def read_server(folder: Path) -> LocalServer | None:
    """The server that `server.json` names; None without a readable one."""
    try:
        return LocalServer(**read_json_object(folder / "server.json"))
    except (OSError, ValueError, TypeError):
        return None


def _announce(folder: Path, port: int) -> None:
    """Write `server.json` whole or not at all."""
    now, pid = datetime.now(UTC).isoformat(timespec="seconds"), os.getpid()
    url, started = f"http://127.0.0.1:{port}/api", start_ticks(pid)
    server = LocalServer(socket.gethostname(), network_namespace(), pid, started, port, url, now, prefect_version())
    draft = folder / f".server.json.{pid}"
    draft.write_text(json.dumps(asdict(server)))
    draft.replace(folder / "server.json")


def open_lock(path: Path) -> int:
    """A file descriptor to lock; not inherited by programs that this process starts."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int) -> bool:
    """Take the lock for oneself alone if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_leased(folder: Path) -> bool:
    """Whether any run holds the lease."""
    lease = open_lock(folder / "lease.lock")
    try:
        return not try_lock(lease)
    finally:
        os.close(lease)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock for the length of a block."""
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _end_when_idle(folder: Path, linger_seconds: float) -> None:
    """End this process when no run has held the lease for a while, or when its folder is gone: no run finds it then."""
    idle_since: float | None = None
    while True:
        time.sleep(SERVER_POLL_SECONDS)
        try:
            if is_leased(folder):
                idle_since = None
                continue
            idle_since = idle_since or time.monotonic()
            if time.monotonic() - idle_since >= linger_seconds:
                _end_unless_leased(folder)
        except FileNotFoundError:
            if not folder.exists():
                _end()
        except OSError:  # such as too many open files: it passes
            continue


def _end_unless_leased(folder: Path) -> None:
    """End this process, unless a run takes the lease in this moment.

    A run takes the lease only while it holds `server.lock`. If that is taken, somebody is about to: the caller looks
    again later. If it is ours, nobody can, and it stays ours until this process has ended.
    """
    lock = open_lock(folder / "server.lock")
    if not try_lock(lock) or is_leased(folder):
        os.close(lock)
        return
    (folder / "server.json").unlink(missing_ok=True)
    _end()


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_SECONDS)
    os._exit(1)


_MOST_LOOKS = 20


def lower_priority() -> None:
    """A lower priority for every thread of this process, and for its session; one that is lower already stays.

    Raising one again takes a privilege: without it, a server that was started under `nice -n 19` ended here.

    Linux keeps the nice value by thread, and where it schedules by session it counts only among the
    session's own, unless the session is lowered too: https://man7.org/linux/man-pages/man7/sched.7.html
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))
    _lowered(threading.get_native_id())
    # A thread that was not reached yet may start another one meanwhile, which has its priority.
    for _ in range(_MOST_LOOKS):
        if not any([_lowered(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]):
            break


def _lowered(thread: int) -> bool:
    """Whether the thread had a higher priority until now."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpriority(os.PRIO_PROCESS, thread) < NICE:
            os.setpriority(os.PRIO_PROCESS, thread, NICE)
            return True
    return False


def run_api_server(sockets: list[socket.socket] | None, yields: bool, **settings: Any) -> NoReturn:
    """Run Prefect's API and UI in this process until SIGTERM, on given sockets or as `settings` of uvicorn say.

    Start-up is mostly imports and, with a new database, migrations: the garbage collector finds
    nothing there but takes a quarter of the time. yields: to measured ranks, by a lower priority as soon as the server
    is ready; with a low one a busy machine would not let it become so.
    """
    gc.disable()  # until it listens
    import uvicorn
    from prefect.server.api.server import create_app

    from flows.server.sqlite import use_patient_sqlite

    use_patient_sqlite()

    class QuietServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            gc.freeze()
            gc.enable()
            if yields:
                lower_priority()

    common: dict[str, Any] = {"log_level": "warning", "lifespan": "on", "timeout_graceful_shutdown": 2}
    server = QuietServer(uvicorn.Config(create_app(final=True), **common, **settings))
    server.run(sockets=sockets)
    sys.exit(0 if server.started else 1)


def main(folder: Path, descriptor: int, linger_seconds: float) -> None:
    """Detach, write server.json, serve until SIGTERM or until nobody needs the server."""
    if os.fork():
        # The run that starts us waits only for this parent, so that no zombie of ours is left to it.
        os._exit(0)
    listener = socket.socket(fileno=descriptor)
    _announce(folder, listener.getsockname()[1])
    # Whoever reads our standard output to its end knows now that server.json is there.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_when_idle, args=(folder, linger_seconds), name="idle", daemon=True).start()
    run_api_server([listener], yields=True, access_log=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
