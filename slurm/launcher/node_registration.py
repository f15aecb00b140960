"""Registration of the nodes of a job with the head node, before any rank is started.

Node 0, the head, listens on a port derived from the job's id. Every other node sends its node rank, host and job. Once
all have registered, the head replies with the rendezvous port of the ranks, and the connections stay open
(`slurm.launcher.peer_monitor`). Missing, duplicate and unreachable nodes are reported within
`PeerTimeLimits.call_seconds`, whereas torchrun would wait silently for 10 minutes.

    meeting, team = call_roll(node, job.name, digest_of(job_json), give_up)
"""

import hashlib
import itertools
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from configs.common.base import sha256_of_file
from configs.common.printable import some_of
from configs.common.system.ports import FIRST_PORT, PORTS, free_port
from configs.records.record import Status
from slurm.launcher.end_cause import JobVerdict, NotStartedError
from slurm.launcher.node import (
    JobNode,
    addresses_of,
    has_network,
    interface_of,
    listening_addresses,
    own_address_towards,
)
from slurm.launcher.peer_monitor import (
    LIMITS,
    PEER_POLL_SECONDS,
    Alone,
    Head,
    PeerConnection,
    PeerMember,
    PeerMonitor,
    PeerTimeLimits,
    close_all,
)

LOOPBACK = "127.0.0.1"
_GREETING_SECONDS = 5.0
_CONNECT_SECONDS = 2.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of all nodes meet, and by which address and interface this node takes part."""

    port: int
    head_address: str = LOOPBACK
    own_address: str = LOOPBACK
    interface: str | None = "lo"


def call_roll(
    node: JobNode, job_name: str, digest: str, give_up: Callable[[], bool], limits: PeerTimeLimits = LIMITS
) -> tuple[Rendezvous, PeerMonitor]:
    """Return when all nodes are there; digest: of `job.json`, the same on all.

    Raises NotStartedError, with the nodes to blame, where they are not.
    """
    if node.count == 1:
        return Rendezvous(free_port()), Alone()
    call = _Call(node, job_name, digest, give_up, limits)
    return call.lead() if node.rank == 0 else call.follow()


def digest_of(job_json: Path) -> str:
    """By which nodes know that they have the same job before them."""
    return sha256_of_file(job_json)


def roll_call_port(node: JobNode) -> int:
    """The head's port: the same on every node of a step, another for every step."""
    digest = hashlib.sha256(f"{node.job_id}.{node.step_id}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:8], "big") % PORTS


@dataclass
class _Call:
    """The roll call as one node makes it."""

    node: JobNode
    job_name: str
    digest: str
    give_up: Callable[[], bool]
    limits: PeerTimeLimits
    strangers: list[PeerConnection] = field(default_factory=list)
    lines: dict[int, PeerConnection] = field(default_factory=dict)

    def lead(self) -> tuple[Rendezvous, PeerMonitor]:
        """Of the head: wait until all others have called."""
        port = roll_call_port(self.node)
        with ExitStack() as open_sockets:
            listeners = []
            try:
                for address in listening_addresses(self.node.head_address):
                    listener = socket.create_server((address, port), backlog=max(16, self.node.count))
                    listeners.append(open_sockets.enter_context(listener))
                    listener.setblocking(False)
            except OSError as error:
                message = f"head node {self.node.name}: cannot listen on port {port}: {error.strerror}"
                self._refuse("PortTaken", message)
            try:
                self._wait_for_all(listeners)
            except NotStartedError as error:
                for line in (*self.strangers, *self.lines.values()):
                    line.say(refused=error.verdict.model_dump(mode="json"))
                close_all([*self.strangers, *self.lines.values()])
                raise
        close_all(self.strangers)
        address = next(iter(self.lines.values())).own_address
        meeting = Rendezvous(free_port(address), address, address, interface_of(address))
        for line in self.lines.values():
            # The ranks' store listens on one address; a name that resolves to several led this node to another.
            elsewhere = {} if line.own_address == address else {"address": address}
            line.say(go=meeting.port, **elsewhere)
        return meeting, Head(self.node, self.limits, self.lines, meeting.interface)

    def _wait_for_all(self, listeners: Sequence[socket.socket]) -> None:
        deadline = time.monotonic() + self.limits.call_seconds
        while len(self.lines) < self.node.count - 1:
            self._unless_given_up()
            for listener in listeners:
                with suppress(OSError):  # nobody waits, or whoever did has gone again
                    while True:
                        self.strangers.append(PeerConnection(listener.accept()[0]))
            for line in list(self.strangers):
                self._listen_to_stranger(line)
            for rank, line in list(self.lines.items()):
                line.hear()
                if line.closed:
                    del self.lines[rank]
            if time.monotonic() > deadline:
                self._name_missing()
            time.sleep(PEER_POLL_SECONDS)

    def _listen_to_stranger(self, line: PeerConnection) -> None:
        for message in line.hear():
            rank = message.get("node_rank")
            if line in self.strangers and isinstance(rank, int):
                self._answer(line, rank, str(message.get("host")), message.get("digest"))
        if line in self.strangers and (line.closed or time.monotonic() - line.opened_at > _GREETING_SECONDS):
            print(f"roll call: {line.host} called and did not say who it is", file=sys.stderr)
            self.strangers.remove(line)
            line.close()

    def _answer(self, line: PeerConnection, rank: int, host: str, digest: object) -> None:
        """Take a caller in, or say what is wrong with it."""
        if digest != self.digest:
            self.strangers.remove(line)
            line.say(foreign=self.job_name)
            line.close()
            return
        line.host = host
        if rank in self.lines or rank == 0:
            first = self.lines[rank].host if rank else self.node.name
            nodes = tuple(name for name in dict.fromkeys((first, host)) if name != self.node.names[rank])
            self._refuse("DuplicateNodeRank", f"{first} and {host} both registered as node {rank}", nodes)
        if not 0 < rank < self.node.count:
            message = f"{host} registered as node {rank}, but the job has {self.node.count} nodes"
            self._refuse("DuplicateNodeRank", message, (host,))
        self.strangers.remove(line)
        line.say(welcome=self.job_name)
        self.lines[rank] = line

    def _name_missing(self) -> NoReturn:
        missing = [rank for rank in range(1, self.node.count) if rank not in self.lines]
        who = some_of([f"node {rank} ({self.node.names[rank]})" for rank in missing])
        message = f"{who} did not register with head node {self.node.name} within {self.limits.call_seconds:g} s"
        self._refuse("NodeMissing", message, tuple(self.node.names[rank] for rank in missing))

    def follow(self) -> tuple[Rendezvous, PeerMonitor]:
        """Of the others: call the head until it answers, then wait until it has heard all."""
        port = roll_call_port(self.node)
        deadline = time.monotonic() + self.limits.call_seconds
        turns = itertools.count()
        while True:
            self._unless_given_up()
            try:
                addresses = addresses_of(self.node.head_address)
                # One of several may be of a network without a way there.
                place = addresses[next(turns) % len(addresses)], port
                line = PeerConnection(socket.create_connection(place, timeout=_CONNECT_SECONDS))
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                said = self._listen(line, ("welcome", "foreign", "refused"), _GREETING_SECONDS)
                if "welcome" in said:
                    return self._welcomed(line)
                line.close()
                if "refused" in said:
                    raise NotStartedError(JobVerdict.model_validate(said["refused"]))
                if "foreign" in said:
                    where = f"port {port} of {self.node.head}"
                    self._refuse(
                        "ForeignJob", f"{where} belongs to another job, {said['foreign']}, expected {self.job_name}"
                    )
                reason = "another program listens there"
            if time.monotonic() > deadline:
                limit = f"at port {port} within {self.limits.call_seconds:g} s: {reason}"
                self._unreachable(f"{self.node.name} could not reach head node {self.node.head} {limit}")
            time.sleep(5 * PEER_POLL_SECONDS)

    def _welcomed(self, line: PeerConnection) -> tuple[Rendezvous, PeerMonitor]:
        said = self._listen(line, ("go", "refused"), self.limits.call_seconds + _GREETING_SECONDS)
        if "refused" in said:
            line.close()
            raise NotStartedError(JobVerdict.model_validate(said["refused"]))
        if "go" not in said:
            line.close()
            self._unreachable(f"head node {self.node.head} did not complete the registration")
        head, own = line.peer_address, line.own_address
        if "address" in said:
            with suppress(OSError):  # no way there: the ranks will say so
                head, own = said["address"], own_address_towards(said["address"])
        meeting = Rendezvous(said["go"], head, own, interface_of(own))
        return meeting, PeerMember(self.node, self.limits, line, interface_of(line.own_address))

    def _listen(self, line: PeerConnection, wanted: tuple[str, ...], limit_seconds: float) -> dict[str, Any]:
        """The first message with one of the wanted words; {} where none comes."""
        hello = {"digest": self.digest, "node_rank": self.node.rank, "host": self.node.name}
        if "welcome" in wanted:
            line.say(**hello)
        deadline = time.monotonic() + limit_seconds
        while True:
            self._unless_given_up(line)
            messages = line.hear()
            for place, message in enumerate(messages):
                if any(word in message for word in wanted):
                    line.put_back(messages[place + 1 :])
                    return message
            if line.closed or time.monotonic() > deadline:
                return {}
            time.sleep(PEER_POLL_SECONDS)

    def _unless_given_up(self, line: PeerConnection | None = None) -> None:
        if self.give_up():
            if line is not None:
                line.close()
            message = "cancelled on request, before all nodes had registered"
            raise NotStartedError(JobVerdict(status=Status.CANCELLED, message=message))

    def _unreachable(self, message: str) -> NoReturn:
        self._refuse("HeadUnreachable", message, (self.node.head if has_network() else self.node.name,))

    def _refuse(self, kind: str, message: str, nodes: tuple[str, ...] = ()) -> NoReturn:
        raise NotStartedError(JobVerdict(status=Status.NODE_FAILED, kind=kind, message=message, nodes=nodes))
