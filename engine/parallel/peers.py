"""Identities of ranks, liveness checks, and attribution of a failure to the rank that caused it.

    me = identify(rank)                      # exchanged among all ranks when communicators are opened
    blame = Blame(identities, store, rank, limit_seconds)
    error = blame.find("all_reduce", ranks, suspect, silent)        # a PeerLostError to raise

A rank that timed out may have waited for a live rank that itself waits for another. So every rank that gives up writes
the suspected rank to the store, and the chain of suspects is followed to its end.
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

from configs.common.system.proc import is_alive, start_ticks

_KEY = "rankwise/blame"
_STORE_SECONDS = 2.0
_POLL_SECONDS = 0.02


class PeerLostError(RuntimeError):
    """Another rank ended, or exceeded the time limit (`silent`). `rank` is None if it is not known which."""

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
    """A rank's process. `host_key` is equal for ranks that can observe each other's processes."""

    rank: int
    host_key: str
    host: str
    pid: int
    started: int
    cores: tuple[int, ...]


def host_key() -> str:
    """Return the boot id, host name and PID namespace shared by two ranks of one host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"  # without /proc ranks cannot observe each other
    return f"{boot} {namespace} {socket.gethostname()}"


def identify(rank: int) -> Identity:
    """Return this process's identity, and the cores that it may use."""
    pid = os.getpid()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Identity(rank, host_key(), socket.gethostname(), pid, start_ticks(pid), cores)


def too_many_for_cores(identities: Iterable[Identity]) -> bool:
    """Return whether the ranks of some host outnumber the cores that they may use together."""
    hosts: dict[str, list[Identity]] = {}
    for identity in identities:
        hosts.setdefault(identity.host_key, []).append(identity)
    return any(len(ranks) > len({core for rank in ranks for core in rank.cores}) for ranks in hosts.values())


class Blame:
    """Attributes a failure to a rank. `store` is a torch.distributed store of all ranks, or None."""

    def __init__(self, identities: Mapping[int, Identity], store: Any, rank: int, limit_seconds: float) -> None:
        self.identities = identities
        self._store = store
        self._own = identities[rank]
        self._limit_seconds = limit_seconds

    @property
    def patience_seconds(self) -> float:
        """Seconds that a rank waits for the findings of others after it gave up; part of the time limit."""
        return min(1.0, self._limit_seconds / 5)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank's process has ended; False if it cannot be observed from here."""
        peer = self.identities[rank]
        return peer.host_key == self._own.host_key and not is_alive(peer.pid, peer.started)

    def find(self, operation: str, ranks: Iterable[int], suspect: int | None, silent: bool) -> PeerLostError:
        """Return the error to raise after `operation` among `ranks` failed.

        `suspect`: the rank waited for, if known.
        """
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
        """Return which of the ranks ended. Its sockets close shortly before its process ends."""
        while True:
            for rank in others:
                if self.is_gone(rank):
                    return rank
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_SECONDS)

    def _named(self, others: list[int], suspect: int | None, deadline: float) -> int | None:
        """Return the failed rank: if uncertain, only after the deadline. None: it cannot be determined."""
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
        """Follow the chain from the suspect to the rank that it suspects, and so on."""
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
        """Read the suspect of each rank that gave up."""

        def read(store: Any) -> dict[int, int | None]:
            keys = {rank: f"{_KEY}/{rank}" for rank in ranks}
            return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

        return self._ask(read) or {}

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the store's answer; None if it does not answer, for example if the rank that serves it is lost."""
        if self._store is None:
            return None
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question(self._store))
            except Exception:  # torch's store errors have no common class
                answers.append(None)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        if not answers:
            self._store = None  # its thread still waits in the store
            return None
        return answers[0]
