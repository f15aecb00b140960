"""A slot of the machine's global concurrency limit, held while a launch of ours is under way.

The limit `rankwise-<host>` makes the machine's use visible in Prefect's UI, lets an administrator close the
machine (limit 0), and lets other flows keep off it. That two launches never overlap does not rest on it
(`slurm.turn` sees to that), so an API that does not answer never stops a measurement. A limit that does not
exist is an error: nobody would notice that it holds nothing.

Prefect's own context manager waits as long as the server advises, up to half a minute while the machine
stands idle, asks on the path of the measurement, and dies with the API. Here a thread brings what is held to
what is wanted, again and again, and nobody waits for it longer than a moment unless the slots are taken.
"""

import fcntl
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL

from slurm.turn import POLL_SECONDS, lock_folder, machine_lock
from tasks.api import quick_client
from tasks.board import Row
from tasks.cancellation import LONGEST_PAUSE_SECONDS, ApiWatcher

LEASE_SECONDS = 60.0
"""The shortest that Prefect allows."""
_RENEW_SECONDS = 20.0
_LOOK_SECONDS = 1.0
_BUSY_SECONDS = 0.2
_PATIENCE_SECONDS = 3.0
"""So long a launch waits for an API that does not answer."""
_GIVE_BACK_SECONDS = 0.5
_LOCKED = 423
_GONE = 410
_LEASE_FILES = "rankwise-lease-"


class LimitMissing(ValueError):
    """The machine's concurrency limit does not exist in the API."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the concurrency limit {name} does not exist in the Prefect API {PREFECT_API_URL.value()}; create it with "
            f"`rankwise deploy-flows` or `prefect gcl create {name} --limit 1`"
        )


def limit_name() -> str:
    """Name of the global concurrency limit of this machine."""
    return f"rankwise-{socket.gethostname()}"


def ensure_limit(client: SyncPrefectClient) -> bool:
    """Create this machine's limit, of one slot, if there is none. Returns whether it was created."""
    try:
        client.read_global_concurrency_limit_by_name(limit_name())
        return False
    except ObjectNotFound:
        try:
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=limit_name(), limit=1))
        except ObjectAlreadyExists:
            return False
        return True


