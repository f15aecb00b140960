"""Ports that are bound later than they are chosen."""

import socket
from pathlib import Path

import pytest

from configs.common.system import ports
from configs.common.system.ports import check_port, free_port


def test_a_port_is_free_and_below_those_that_the_kernel_gives_out() -> None:
    port = free_port()
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 20000 <= port < max(32000, lowest)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_a_port_that_somebody_has_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        first = taken.getsockname()[1] - ports.FIRST_PORT
        drawn = iter([first, (first + 1) % ports.PORTS, (first + 2) % ports.PORTS])
        monkeypatch.setattr("secrets.randbelow", lambda _: next(drawn))
        assert free_port() != taken.getsockname()[1]


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")


def test_a_port_is_looked_at_before_it_is_needed() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port} cannot be listened on: Address already in use"):
            check_port(port)
        with socket.create_connection(taken.getsockname()) as client:
            taken.accept()[0].close()
            client.recv(1)
    check_port(port)  # although a connection of the server lingers
