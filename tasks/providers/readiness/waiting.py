"""Wait for rented nodes: until all run, answer over SSH with the host key planted in them, and show their GPUs.

waiting = NodeWaiting(provider, lease, folder, say, Limits())
nodes = waiting.until_ready(rung, made)                # ProviderError: one was taken back, or the time is up
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from configs.common.printable import plural
from configs.common.secrets import redacted
from tasks.providers.connections import probe, write_known_hosts
from tasks.providers.giving_back import Say, Teardown
from tasks.providers.readiness.node_gpus import wait_for_gpus
from tasks.providers.rental import Node, Provider, ProviderError, RentalLease, Rung, node_address

Returned = TypeVar("Returned")
_THROTTLED_TRIES, _TRANSIENT_TRIES = 6, 3
PROBES_AT_ONCE = 16
"""How many nodes are asked over SSH side by side."""


@dataclass
class Limits:
    """How long renting waits, in seconds."""

    ready_seconds: float = 600.0
    """In one place, from the answer that names the nodes until all of them run and are set up over SSH."""
    host_key_seconds: float = 120.0
    """How long another host key is waited out (never trusted): Google's images run sshd before the startup script."""
    driver_seconds: float = 120.0
    """How long a driver that does not show all GPUs is waited for: it may be built, or installed, at the first boot."""
    poll_seconds: float = 5.0
    first_pause_seconds: float = 2.0
    teardown: Teardown = field(default_factory=Teardown)
    sleep: Callable[[float], None] = time.sleep


@dataclass
class NodeWaiting:
    """Waits for the nodes of one lease."""

    provider: Provider
    lease: RentalLease
    folder: Path
    say: Say
    limits: Limits

    def until_ready(self, rung: Rung, made: list[Node]) -> list[Node]:
        """Return the nodes that a create call has made, once they can be used. Raises ProviderError."""
        deadline = time.monotonic() + self.limits.ready_seconds
        nodes = self._wait_until_running(rung, made, deadline)
        self._wait_until_reachable(rung, nodes, deadline)
        self._wait_for_gpus(rung, nodes)
        return nodes

    def with_retries(self, call: Callable[[], Returned]) -> Returned:
        """Call the API, again after what can pass. Raises ProviderError."""
        pause = self.limits.first_pause_seconds
        tries = {"throttled": _THROTTLED_TRIES, "transient": _TRANSIENT_TRIES}
        done = 0
        while True:
            try:
                return call()
            except ProviderError as error:
                done += 1
                if done >= tries.get(error.problem, 1):
                    raise
                self.say(f"{error.problem}: {redacted(str(error))}; trying again in {pause:g} s")
            self.limits.sleep(pause)
            pause *= 2

    def _wait_until_running(self, rung: Rung, made: list[Node], deadline: float) -> list[Node]:
        """Poll until all nodes run and have addresses. Raises ProviderError: one was taken back, or the time is up."""
        ids = {node.id for node in made}
        seen: set[str] = set()
        public = self.lease.request.public_address
        while True:
            found = self.with_retries(lambda: self.provider.nodes(self.lease.run, rung.region))
            mine = [node for node in found if node.id in ids]
            ready = [node for node in mine if node.state == "running" and (node.public_address or not public)]
            if len(ready) == len(ids):
                return sorted(ready, key=lambda node: node.id)
            self._check_not_taken_back(seen, mine)
            seen |= {node.id for node in mine}
            if time.monotonic() > deadline:
                waited = f"{len(ready)} of {plural(len(ids), 'node')} up after {self.limits.ready_seconds:g} s"
                raise ProviderError("capacity", "", waited)
            self.limits.sleep(self.limits.poll_seconds)

    def _check_not_taken_back(self, seen: set[str], nodes: list[Node]) -> None:
        """Raise ProviderError where a spot node was reclaimed, or powered itself off, before it was ready.

        AWS lists such a node for an hour; GCP lists it no longer.
        """
        up = {node.id for node in nodes if node.state not in ("stopping", "gone")}
        reasons = {node.id: f": {node.reason}" for node in nodes if node.reason}
        for id in sorted((seen | {node.id for node in nodes}) - up):
            raise ProviderError("capacity", "", f"{id} was taken back before it was ready{reasons.get(id, '')}")

    def _wait_until_reachable(self, rung: Rung, nodes: list[Node], deadline: float) -> None:
        """Connect to each node with its planted host key until its user data has run. Raises ProviderError."""
        user = self.lease.request.user or self.provider.default_user
        addresses = [node_address(node, self.lease.request) for node in nodes]
        write_known_hosts(self.folder, addresses)
        waiting = dict(zip(addresses, nodes, strict=True))
        wrong_since: dict[str, float] = {}
        while waiting:
            for address, answer in self._probes(user, list(waiting)).items():
                node = waiting[address]
                if answer == "ready":
                    del waiting[address]
                elif answer == "failed" or (
                    answer == "wrong host key"
                    and time.monotonic() - wrong_since.setdefault(address, time.monotonic())
                    >= self.limits.host_key_seconds
                ):
                    what = "its user data failed" if answer == "failed" else "host key differs from the one planted"
                    raise ProviderError("unreachable", "", f"{node.id} ({address}): {what}")
                elif time.monotonic() > deadline:
                    last = "user data has not finished" if answer == "pending" else answer
                    limit = f"after {self.limits.ready_seconds:g} s"
                    raise ProviderError("unreachable", "", f"{node.id} ({address}): {last} {limit}")
            if waiting:
                self.limits.sleep(min(self.limits.poll_seconds, 2.0))
                self._check_still_there(rung, nodes)

    def _wait_for_gpus(self, rung: Rung, nodes: list[Node]) -> None:
        """Return when each node's driver shows as many GPUs as are wanted. Raises ProviderError."""
        request = self.lease.request

        def pause() -> None:
            self.limits.sleep(self.limits.poll_seconds)
            self._check_still_there(rung, nodes)

        named = {node_address(node, request): node.id for node in nodes}
        user = request.user or self.provider.default_user
        wait_for_gpus(self.folder, user, named, request, self.limits.driver_seconds, pause)

    def _check_still_there(self, rung: Rung, nodes: list[Node]) -> None:
        """Raise ProviderError where one of these was taken back meanwhile."""
        now = self.with_retries(lambda: self.provider.nodes(self.lease.run, rung.region))
        ids = {node.id for node in nodes}
        self._check_not_taken_back(ids, [node for node in now if node.id in ids])

    def _probes(self, user: str, addresses: list[str]) -> dict[str, str]:
        """How far each node is, asked side by side: one that drops packets holds up none of the others."""
        with ThreadPoolExecutor(min(len(addresses), PROBES_AT_ONCE)) as pool:
            answers = pool.map(lambda address: probe(self.folder, user, address), addresses)
            return dict(zip(addresses, answers, strict=True))
