"""Ports for servers that bind them later than they are chosen.

port = free_port()          # of this machine's loopback
check_port(8080)            # ValueError: somebody listens on it
"""

import errno
import secrets
import socket

FIRST_PORT, PORTS = 20000, 12000
"""Below the range from which the kernel gives outgoing ports (net.ipv4.ip_local_port_range)."""


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address that nobody listens on, below the range from which the kernel gives outgoing ones.

    Whoever binds it imports torch or loads a model first, so a port of the ephemeral range could be gone by then.
    Raises OSError for an address that is not this machine's.
    """
    while True:
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port


def check_port(port: int, address: str = "127.0.0.1") -> None:
    """Raise ValueError for a port that cannot be listened on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do not matter
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ValueError(f"{address}:{port} cannot be listened on: {error.strerror}. Use another --port") from error
