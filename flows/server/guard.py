"""The guard of the local Prefect server: starts it, monitors its users, and ends it.

A run cannot end the server itself: it may be killed, and others may share the server. A small separate
process therefore holds the server as its child and monitors the users: every run holds a shared lock on
`lease.lock`, which the kernel releases however the run ends. `server.lock` serialises runs that start a
server and a guard that ends one, so a new run finds either a permanent server or none.

The guard inherits a socket that already listens: the port is nobody else's from the first moment,
requests wait in the socket's queue until the server answers, also while a server that crashed is
started again. Nothing but the standard library is imported here until the server itself starts.

    python -m flows.server.guard watch FOLDER LISTENER     # by flows.server.local
    python -m flows.server.guard serve LISTENER PARENT     # by the guard
"""

import contextlib
import fcntl
import gc
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from configs.common.proc import end_with_parent, is_alive, network_namespace, start_ticks

NICE = 19
LINGER_SECONDS = 3.0
POLL_SECONDS = 0.5
END_SECONDS = 5.0
MAX_STARTS = 3


@dataclass(frozen=True)
class Guard:
    """Content of server.json: who guards which server.

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


def read_guard(folder: Path) -> Guard | None:
    """The guard that `server.json` names; None without a readable one."""
    try:
        return Guard(**json.loads((folder / "server.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_guard(folder: Path, guard: Guard) -> None:
    """Write `server.json` whole or not at all."""
    draft = folder / f".server.json.{guard.pid}"
    draft.write_text(json.dumps(asdict(guard)))
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


def say(text: str) -> None:
    """One line in server.log."""
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} guard {os.getpid()}: {text}", flush=True)


class Server:
    """The server as a child of this process, started again (a few times) when it is killed."""

    def __init__(self, listener: int) -> None:
        self.listener = listener
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start it; it answers on the listening socket when it is ready."""
        self.starts += 1
        module = [sys.executable, "-P", "-m", "flows.server.guard"]
        self.process = subprocess.Popen(
            [*module, "serve", str(self.listener), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=(self.listener,),
        )

    def keep(self) -> bool:
        """Start it again if it was killed. False when that happened too often, or it ended by itself.

        Killed is what the kernel does when memory runs out; a server that ends by itself has said why
        and would do it again.
        """
        status = self.process.poll()
        if status is None:
            return True
        say(f"the server ended with status {status} (start {self.starts} of {MAX_STARTS})")
        if status >= 0 or self.starts == MAX_STARTS:
            return False
        self.start()
        return True

    def end(self) -> None:
        """Ask it to end, insist after a while."""
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def watch(folder: Path, server: Server) -> None:
    """Return when nobody needed the server any more, so that it was ended, or when it cannot be kept."""
    idle_since: float | None = None
    while server.keep():
        time.sleep(POLL_SECONDS)
        if is_leased(folder):
            idle_since = None
            continue
        idle_since = idle_since or time.monotonic()
        if time.monotonic() - idle_since >= LINGER_SECONDS and end_unless_leased(folder, server):
            return


def end_unless_leased(folder: Path, server: Server) -> bool:
    """End the server, unless a run takes the lease in this moment. Returns whether it was ended.

    A run takes the lease only while it holds `server.lock`. If that is taken, somebody is about to:
    the caller looks again later. If it is ours, nobody can between the last look and the end.
    """
    lock = open_lock(folder / "server.lock")
    try:
        if not try_lock(lock) or is_leased(folder):
            return False
        (folder / "server.json").unlink(missing_ok=True)
        server.end()
        return True
    finally:
        os.close(lock)


def guard_main(folder: Path, listener: int) -> None:
    """Detach, announce oneself in server.json, keep the server until nobody needs it."""
    if os.fork():
        # The run that starts us waits only for this parent, so that no zombie of ours is left to it.
        os._exit(0)
    # Its exit runs the `finally` below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket(fileno=os.dup(listener)) as bound:
        port = bound.getsockname()[1]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    url = f"http://127.0.0.1:{port}/api"
    pid = os.getpid()
    me = Guard(socket.gethostname(), network_namespace(), pid, start_ticks(pid), port, url, now, prefect_version())
    server = None
    try:
        write_guard(folder, me)
        # Whoever reads our standard output to its end knows now that server.json is there.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        server = Server(listener)
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        watch(folder, server)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if read_guard(folder) == me:
            (folder / "server.json").unlink(missing_ok=True)
        if server is not None:
            server.end()


_MOST_LOOKS = 20


def lower_priority() -> None:
    """Nice 19 for every thread of this process, and for its session.

    Linux keeps the nice value by thread, and where it schedules by session it counts only among the
    session's own, unless the session is lowered too: https://man7.org/linux/man-pages/man7/sched.7.html
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    # A thread that was not reached yet may start another one meanwhile, which has its priority.
    for _ in range(_MOST_LOOKS):
        if not any([_lowered(int(thread.name)) for thread in Path("/proc/self/task").iterdir()]):
            break


def _lowered(thread: int) -> bool:
    """Whether the thread had another priority until now."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpriority(os.PRIO_PROCESS, thread) != NICE:
            os.setpriority(os.PRIO_PROCESS, thread, NICE)
            return True
    return False


def serve(listener: int, parent: int) -> NoReturn:
    """Run Prefect's API and UI on an inherited socket until SIGTERM, or until the guard dies."""
    end_with_parent(signal.SIGKILL, parent)
    run_api_server([socket.socket(fileno=listener)], access_log=False)


def run_api_server(sockets: list[socket.socket] | None, **settings: Any) -> NoReturn:
    """Run Prefect's API and UI in this process until SIGTERM, on given sockets or as `settings` of uvicorn say.

    Start-up is mostly imports and, with a new database, migrations: the garbage collector finds
    nothing there but takes a quarter of the time. The priority is lowered when the server is ready:
    at nice 19 a busy machine would not let it become so.
    """
    gc.disable()
    import uvicorn
    from prefect.server.api.server import create_app

    class QuietServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            gc.freeze()
            gc.enable()
            lower_priority()

    common: dict[str, Any] = {"log_level": "warning", "lifespan": "on", "timeout_graceful_shutdown": 2}
    server = QuietServer(uvicorn.Config(create_app(final=True), **common, **settings))
    server.run(sockets=sockets)
    sys.exit(0 if server.started else 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    guard_main(Path(sys.argv[2]), int(sys.argv[3]))
