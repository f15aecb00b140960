"""The socket on which a server takes requests.

A socket that asyncio is given keeps the kernel's default, by which a small piece of an answer waits until the client
has acknowledged the one before it, up to 40 ms later: a token of a stream, or a body after its headers.
"""

import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket whose connections send at once. Raises ValueError for an address that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(f"{host}:{port} cannot be listened on: {error.strerror}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listener


def listener_url(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
