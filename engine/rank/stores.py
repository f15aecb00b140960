"""Key-value stores of torch.distributed that listen on one address.

torch's own TCPStore server listens on all interfaces of its host, and answers whoever connects. Here the socket is
bound first and handed over (`master_listen_fd`), so that the store of a run on one machine is reachable on its
loopback only, and that of several nodes on the address by which they reach the head node.
"""

import errno
import os
import socket
from datetime import timedelta
from typing import Any

_BACKLOG = 2048


def serve_store(address: str, port: int, timeout: timedelta, **options: Any) -> Any:
    """Serve a TCPStore on this address (a name is resolved) and port, 0 for a free one. Raises OSError."""
    import torch.distributed as dist

    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(place[:2], family=family, backlog=_BACKLOG) as listener:
        bound_port = listener.getsockname()[1]
        descriptor = os.dup(listener.fileno())  # the store closes it
    options = {"wait_for_workers": False} | options
    return dist.TCPStore(  # type: ignore[attr-defined]  # not in __all__
        address, bound_port, is_master=True, timeout=timeout, master_listen_fd=descriptor, **options
    )


def serve_own_store(address: str, port: int, timeout: timedelta) -> Any:
    """As `serve_store`; on all interfaces where the others reach this host by an address that is none of its own."""
    try:
        return serve_store(address, port, timeout)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return serve_store("0.0.0.0", port, timeout)


def join_store(address: str, port: int, timeout: timedelta) -> Any:
    """Connect to a store that another process serves."""
    import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]  # not in __all__
        address, port, is_master=False, timeout=timeout, wait_for_workers=False
    )


def agent_store(
    address: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(minutes=10),
    multi_tenant: bool = False,
) -> Any:
    """Stand for `TCPStore` in torchrun's static rendezvous: the agents' store, served by the first node's."""
    import torch.distributed as dist

    if is_master:
        return serve_store(address, port, timeout, world_size=world_size, wait_for_workers=True)
    return dist.TCPStore(  # type: ignore[attr-defined]  # not in __all__
        address, port, world_size, False, timeout, multi_tenant=multi_tenant
    )
