"""The first rank's end of the Unix socket to the HTTP process: lines in, lines out, never waiting for the other side.

    channel = Channel(path)
    for message in channel.receive(wait_seconds=0): ...
    channel.send({"ready": {}})

What the other side does not read at once is kept here and sent later, so that a slow HTTP process delays no step.
"""

import json
import select
import socket
from pathlib import Path
from typing import Any

_READ_BYTES = 1 << 20


class ChannelClosedError(ConnectionError):
    """The HTTP process has ended."""


class Channel:
    """A connection to the socket at `path`. All methods raise ChannelClosedError when the other side is gone."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._socket.setblocking(False)
        self._inbound = b""
        self._outbound = bytearray()

    def receive(self, wait_seconds: float) -> list[dict[str, Any]]:
        """Return the messages that have come; if there are none, wait for some as long as given."""
        writers = [self._socket] if self._outbound else []
        readable, writable, _ = select.select([self._socket], writers, [], wait_seconds)
        if writable:
            self._flush()
        if not readable:
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("the HTTP process has closed the connection")
        *lines, self._inbound = (self._inbound + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, or keep it until the other side reads."""
        self._outbound += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._flush()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._outbound:
                sent = self._socket.send(self._outbound)
                del self._outbound[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
