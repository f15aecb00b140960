"""The Prefect API of a run: the user's own, or a local server that ends with its last run.

If the environment names an API, that one is used and nothing is started. Else a server is started on
the loopback interface with a SQLite file in the user's data folder; all runs of the user on this
machine share it. Each run holds a lease (a shared file lock, so that it ends with the process whatever
happens to it); the server (`flows.server.process`) ends itself when there is none left.

    with prefect_api() as api:                # starts, waits, sets the environment for Prefect
        print(api.ui)

    lease = lease_server()                    # or in two steps: start now,
    apply_environment(lease.environment)      # set the environment before Prefect is imported,
    ...                                       # do something useful meanwhile,
    lease.wait_until_healthy()                # wait for what is left of the start-up
    lease.close()
"""

import contextlib
import fcntl
import http.client
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import ClassVar
from urllib.parse import urlsplit
from zlib import crc32

from configs.common.files.reading import read_tail
from flows.server.process import END_SECONDS, LocalServer, locked, open_lock, prefect_version, read_server, try_lock
from flows.server.settings import (
    DATABASE,
    LOOPBACK,
    api_named_by_environment,
    apply_environment,
    data_folder,
    drain_prefect,
    prefect_environment,
    server_environment,
    ui_url,
)

HEALTHY_SECONDS = 90.0
DRAIN_SECONDS = 15.0
LOCAL_ANSWER_SECONDS = 10.0
"""For one answer of the local server."""
LINGER_SECONDS, LINGER_VARIABLE = 3.0, "RANKWISE_SERVER_LINGER"
MAX_LOG_BYTES = 10_000_000


class LocalServerError(RuntimeError):
    """The local Prefect server did not start, or is gone."""


def lease_server() -> "ApiLease":
    """Find or start the Prefect API, without waiting until it answers.

    An API that the environment names is taken as it is. Raises LocalServerError where none can be started.
    """
    if named := api_named_by_environment():
        return ApiLease(named)
    folder = data_folder()
    if "?" in str(folder):  # what follows is no part of a path in the URL of a database
        raise LocalServerError(
            f"{folder}: SQLite's URL takes no question mark. Set RANKWISE_DATA to another folder, or "
            "PREFECT_API_URL to a running API"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / "server.lock"):
            lease = open_lock(folder / "lease.lock")
            try:
                new = not (folder / DATABASE).exists()
                return ApiLease(_join_or_start(folder, lease).url, folder, lease, new)
            except BaseException:
                os.close(lease)
                raise
    except OSError as error:
        raise LocalServerError(
            f"{folder}: not writable by the local Prefect server ({error.strerror or error}). "
            "Set RANKWISE_DATA to a writable folder, or PREFECT_API_URL to a running API"
        ) from error


def _join_or_start(folder: Path, lease: int) -> LocalServer:
    """Take the lease, then give the server. The caller holds `server.lock`."""
    server, alone = read_server(folder), _nobody_else(lease)
    if server and not server.here and not alone:
        elsewhere = server.host != socket.gethostname()
        raise LocalServerError(
            f"{folder}: a run {f'on {server.host}' if elsewhere else 'in another network namespace of this machine'} "
            f"uses the Prefect server of this folder, which {socket.gethostname() if elsewhere else 'this one'} "
            "cannot reach. Set RANKWISE_DATA to another folder, or PREFECT_API_URL to an API for both"
        )
    fcntl.flock(lease, fcntl.LOCK_SH)
    if server and server.host == socket.gethostname() and server.alive:
        if server.here and (server.version == prefect_version() or not alone):
            return server
        _end(server)
    (folder / "server.json").unlink(missing_ok=True)
    return _start(folder)


def _nobody_else(lease: int) -> bool:
    """Whether no other run holds the lease. Asked more than once: the server, too, takes it for an instant."""
    for _ in range(4):
        if try_lock(lease):
            return True
        time.sleep(0.05)
    return False


def _end(server: LocalServer) -> None:
    """End a server that nobody uses."""
    deadline = time.monotonic() + END_SECONDS + 5
    order = signal.SIGTERM
    while server.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, order)
        time.sleep(0.1)
        order = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL


