"""Who the other ranks are, whether they still live, and which of them is to blame when one does not come.

    me = identify(rank)                      # exchanged among all ranks when communicators are opened
    blame = Blame(identities, store, rank)
    error = blame.find("all_reduce", ranks, suspect, silent)        # a PeerLostError to raise

A rank that waits in vain for another may find it alive, waiting in vain itself. So every rank that gives up
writes into the store whom it blames, and who is blamed by a blamed one takes its place.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.processes import start_ticks

_KEY = "rankwise/blame"
_STORE_SECONDS = 2.0
_POLL_SECONDS = 0.02


class PeerLostError(RuntimeError):
    """Another rank ended, or did not come within the time limit (`silent`). `rank` is None if it is not known which."""

    def __init__(self, rank: int | None, host: str | None, operation: str, silent: bool, limit_seconds: float) -> None:
        who = "a peer, it is not known which one," if rank is None else f"rank {rank} on host {host}"
        what = f"did not arrive within {limit_seconds:g} s" if silent else "is gone: its process has ended"
        super().__init__(f"{who} {what} (while this rank was in {operation})")
        self.rank = rank
        self.host = host
        self.operation = operation
        self.silent = silent


@dataclass(frozen=True)
class Identity:
    """A rank's process. `host_key` is equal for ranks that can see each other's processes."""

    rank: int
    host_key: str
    host: str
    pid: int
    started: int
    cores: tuple[int, ...]


def host_key() -> str:
    """This boot of this kernel, host name and namespace of processes: what two ranks of one host share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # without /proc no rank can find another
    return f"{boot} {namespace} {socket.gethostname()}"


def identify(rank: int) -> Identity:
    """This process, and the cores that it may use."""
    pid = os.getpid()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Identity(rank, host_key(), socket.gethostname(), pid, start_ticks(pid), cores)


def process_is_gone(pid: int, started: int) -> bool:
    """Whether a process of this host has ended; one that nobody has waited for yet counts as ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False  # as where no more files can be opened: it says nothing of the other process
    return fields[0] in "ZX" or int(fields[19]) != started


def too_many_for_cores(identities: Iterable[Identity]) -> bool:
    """Whether ranks of some host outnumber the cores that they may use together."""
    hosts: dict[str, list[Identity]] = {}
    for identity in identities:
        hosts.setdefault(identity.host_key, []).append(identity)
    return any(len(ranks) > len({core for rank in ranks for core in rank.cores}) for ranks in hosts.values())


class Blame:
    """Finds out who was lost. `store` is a torch.distributed store of all ranks, None without one."""

    def __init__(self, identities: Mapping[int, Identity], store: Any, rank: int, limit_seconds: float) -> None:
        self.identities = identities
        self._store = store
        self._own = identities[rank]
        self._limit_seconds = limit_seconds

    @property
    def patience_seconds(self) -> float:
        """How long a rank that gave up waits to hear what the others found; part of the time limit."""
        return min(1.0, self._limit_seconds / 5)

    def is_gone(self, rank: int) -> bool:
        """Whether a rank's process has ended; False where it cannot be seen from here."""
        peer = self.identities[rank]
        return peer.host_key == self._own.host_key and process_is_gone(peer.pid, peer.started)

    def find(self, operation: str, ranks: Iterable[int], suspect: int | None, silent: bool) -> PeerLostError:
        """The error to raise where `operation` among `ranks` failed. `suspect`: whom this rank waited for, if known."""
        others = [rank for rank in ranks if rank != self._own.rank]
        deadline = time.monotonic() + self.patience_seconds
        if suspect is None:
            suspect = self._gone(others, until=time.monotonic() if silent else deadline)
        self._tell(suspect)
        named = self._named(others, suspect, deadline)
        if named is not None:
            self._tell(named)
            silent = silent and not self.is_gone(named)
        host = None if named is None else self.identities[named].host
        return PeerLostError(named, host, operation, silent, self._limit_seconds)

    def _gone(self, others: list[int], until: float) -> int | None:
        """Which of the ranks ended. Its sockets close a moment before its process is seen to end."""
        while True:
            for rank in others:
                if self.is_gone(rank):
                    return rank
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_SECONDS)

    def _named(self, others: list[int], suspect: int | None, deadline: float) -> int | None:
        """Who is to blame: where that is not sure, known at the deadline only. None: there is no telling."""
        while True:
            said = self._read(others)
            first = suspect if suspect is not None else next((whom for whom in said.values() if whom is not None), None)
            found = None if first is None else self._followed(first)
            if found is not None and self.is_gone(found):
                return found
            if time.monotonic() > deadline:
                quiet = [rank for rank in others if rank not in said]
                return quiet[0] if found is None and len(quiet) == 1 else found
            time.sleep(_POLL_SECONDS)

    def _followed(self, suspect: int) -> int:
        """From the suspect to the one that it blames, and so on."""
        seen: list[int] = []
        while suspect not in seen:
            seen.append(suspect)
            whom = self._read([suspect]).get(suspect)
            if whom is None:
                break
            suspect = whom
        return suspect

    def _tell(self, suspect: int | None) -> None:
        key, said = f"{_KEY}/{self._own.rank}", json.dumps(suspect)
        self._ask(lambda store: store.set(key, said))

    def _read(self, ranks: Iterable[int]) -> dict[int, int | None]:
        """Whom each rank blames, of those that gave up."""

        def read(store: Any) -> dict[int, int | None]:
            keys = {rank: f"{_KEY}/{rank}" for rank in ranks}
            return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

        return self._ask(read) or {}

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """An answer of the store; None where it does not answer, as when the rank that serves it is lost."""
        if self._store is None:
            return None
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question(self._store))
            except Exception:  # torch's errors of a store have no common class
                answers.append(None)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        if not answers:
            self._store = None  # its thread still waits in it
            return None
        return answers[0]
