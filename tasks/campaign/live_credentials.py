"""Give the variables of live streams, secrets among them, to the processes that talk to MLflow and Weights & Biases.

    with live_credentials(plan.measuring.live):
        measure(session)

The ranks' environment has no secrets. A streamer of this user on this machine asks over a socket instead
(`configs.common.live_variables`); nothing is written to a file. Nodes of a cluster cannot reach it: there the libraries
read their own files in the home directory, ~/.mlflow/credentials and ~/.netrc.
"""

import contextlib
import json
import os
import secrets
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.common.live_variables import SOCKET_VARIABLE, STREAMER, variables_of

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))


@contextlib.contextmanager
def live_credentials(sinks: Sequence[str]) -> Iterator[None]:
    """Answer streamers until the block ends; without variables for these streams, do nothing."""
    variables = variables_of(sinks, os.environ)
    if not variables:
        yield
        return
    name = f"rankwise-{secrets.token_hex(8)}"
    answer = json.dumps(variables).encode()

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if _is_streamer(self.request):
                self.request.sendall(answer)

    with socketserver.ThreadingUnixStreamServer(f"\0{name}", Answer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="live credentials", daemon=True)
        thread.start()
        os.environ[SOCKET_VARIABLE] = name
        try:
            yield
        finally:
            os.environ.pop(SOCKET_VARIABLE, None)
            server.shutdown()
            thread.join()


def _is_streamer(connection: socket.socket) -> bool:
    """Return whether the other side is a streamer of this user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(told)
    if uid != os.getuid():
        return False
    with contextlib.suppress(OSError):
        return STREAMER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
