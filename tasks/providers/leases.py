"""The ledger of one rental: a file of lines, each on disk before the call that it announces.

    with open_ledger(folder) as ledger:                        # one process at a time
        ledger.write("create", token=..., region=...)          # fsynced; then the create call
        ledger.write("created", token=..., ids=[...])

The folder, `<data>/rented/<run>/`, also holds `lease.json` and the run's SSH keys. The ledger says what
was asked; the tags in the cloud say what is there. A `create` without an answer is settled by listing the tags.
"""

import errno
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from configs.common.base import utc_now
from configs.common.files.flushing import flush_file
from configs.common.files.reading import open_regular, read_bytes, read_model
from configs.common.system.lock_files import locks_needed
from configs.hardware.node_names import Cloud
from tasks.providers.rental import RentalLease, Rung

_USER_LOCK = "in_use.lock"
"""Held by the run of a study while it uses the nodes; those of `rankwise nodes up` have none."""
_TRIES, _PAUSE_SECONDS = 10, 0.02
"""Who only looks holds a lock for a moment too: it must not keep a command from its rental."""
_NAMESPACE = uuid.UUID("6b0f3d3e-6f0c-5a57-9f5e-7d1f0c7f2a10")
_LEDGER_BYTES = 8 << 20
SETTLED_SECONDS = 60.0
"""After this long an unanswered create call has either left a resource with tags or done nothing."""


class RentalHeld(ValueError):
    """Another process is at work on a rental, or uses its nodes."""


class RentalLedger:
    """An open ledger. `entries` are its lines, those of earlier processes first."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle
        # A crash or a full disk may have cut the last line; an empty one is skipped.
        self._cut = path.stat().st_size > 0
        self.entries = read_entries(path)

    def write(self, event: str, **details: Any) -> None:
        """Append one line and flush it to the disk. Raises OSError; then nothing may be created."""
        entry = {"at": utc_now(), "epoch": time.time(), "event": event, **details}
        line = (json.dumps(entry, sort_keys=True) + "\n").encode()
        if self._cut:
            line = b"\n" + line
        self._cut = True
        if os.write(self._handle, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fsync(self._handle)
        self._cut = False
        self.entries.append(entry)

    def note(self, event: str, **details: Any) -> None:
        """Append one line where the disk takes it: what is given back does not stay up for want of a line."""
        with suppress(OSError):
            self.write(event, **details)


@contextmanager
def open_ledger(folder: Path, only_looks: bool = False) -> Iterator[RentalLedger]:
    """Open the ledger of a run's folder for writing.

    Raises RentalHeld while another process holds it, and ValueError where the file system has no locks.
    only_looks: for who asks whether it is held, and writes nothing; others wait for such a look.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "ledger.jsonl"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            _lock(handle, fcntl.LOCK_EX, folder, 1 if only_looks else _TRIES)
        except BlockingIOError:
            raise RentalHeld(f"{folder.name}: another command is at work on it. Wait until it has ended") from None
        flush_file(folder)  # its entry for the ledger, too
        yield RentalLedger(path, handle)
    finally:
        os.close(handle)


def _lock(file: int | IO[bytes], how: int, folder: Path, tries: int = 1) -> None:
    """Lock a file of a rental's folder. Raises BlockingIOError: it is held, ValueError: there are no locks."""
    with locks_needed(folder, "set RANKWISE_DATA to a folder of another one"):
        for tries_left in reversed(range(tries)):
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not tries_left:
                    raise
                time.sleep(_PAUSE_SECONDS)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger; the last one is left out where a crash has cut it."""
    if not path.exists():
        return []
    entries = []
    for line in read_bytes(path, _LEDGER_BYTES).split(b"\n"):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [entry for entry in entries if isinstance(entry, dict) and "event" in entry]


def token_of(lease: RentalLease, attempt: int, rung: Rung) -> str:
    """Return the idempotency token of one create call: a UUID, as GCP wants it; AWS takes any 64 characters.

    It names place and market, because AWS refuses a token that is used again with other parameters, for a day after
    its nodes are gone. Owner and end tell this rental from one of the same name in another data folder, whose ledger
    and keys are not here: Google would answer with that one's operation, and make nothing.
    """
    rental = f"{lease.run}/{lease.owner}/{lease.expires_at}"
    return str(uuid.uuid5(_NAMESPACE, f"{rental}/{attempt}/{rung.region}/{rung.zone}/{rung.market}"))


def read_lease(folder: Path) -> RentalLease:
    """Read the lease of a run's folder. Raises ValueError, FileNotFoundError."""
    return read_model(folder / "lease.json", RentalLease)


