"""Heartbeats and end of a job among its nodes, over the connections of the registration.

Each side sends a heartbeat every second, so a dead node or a cut link is detected after `PeerTimeLimits.lost_seconds`,
long
before the ranks' own time-out. Nodes report when all their ranks have finished, which avoids waiting for torchrun's
exit barrier. If one node fails, the others end too, and all agree on the cause before recording it.

    news = team.exchange(finished=False)     # several times a second; never waits
    verdict = team.confer(verdict, give_up)

Messages are JSON objects, one a line. What is no such message (a port scanner) is dropped.
"""

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import ValidationError

from configs.common.failure_kinds import HEAD_LOST, NODE_LOST
from configs.records.record import Status
from configs.targets.resources import Resources
from slurm.launcher.end_cause import JobVerdict, first_cause
from slurm.launcher.node import JobNode, link_is_up

PEER_POLL_SECONDS = 0.02
_MOST_BYTES = 65536  # of what a peer said and was not read as lines yet
_FAREWELL_SECONDS = 0.5


@dataclass(frozen=True)
class PeerTimeLimits:
    """Time-outs between nodes."""

    call_seconds: float = 30.0
    beat_seconds: float = 1.0
    lost_seconds: float = 15.0
    confer_seconds: float = 10.0


LIMITS = PeerTimeLimits()
CONTAINER_LIMITS = PeerTimeLimits(call_seconds=300.0)
"""Each node brings the image of its container by itself, from a registry perhaps: one may be minutes behind another."""


def limits_of(target: Resources) -> PeerTimeLimits:
    """Return the time-outs between the nodes of a target."""
    return LIMITS if getattr(target, "container", None) is None else CONTAINER_LIMITS


@dataclass
class News:
    """State of all nodes: every rank has finished, or a node has ended otherwise and all must end."""

    finished: bool = False
    stop: bool = False


class PeerMonitor(Protocol):
    """Connections of a launcher to the other nodes."""

    def exchange(self, finished: bool) -> News:
        """Exchange messages without waiting; call it several times a second. finished: all ranks of this node have."""

    def confer(self, own: JobVerdict, give_up: Callable[[], bool]) -> JobVerdict:
        """Report this node's end and disconnect. Returns the common verdict, or the node's own after a time-out."""


class Alone:
    """The team of a job of one node."""

    def exchange(self, finished: bool) -> News:
        """See Team."""
        return News(finished=finished)

    def confer(self, own: JobVerdict, give_up: Callable[[], bool]) -> JobVerdict:
        """See Team."""
        return own


class PeerConnection:
    """A connection to another node, read and written in whole messages without ever waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connection = connection
        self.own_address = str(connection.getsockname()[0])
        self.peer_address = str(connection.getpeername()[0])
        self._read = b""
        self._unsent = b""
        self._put_back: list[dict[str, Any]] = []
        self._closed = False  # by the other side, or broken
        self._said_at = 0.0
        self.host = self.peer_address  # until it says how it is called
        self.heard_at = self.opened_at = time.monotonic()

    def say(self, **message: object) -> None:
        """Send, or keep what does not go out yet for the next time."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self._said_at = time.monotonic()
        self._flush()

    def beat(self, every_seconds: float) -> None:
        """Send a heartbeat if one is due."""
        if time.monotonic() - self._said_at >= every_seconds:
            self.say(beat=1)
        else:
            self._flush()

    def hear(self) -> list[dict[str, Any]]:
        """Return the messages received since the last call. An invalid message closes the connection."""
        try:
            while len(self._read) <= _MOST_BYTES:
                received = self._connection.recv(_MOST_BYTES)
                if not received:
                    self._closed = True
                    break
                self._read += received
                self.heard_at = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self._closed = True
        *lines, self._read = self._read.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # the latter: of a stranger's thousands of brackets
            messages = [None]
        if len(self._read) > _MOST_BYTES or not all(isinstance(message, dict) for message in messages):
            self._closed, messages = True, []
        messages, self._put_back = [*self._put_back, *messages], []
        return messages

    def put_back(self, messages: list[dict[str, Any]]) -> None:
        """Let the next `hear` give these first."""
        self._put_back = messages

    @property
    def closed(self) -> bool:
        """Whether nothing more can come; ask it after `hear`."""
        return self._closed

    def close(self) -> None:
        """Hang up so that what was said last arrives, which a socket with unread bytes takes back (RFC 2525, 2.17)."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        self._flush()
        try:
            self._connection.shutdown(socket.SHUT_WR)
            while not self._closed and time.monotonic() < deadline:
                self._read = b""
                self.hear()
                time.sleep(PEER_POLL_SECONDS)
        except OSError:
            pass
        self._connection.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # what it said before it broke can still be read


class Patience:
    """Whose signs of life have been missing for too long; a launcher that was itself stopped meanwhile forgives."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._looked_at = self._began_at = time.monotonic()

    def look(self) -> None:
        """Call it at every turn of the loop."""
        now = time.monotonic()
        if now - self._looked_at > self._limit_seconds / 3:
            self._began_at = now
        self._looked_at = now

    def is_over(self, line: PeerConnection) -> bool:
        """Return whether no heartbeat arrived within the limit."""
        return time.monotonic() - max(line.heard_at, self._began_at) > self._limit_seconds