class MachineSlot:
    """The slot of one run: taken for each launch, given back after it. A context: leaving it ends the thread."""

    def __init__(self, watcher: ApiWatcher, flow_run_id: UUID) -> None:
        self._watcher = watcher
        self._holder = ConcurrencyLeaseHolder(type="flow_run", id=flow_run_id)
        self._changed = threading.Condition()
        self._wanted = self._ended = self._told = False
        self._heard, self._away = 0.0, False
        self._lease: _Lease | None = None
        self._missing: LimitMissing | None = None
        self._thread = threading.Thread(target=self._keep_up, name="slot", daemon=True)

    def __enter__(self) -> "MachineSlot":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._want(False)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE_SECONDS)

    def prepare(self, create: bool) -> None:
        """See that the limit exists; `create` it for an API that is this user's own. Raises LimitMissing.

        In such an API only runs of this user on this machine take slots; those of none that lives are freed.
        """
        try:
            with quick_client() as client:
                if create and not ensure_limit(client):
                    _free_slots_of_nobody(client)
                client.read_global_concurrency_limit_by_name(limit_name())
        except ObjectNotFound as error:
            raise LimitMissing(limit_name()) from error
        except httpx.HTTPError as error:
            self._tell(f"the Prefect API does not say whether {limit_name()} exists: {error}")

    @contextmanager
    def held(self, row: Row) -> Iterator[None]:
        """Hold the slot for the block, waiting while others have it; `row` says so meanwhile.

        Raises LimitMissing, and RunCancelled if the run is cancelled while it waits.
        """

        def waits() -> bool:
            self._watcher.check()
            self._waits(row, POLL_SECONDS)
            return False

        try:
            # Who waits longest asks, and only he: a run that has just given its slot back stands behind him.
            with machine_lock("queue", waits):
                self._want(True)
                self._wait_for_slot(row)
            yield
        finally:
            self._want(False)
            with self._changed:
                # Given back before it is asked for again: others must get their turn.
                self._changed.wait_for(lambda: self._lease is None, _GIVE_BACK_SECONDS)

    def _wait_for_slot(self, row: Row) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lease or self._missing, _GIVE_BACK_SECONDS)
                if self._missing:
                    raise self._missing
                if self._lease:
                    row.note = ""
                    return
                silent_seconds = time.monotonic() - self._heard
            self._watcher.check()
            if silent_seconds > (0 if self._away else _PATIENCE_SECONDS):
                self._away = True
                self._tell(f"measured without a slot of {limit_name()}: the Prefect API does not answer")
                row.note = ""
                return
            self._waits(row, _GIVE_BACK_SECONDS)

    @staticmethod
    def _waits(row: Row, seconds: float) -> None:
        row.state, row.note = "waiting", f"for a slot of {limit_name()}"
        row.waited_seconds += seconds

    def _want(self, wanted: bool) -> None:
        with self._changed:
            self._wanted, self._heard = wanted, time.monotonic()
            self._changed.notify_all()

    def _tell(self, line: str) -> None:
        if not self._told:
            get_run_logger().warning(line)
        self._told = True

    def _keep_up(self) -> None:
        """The thread: bring what is held to what is wanted, until the run has ended and nothing is held."""
        pause = _LOOK_SECONDS
        while True:
            try:
                # The answer is waited for: a slot that is granted to who no longer listens is lost for a minute.
                with quick_client(retries=0, answer_seconds=2 * LEASE_SECONDS) as client:
                    while self._step(client):
                        pause = _LOOK_SECONDS
                    return
            except LimitMissing as error:
                with self._changed:
                    self._missing = error
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._ended)
                return
            except httpx.HTTPStatusError:
                pause = _BUSY_SECONDS  # SQLite was locked: 503
            except (httpx.HTTPError, OSError):
                # The API is away; another client may reach it, but to make one costs CPU that cells may want.
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            with self._changed:
                if self._ended and not self._lease:
                    return
            time.sleep(pause)

    def _step(self, client: SyncPrefectClient) -> bool:
        """One look at what is wanted, and what is to be done for it. False at the end."""
        with self._changed:
            wanted, lease, ended = self._wanted, self._lease, self._ended
        if wanted and lease is None:
            self._ask(client)
            self._wait(_LOOK_SECONDS, lambda: not self._wanted)
        elif not wanted and lease is not None:
            _release(client, lease.identifier)
            self._hold(None)
        elif lease is not None and time.monotonic() - lease.renewed > _RENEW_SECONDS:
            self._renew(client, lease)
        elif ended:
            return False
        else:
            self._wait(_RENEW_SECONDS, lambda: self._wanted != wanted or self._ended)
        return True

    def _wait(self, seconds: float, changed: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(changed, seconds)

    def _ask(self, client: SyncPrefectClient) -> None:
        """One try to get a slot. Raises LimitMissing."""
        try:
            answer = client.increment_concurrency_slots_with_lease(
                [limit_name()], 1, "concurrency", LEASE_SECONDS, self._holder
            ).json()
        except httpx.HTTPStatusError as error:
            if error.response.status_code != _LOCKED:
                raise
            self._heard, self._away = time.monotonic(), False  # others have it
            _release_leases_of_the_dead(client)
            return
        self._away = False
        if not answer["limits"]:
            raise LimitMissing(limit_name())
        self._hold(_Lease(UUID(answer["lease_id"])))

    def _renew(self, client: SyncPrefectClient, lease: "_Lease") -> None:
        try:
            client.renew_concurrency_lease(lease.identifier, LEASE_SECONDS)
            lease.renewed = time.monotonic()
        except ObjectNotFound:
            self._hold(None)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != _GONE:
                raise
            self._hold(None)  # the API was away for longer than a lease lasts, and forgot it

    def _hold(self, lease: "_Lease | None") -> None:
        with self._changed:
            if self._lease is not None:
                self._lease.close()
            self._lease = lease
            self._changed.notify_all()


class _Lease:
    """A slot that is held, with a file that is locked as long as this process lives."""

    def __init__(self, identifier: UUID) -> None:
        self.identifier = identifier
        self.renewed = time.monotonic()
        self._path = lock_folder() / f"{_LEASE_FILES}{identifier}"
        self._file: IO[str] | None = None
        # Without the file (a full disk) a run that is killed leaves the slot taken until the lease ends.
        with suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=self._path.parent)
            self._file = os.fdopen(descriptor, "w")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(str(PREFECT_API_URL.value()))
            self._file.flush()
            os.rename(name, self._path)  # only now, locked and whole, can it be found

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()


def _release(client: SyncPrefectClient, lease: UUID) -> None:
    """Give a slot back, unless the API has forgotten it. Raises httpx.HTTPError where it should be tried again."""
    try:
        client.release_concurrency_slots_with_lease(lease)
    except ObjectNotFound:
        pass
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            raise


def _free_slots_of_nobody(client: SyncPrefectClient) -> None:
    """A server that is killed after it counted a slot and before it wrote the lease leaves the slot taken for ever."""
    held = _release_leases_of_the_dead(client)
    limit = client.read_global_concurrency_limit_by_name(limit_name())
    if limit.active_slots and not held:
        client.update_global_concurrency_limit(limit_name(), GlobalConcurrencyLimitUpdate(active_slots=0))


def _release_leases_of_the_dead(client: SyncPrefectClient) -> int:
    """Give back what runs of this user took and can give back no more, instead of waiting for the lease's end.

    Returns how many leases runs that live hold.
    """
    held = 0
    for path in lock_folder().glob(f"{_LEASE_FILES}*"):
        # Everybody may write there: only what is a file of this user's is believed, and nothing else waited for.
        with (
            suppress(OSError, ValueError),
            os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file,
        ):
            if os.fstat(file.fileno()).st_uid != os.getuid() or file.read() != PREFECT_API_URL.value():
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held += 1
                continue
            _release(client, UUID(path.name.removeprefix(_LEASE_FILES)))
            path.unlink()
    return held
