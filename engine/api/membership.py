"""Rendezvous of an orchestrator's ranks, at the start and after the loss of a rank.

    meeting = Membership(rank, world_size, "127.0.0.1", 29500, timeout_seconds)
    meeting.wait_for_all()
    store = meeting.store("group-0")        # for torch.distributed.init_process_group
    members = meeting.assemble(1, expected={0, 2})      # the ranks present, equal on all of them

Rank 0 serves the store that all use. It may be the lost rank, so every other rank keeps a small store ready, and after
a loss the ranks use the first one that answers.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from engine.rank.stores import join_store, serve_store

_MIN_ANSWER_SECONDS, _ANSWER_SHARE = 2.0, 0.5
"""How long a store may take to answer, at least and as a share of the time limit: one that is only slow must not be
taken for lost, or the ranks go on in two groups."""
_POLL_SECONDS = 0.02


class Membership:
    """One rank's rendezvous. Raises ValueError if the port is taken, TimeoutError if rank 0 is not reachable.

    All calls of one rank come from one thread; all ranks use the same address and port.
    """

    def __init__(self, rank: int, world_size: int, address: str, port: int, timeout_seconds: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._timeout_seconds = timeout_seconds
        self._answer_seconds = max(_MIN_ANSWER_SECONDS, _ANSWER_SHARE * timeout_seconds)
        self._address, self._port = address, port
        self._main = self._open_main()
        self._own: Any = None
        self._addresses: dict[int, tuple[str, int]] = {}

    def wait_for_all(self) -> None:
        """Return when every rank has arrived. Raises TimeoutError naming the missing ones."""
        if self.rank:
            here = self._reachable_address()
            self._own = self._serve(here)
            self._main.set(f"address/{self.rank}", json.dumps([here, self._own.port]))
        keys = {rank: f"address/{rank}" for rank in range(1, self.world_size)}
        try:
            self._main.wait(list(keys.values()), timedelta(seconds=self._timeout_seconds))
        except RuntimeError:
            missing = [rank for rank, key in keys.items() if not self._main.check([key])]
            raise TimeoutError(
                f"initialize: ranks {', '.join(map(str, missing))} of {self.world_size} did not come to "
                f"{self._address}:{self._port} within {self._timeout_seconds:g} s"
            ) from None
        for rank, key in keys.items():
            address, port = json.loads(self._main.get(key))
            self._addresses[rank] = (address, port)

    def close(self) -> None:
        """Give up the stores that this rank serves or uses; their ports are free then."""
        self._main = self._own = None

    def store(self, name: str) -> Any:
        """Return a part of the store for one group, with a separate prefix."""
        return dist.PrefixStore(name, self._main)  # type: ignore[attr-defined]  # not in __all__

    def assemble(self, number: int, expected: Iterable[int]) -> list[int] | None:
        """Return the ranks present, in order, as agreed by all of them; None if this rank is not among them.

        Waits until all `expected` ranks have arrived, or the time limit expires. Meetings are numbered; a rank that
        arrives after the agreement is not included.
        """
        deadline = time.monotonic() + self._timeout_seconds
        store = self._find_store()
        if store is None:
            return None
        self._main = store
        here = dist.PrefixStore(f"meeting-{number}", store)  # type: ignore[attr-defined]
        here.set(f"present/{self.rank}", "1")
        expected = {*expected, self.rank}
        while not here.check(["members"]):
            present = [rank for rank in range(self.world_size) if here.check([f"present/{rank}"])]
            if expected <= set(present) or time.monotonic() > deadline:
                here.compare_set("members", "", json.dumps(present))
                break
            time.sleep(_POLL_SECONDS)
        members: list[int] = json.loads(here.get("members"))
        return members if self.rank in members else None

    def _open_main(self) -> Any:
        # Under torchrun its agent may serve a store at this address already; rank 0 is then a client too.
        elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        agent = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")) if elastic else None
        serves = self.rank == 0 and agent != (self._address, str(self._port))
        try:
            return _tcp_store(self._address, self._port, serves, self._timeout_seconds)
        except (OSError, RuntimeError) as error:
            if serves:
                raise ValueError(
                    f"master_port: {self._port} cannot be used on this host ({_first_line(error)}); choose another"
                ) from error
            raise TimeoutError(
                f"initialize: rank 0 did not answer at {self._address}:{self._port} "
                f"within {self._timeout_seconds:g} s; every rank must name the address of rank 0's host"
            ) from error

    def _reachable_address(self) -> str:
        """Return this host's address on the route to rank 0, which the other ranks can reach."""
        with socket.create_connection((self._address, self._port), timeout=self._timeout_seconds) as way:
            return str(way.getsockname()[0])

    def _serve(self, address: str) -> Any:
        return _tcp_store(address, 0, True, self._timeout_seconds)

    def _find_store(self) -> Any:
        """Return the first store that answers, in the same order on every rank; None without a reachable rank."""
        if self._answers(self._main):
            return self._main
        for rank, (address, port) in self._addresses.items():
            if rank == self.rank:
                return self._own
            with suppress(OSError, RuntimeError):
                socket.create_connection((address, port), timeout=self._answer_seconds).close()
                store = _tcp_store(address, port, False, self._timeout_seconds)
                if self._answers(store):
                    return store
        return None

    def _answers(self, store: Any) -> bool:
        """Return whether a store answers soon; one on a lost host may block for minutes."""
        return bool(_within(self._answer_seconds, lambda: store.check(["anything"]) is not None))


def _tcp_store(address: str, port: int, serves: bool, timeout_seconds: float) -> Any:
    return (serve_store if serves else join_store)(address, port, timedelta(seconds=timeout_seconds))


def _within(seconds: float, call: Callable[[], bool]) -> bool:
    answers: list[bool] = []

    def ask() -> None:
        with suppress(Exception):  # torch's store errors have no common class
            answers.append(call())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers and answers[0])


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