class Head:
    """The team as node 0 sees it: a line to every other node, and what each has said."""

    def __init__(
        self, node: JobNode, limits: PeerTimeLimits, lines: Mapping[int, PeerConnection], interface: str | None
    ) -> None:
        self._node, self._limits, self._interface = node, limits, interface
        self._lines = lines
        self._finished: set[int] = set()
        self._ended: dict[int, JobVerdict] = {}  # in the order in which they ended
        self._told = News()
        self._patience = Patience(limits.lost_seconds)

    def exchange(self, finished: bool) -> News:
        """See Team."""
        self._patience.look()
        if finished:
            self._finished.add(0)
        for rank, line in self._lines.items():
            if rank not in self._ended:
                self._hear(rank, line)
        news = News(
            finished=len(self._finished) == self._node.count,
            stop=any(verdict.status is not Status.COMPLETED for verdict in self._ended.values()),
        )
        for line in self._lines.values():
            if news.finished and not self._told.finished:
                line.say(everybody=True)
            if news.stop and not self._told.stop:
                line.say(stop=True)
            line.beat(self._limits.beat_seconds)
        self._told = news
        return news

    def confer(self, own: JobVerdict, give_up: Callable[[], bool]) -> JobVerdict:
        """See Team."""
        self._ended[0] = own
        finished = own.status is Status.COMPLETED
        deadline = None
        while True:
            news = self.exchange(finished)
            if deadline is None and news.stop:
                deadline = time.monotonic() + self._limits.confer_seconds
            if news.finished or len(self._ended) == self._node.count or give_up():
                break
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(PEER_POLL_SECONDS)
        agreed = own if news.finished else first_cause(list(self._ended.values()))
        for line in self._lines.values():
            line.say(over=agreed.model_dump(mode="json"))
        close_all(self._lines.values())
        return agreed

    def _hear(self, rank: int, line: PeerConnection) -> None:
        for message in line.hear():
            if message.get("finished"):
                self._finished.add(rank)
            if "ended" in message:
                with suppress(ValidationError):
                    self._ended[rank] = JobVerdict.model_validate(message["ended"])
                    if self._ended[rank].status is Status.COMPLETED:
                        self._finished.add(rank)
        if rank in self._ended or (rank in self._finished and len(self._finished) == self._node.count):
            return
        if line.closed:
            self._lose(rank, "its launcher closed the connection")
        elif self._patience.is_over(line):
            self._lose(rank, f"no heartbeat for {self._limits.lost_seconds:g} s")

    def _lose(self, rank: int, why: str) -> None:
        name, own = self._node.names[rank], self._node.name
        if not link_is_up(self._interface):
            name, why = own, f"its link ({self._interface}) is down"
        message = f"node {self._node.names.index(name)} ({name}) was lost: {why}"
        self._ended[rank] = JobVerdict(status=Status.NODE_FAILED, kind=NODE_LOST, nodes=(name,), message=message)


class PeerMember:
    """The team as any other node sees it: a line to the head."""

    def __init__(self, node: JobNode, limits: PeerTimeLimits, line: PeerConnection, interface: str | None) -> None:
        self._node, self._limits, self._interface = node, limits, interface
        self._line = line
        self._news = News()
        self._told_finished = False
        self._lost: JobVerdict | None = None
        self._agreed: JobVerdict | None = None
        self._patience = Patience(limits.lost_seconds)

    def exchange(self, finished: bool) -> News:
        """See Team."""
        self._patience.look()
        for message in self._line.hear():
            self._news.finished |= bool(message.get("everybody"))
            self._news.stop |= bool(message.get("stop"))
            if "over" in message:
                with suppress(ValidationError):
                    self._agreed = JobVerdict.model_validate(message["over"])
                self._news.stop |= not self._news.finished
        if self._news.finished or self._agreed:
            return self._news
        if self._line.closed:
            self._lose("its launcher closed the connection")
        elif self._patience.is_over(self._line):
            self._lose(f"no heartbeat for {self._limits.lost_seconds:g} s")
        if finished and not self._told_finished:
            self._line.say(finished=True)
            self._told_finished = True
        self._line.beat(self._limits.beat_seconds)
        return self._news

    def confer(self, own: JobVerdict, give_up: Callable[[], bool]) -> JobVerdict:
        """See Team."""
        self._line.say(ended=own.model_dump(mode="json"))
        finished = own.status is Status.COMPLETED
        deadline = None
        while True:
            news = self.exchange(finished)
            if deadline is None and (news.stop or not finished):
                # The head waits as long for the others.
                deadline = time.monotonic() + self._limits.confer_seconds + 2 * self._limits.beat_seconds
            if self._agreed or self._lost or news.finished or give_up():
                break
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(PEER_POLL_SECONDS)
        self._line.close()
        return self._agreed or (first_cause([own, self._lost]) if self._lost else own)

    def _lose(self, why: str) -> None:
        name = self._node.head
        if not link_is_up(self._interface):
            name, why = self._node.name, f"its link ({self._interface}) is down"
        message = f"node {self._node.names.index(name)} ({name}) was lost: {why}"
        self._lost = JobVerdict(status=Status.NODE_FAILED, kind=HEAD_LOST, nodes=(name,), message=message)
        self._news.stop = True


def close_all(lines: Iterable[PeerConnection]) -> None:
    """Disconnect all."""
    for line in lines:
        line.close()