def _start(folder: Path) -> LocalServer:
    """Start a server in a session of its own; return when it has written server.json."""
    linger = _linger_seconds()
    log = folder / "server.log"
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        os.truncate(log, 0)
    with _listener(folder) as listener, log.open("ab") as output:
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/api"
        command = [sys.executable, "-P", "-m", "flows.server.process", str(folder), str(listener.fileno()), str(linger)]
        try:
            process = subprocess.Popen(
                command,
                # So that no `.env` or `prefect.toml` of where the user stands is read.
                cwd=folder,
                env=server_environment(url, folder),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            raise LocalServerError(f"local Prefect server: {sys.executable} could not be started: {error}") from error
        process.communicate()
    server = read_server(folder)
    if server is None:
        raise LocalServerError(f"the local Prefect server did not start; {_log_and_its_end(log)}")
    return server


def _linger_seconds() -> float:
    """Seconds that a server stays after the last run. Raises LocalServerError for what is no number of seconds."""
    given = os.environ.get(LINGER_VARIABLE, "").strip()
    try:
        seconds = float(given or LINGER_SECONDS)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise LocalServerError(f"{LINGER_VARIABLE}: got {given!r}, expected seconds, such as 60")
    return seconds


def _listener(folder: Path) -> socket.socket:
    """A listening socket on loopback: on the data folder's usual port if that is free, so that links stay good."""
    # Below the range from which Linux takes ports for outgoing connections.
    # A run whose server has ended must not come upon the server of another data folder there, and tell it of itself.
    named = os.environ.get("RANKWISE_DATA") or os.environ.get("XDG_DATA_HOME")
    usual = 20000 + (crc32(os.fsencode(folder.absolute())) if named else os.getuid()) % 10000
    for port in (usual, 0):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            cause = error
    raise LocalServerError(f"no free port on {LOOPBACK}: {cause}. Check that the loopback interface is up")


def _log_and_its_end(log: Path, lines: int = 20) -> str:
    """Where the log is, for a first line that may stand alone, and its last lines below it."""
    try:
        text = read_tail(log, 10_000)
    except OSError as error:
        return f"its log cannot be read: {error}"
    return "\n".join([f"its log is {log}", *(f"    {line}" for line in text.splitlines()[-lines:])])


def _answers(url: str, timeout_seconds: float) -> bool:
    """Whether the API says that it is healthy. Never asks a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=timeout_seconds):
            return True
    except (OSError, http.client.HTTPException):
        return False


class ApiLease:
    """The right to use a Prefect API for as long as this object is open.

    `home` is the data folder of the local server; None for an API that the environment names, which
    needs no lease. `creates_database`: the server is the first of its folder and needs some times as long to start.
    `lost` may be set where the API went away: nothing is sent to it any more.
    """

    held: ClassVar[ContextVar[int]] = ContextVar("held", default=0)
    """Leases of a local server that the caller's context holds. Those of other threads end when they want."""

    def __init__(
        self, url: str, home: Path | None = None, lock: int | None = None, creates_database: bool = False
    ) -> None:
        self.url = url
        self.home = home
        self.creates_database = creates_database
        self.lost = False
        self._lock = lock
        if lock is not None:
            ApiLease.held.set(ApiLease.held.get() + 1)

    @property
    def ui(self) -> str:
        """Where a browser shows the runs."""
        return ui_url(self.url)

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set before Prefect is imported, or with `apply_environment` at any time."""
        # A run whose API went away ends sooner than with Prefect's 5 retries and 60 s. The local server answers in a
        # second, on a very busy machine in several: as long as before the run (`tasks.prefect_api.api`) each answer is
        # waited for, or nothing of the run would be told. It is asked once again, for a connection may break.
        # Prefect drops the state of a task whose event it could not complete within them: who wants all of them from
        # an overloaded server sets longer limits.
        local = self.home is not None
        limits = {
            "PREFECT_CLIENT_MAX_RETRIES": "1" if local else "2",
            "PREFECT_API_REQUEST_TIMEOUT": f"{LOCAL_ANSWER_SECONDS:g}" if local else "20",
        }
        chosen = {name: os.environ[name] for name in limits if os.environ.get(name)}
        return prefect_environment(self.url, self.home) | limits | chosen

    def wait_until_healthy(self, timeout_seconds: float = HEALTHY_SECONDS) -> None:
        """Return when the local server answers; at once for an API that the environment names.

        Raises LocalServerError with the end of the server's log if it died or takes too long.
        """
        if self.home is None:
            return
        deadline = time.monotonic() + timeout_seconds
        # The socket listens from the beginning: a request waits in its queue and is answered as soon as
        # the server can. Only requests that were refused or ran out of time are made again.
        while not _answers(self.url, min(10.0, max(0.1, deadline - time.monotonic()))):
            self.check()
            if time.monotonic() > deadline:
                raise self._error(f"did not respond within {timeout_seconds:.0f} s")
            time.sleep(0.1)

    def check(self) -> None:
        """Raise LocalServerError if the local server is gone."""
        if self.home is not None and not self._alive():
            raise self._error("has ended")

    def why_gone(self) -> str | None:
        """In a line, that the local server is gone, which a refused connection does not say; None where it is there."""
        if self.home is None:
            return None
        what = "has ended"
        if self._alive():
            try:  # it closes its socket seconds before it ends where others keep the machine busy
                socket.create_connection((LOOPBACK, urlsplit(self.url).port or 0), LOCAL_ANSWER_SECONDS).close()
                return None
            except ConnectionRefusedError:
                what = "is ending"
            except OSError:
                return None
        return str(self._error(what)).splitlines()[0]

    def close(self) -> None:
        """Give the lease back, once the server has all that Prefect has to tell it.

        The server ends a few seconds after the last lease, or as many as RANKWISE_SERVER_LINGER says.
        """
        try:
            drain_prefect(DRAIN_SECONDS if not self.lost and (self.home is None or self._alive()) else 0.0)
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None
                ApiLease.held.set(max(0, ApiLease.held.get() - 1))

    def _alive(self) -> bool:
        assert self.home is not None
        server = read_server(self.home)
        return server is not None and server.url == self.url and server.alive

    def _error(self, what: str) -> LocalServerError:
        assert self.home is not None
        return LocalServerError(
            f"the local Prefect server at {self.url} {what}; {_log_and_its_end(self.home / 'server.log')}"
        )

    def __enter__(self) -> "ApiLease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def prefect_api(timeout_seconds: float = HEALTHY_SECONDS) -> Iterator[ApiLease]:
    """A Prefect API for the length of a block, with the environment of this process set for it."""
    with lease_server() as lease:
        apply_environment(lease.environment)
        lease.wait_until_healthy(timeout_seconds)
        yield lease


def serve_ui() -> int:
    """Print where the UI is. Where that is the local server's, keep it up until Ctrl-C. Returns the exit code."""
    with contextlib.suppress(KeyboardInterrupt), lease_server() as lease:
        lease.wait_until_healthy()
        print(f"Prefect UI: {lease.ui}", flush=True)
        if lease.home is None:
            return 0
        print("Press Ctrl-C to stop it (it continues while a run uses it).", flush=True)
        while True:
            time.sleep(1)
            lease.check()
    return 0