def not_given_back(rented: Path) -> dict[Cloud, list[str]]:
    """Return the rentals below a folder that have ended and may have left something in a cloud, by its name.

    Not those in use or kept for a later run, until they expire. Damaged ones are left out.
    """
    found: dict[Cloud, list[str]] = {}
    for path in sorted(rented.glob("*/lease.json")):
        with suppress(OSError, ValueError):
            entries = read_entries(path.parent / "ledger.jsonl")
            over = entries and entries[-1]["event"] != "given_back"
            if over and (_has_expired(entries) or is_dead(path.parent)):
                found.setdefault(read_lease(path.parent).request.provider, []).append(path.parent.name)
    return found


def unsettled_seconds(entries: list[dict[str, Any]], now: float, settle: float = SETTLED_SECONDS) -> float:
    """Return how long to wait until every create call without an answer can be seen in the tags; 0: none is open."""
    answered = {entry.get("token") for entry in entries if entry["event"] in ("created", "refused")}
    calls = [entry for entry in entries if entry["event"] in ("create", "create_again")]
    return max((entry["epoch"] + settle - now for entry in calls if entry.get("token") not in answered), default=0.0)


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Hold the nodes of a run for this process, which alone may use them.

    Raises RentalHeld while another does, and ValueError where the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / _USER_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            _lock(handle, fcntl.LOCK_EX, folder, _TRIES)
        except BlockingIOError:
            raise RentalHeld(f"{folder.name}: another run uses these nodes") from None
        yield
    finally:
        os.close(handle)


def mark_used(folder: Path) -> None:
    """Note that a run uses these nodes now; only the one that holds them calls it."""
    os.utime(folder / _USER_LOCK)


def last_used(folder: Path) -> float | None:
    """Return when a run last used these nodes, in seconds since 1970; None: none has."""
    try:
        return (folder / _USER_LOCK).stat().st_mtime
    except FileNotFoundError:
        return None


def note_abandoned(ledger: RentalLedger, used: float | None) -> None:
    """Note that no run takes these nodes over: they were unused from `used` (seconds since 1970) to their end."""
    if ledger.entries and used is not None:
        ledger.note("abandoned", last_used=used)


def is_over(ledger: RentalLedger) -> bool:
    """Return whether the nodes of a rental have ended with their lease."""
    return _has_expired(ledger.entries)


def _has_expired(entries: list[dict[str, Any]]) -> bool:
    end = _last_end(entries)
    return end is not None and end <= time.time()


def known_end(folder: Path) -> float | None:
    """Return when the nodes of a rental end by its ledger, in seconds since 1970; None where it says nothing."""
    return _last_end(read_entries(folder / "ledger.jsonl"))


def _last_end(entries: list[dict[str, Any]]) -> float | None:
    ends = [entry["expires_at"] for entry in entries if "expires_at" in entry]
    return float(ends[-1]) if ends else None


def is_dead(folder: Path) -> bool:
    """Return whether no process is renting or giving back for this run, and its nodes are not up either.

    Nodes that are ready need no process, unless a study rented them: they live until they expire. The kernel's lock
    ends with its process. Raises OSError and ValueError where that cannot be known, as on a file system without locks.
    """
    entries = read_entries(folder / "ledger.jsonl")
    if not entries:
        return False
    if entries[-1]["event"] == "kept":
        return False  # for a later run, until they expire
    if entries[-1]["event"] in ("ready", "extended"):
        return _is_abandoned(folder)
    if not any(entry["event"] == "opened" for entry in entries):
        # Rented from another machine, which may have rented anew: `reap` removed something of it from here.
        return False
    try:
        with open_ledger(folder, only_looks=True):
            return True
    except RentalHeld:
        return False


def _is_abandoned(folder: Path) -> bool:
    """Return whether a study rented these nodes, and its run has ended without giving them back."""
    try:
        with open_regular(folder / _USER_LOCK) as file:
            _lock(file, fcntl.LOCK_SH, folder)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True
