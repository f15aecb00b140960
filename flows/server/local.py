"""The Prefect API of a run: the user's own, or a local server that ends with its last run.

If the environment names an API, that one is used and nothing is started. Else a server is started on
the loopback interface with a SQLite file in the user's data folder; all runs of the user on this
machine share it. Each run holds a lease (a shared file lock, so that it ends with the process whatever
happens to it); `flows.server.guard` ends the server when there is none left.

    with prefect_api() as api:                # starts, waits, sets the environment for Prefect
        print(api.ui)

    lease = begin()                           # or in two steps: start now,
    apply_environment(lease.environment)      # set the environment before Prefect is imported,
    ...                                       # do something useful meanwhile,
    lease.wait_until_healthy()                # wait for what is left of the start-up
    lease.close()
"""

import contextlib
import fcntl
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from flows.server.guard import END_SECONDS, Guard, locked, open_lock, prefect_version, read_guard, try_lock
from flows.server.settings import (
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
MAX_LOG_BYTES = 10_000_000


class LocalServerError(RuntimeError):
    """The local Prefect server did not start, or is gone."""


def begin(wait_for_named_seconds: float = 0.0) -> "Lease":
    """Find or start the Prefect API, without waiting until it answers.

    An API that the environment names is taken as it is; where `wait_for_named_seconds` is given and it does
    not answer for so long, a local server is started in its place and the lease says so: a machine that was
    reserved for measuring must not stand idle because a server elsewhere is away.

    Raises ValueError where the data folder cannot be used, LocalServerError where nothing starts.
    """
    named = api_named_by_environment()
    if named and (not wait_for_named_seconds or _reachable(named, wait_for_named_seconds)):
        return Lease(named)
    folder = data_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(folder / "server.lock"):
            lease = open_lock(folder / "lease.lock")
            try:
                return Lease(_join_or_start(folder, lease).url, folder, lease, instead_of=named)
            except BaseException:
                os.close(lease)
                raise
    except OSError as error:
        raise ValueError(
            f"{folder}: not writable by the local Prefect server ({error.strerror or error}). "
            "Set RANKWISE_DATA to a writable folder, or PREFECT_API_URL to a running API"
        ) from error


def _join_or_start(folder: Path, lease: int) -> Guard:
    """Take the lease, then give the guard of the server. The caller holds `server.lock`."""
    guard, alone = read_guard(folder), _nobody_else(lease)
    if guard and not guard.here and not alone:
        elsewhere = guard.host != socket.gethostname()
        raise LocalServerError(
            f"{folder}: a run {f'on {guard.host}' if elsewhere else 'in another network namespace of this machine'} "
            f"uses the Prefect server of this folder, which {socket.gethostname() if elsewhere else 'this one'} "
            "cannot reach. Set RANKWISE_DATA to another folder, or PREFECT_API_URL to an API for both"
        )
    fcntl.flock(lease, fcntl.LOCK_SH)
    if guard and guard.host == socket.gethostname() and guard.alive:
        if guard.here and (guard.version == prefect_version() or not alone):
            return guard
        _end(guard)
    (folder / "server.json").unlink(missing_ok=True)
    return _start(folder)


def _nobody_else(lease: int) -> bool:
    """Whether no other run holds the lease. Asked more than once: the guard, too, takes it for an instant."""
    for _ in range(4):
        if try_lock(lease):
            return True
        time.sleep(0.05)
    return False


def _end(guard: Guard) -> None:
    """End a server that nobody uses."""
    deadline = time.monotonic() + END_SECONDS + 5
    order = signal.SIGTERM
    while guard.alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(guard.pid, order)
        time.sleep(0.1)
        order = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL


def _start(folder: Path) -> Guard:
    """Start guard and server in a session of their own; give the guard as soon as it has announced itself."""
    log = folder / "server.log"
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        os.truncate(log, 0)
    with _listener() as listener, log.open("ab") as output:
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/api"
        command = [sys.executable, "-P", "-m", "flows.server.guard", "watch", str(folder), str(listener.fileno())]
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
    guard = read_guard(folder)
    if guard is None:
        raise LocalServerError(f"the local Prefect server did not start.\n{_end_of_log(log)}")
    return guard


def _listener() -> socket.socket:
    """A listening socket on loopback: on the user's usual port if that is free, so that links stay good."""
    # Below the range from which Linux takes ports for outgoing connections.
    usual = 20000 + os.getuid() % 10000
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


def _end_of_log(log: Path, lines: int = 20) -> str:
    try:
        text = log.read_text(errors="replace")[-10_000:]
    except OSError as error:
        return f"The log cannot be read: {error}"
    return f"The end of {log}:\n" + "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


def _answers(url: str, timeout_seconds: float) -> bool:
    """Whether the API says that it is healthy. Never asks a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=timeout_seconds):
            return True
    except (OSError, http.client.HTTPException):
        return False


def _reachable(url: str, timeout_seconds: float) -> bool:
    """Whether somebody answers there, be it with an error, asked as Prefect asks: through the user's proxy."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=max(1.0, deadline - time.monotonic())):
                return True
        except urllib.error.HTTPError:
            return True
        except (OSError, http.client.HTTPException):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)


class Lease:
    """The right to use a Prefect API for as long as this object is open.

    `home` is the data folder of the local server; None for an API that the environment names, which
    needs no lease. `instead_of` is an API that the environment names and that did not answer.
    """

    def __init__(
        self, url: str, home: Path | None = None, lock: int | None = None, instead_of: str | None = None
    ) -> None:
        self.url = url
        self.instead_of = instead_of
        self.home = home
        self._lock = lock

    @property
    def ui(self) -> str:
        """Where a browser shows the runs."""
        return ui_url(self.url)

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set before Prefect is imported, or with `apply_environment` at any time."""
        return prefect_environment(self.url, self.home)

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

    def close(self) -> None:
        """Give the lease back, once the server has all that Prefect has to tell it.

        The server ends a few seconds after the last lease.
        """
        if self._lock is None:
            return
        try:
            if self._alive():
                drain_prefect(DRAIN_SECONDS)
        finally:
            os.close(self._lock)
            self._lock = None

    def _alive(self) -> bool:
        assert self.home is not None
        guard = read_guard(self.home)
        return guard is not None and guard.url == self.url and guard.alive

    def _error(self, what: str) -> LocalServerError:
        assert self.home is not None
        return LocalServerError(
            f"the local Prefect server at {self.url} {what}.\n{_end_of_log(self.home / 'server.log')}"
        )

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def prefect_api(timeout_seconds: float = HEALTHY_SECONDS) -> Iterator[Lease]:
    """A Prefect API for the length of a block, with the environment of this process set for it."""
    with begin() as lease:
        apply_environment(lease.environment)
        lease.wait_until_healthy(timeout_seconds)
        yield lease


def serve_ui() -> None:
    """Print where the UI is. Where that is the local server's, keep it up until Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt), begin() as lease:
        lease.wait_until_healthy()
        print(f"Prefect UI: {lease.ui}", flush=True)
        if lease.home is None:
            return
        print("Press Ctrl-C to stop it (it continues while a run uses it).", flush=True)
        while True:
            time.sleep(1)
            lease.check()
