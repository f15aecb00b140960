"""Stores of torch.distributed listen on the address that they are told, and on no other."""

import socket
from datetime import timedelta

import psutil
import pytest

from engine.rank.stores import agent_store, join_store, serve_store

LIMIT = timedelta(seconds=10)


def listened_on() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_a_store_listens_on_its_address_only() -> None:
    before = listened_on()
    store = serve_store("127.0.0.1", 0, LIMIT)
    assert listened_on() - before == {("127.0.0.1", store.port)}
    join_store("127.0.0.1", store.port, LIMIT).set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert listened_on() == before, "the socket is closed with the store"


def test_the_store_of_torchruns_agent_waits_for_no_other_on_one_node() -> None:
    before = listened_on()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = agent_store("127.0.0.1", port, 1, True, LIMIT, multi_tenant=True)
    assert listened_on() - before == {("127.0.0.1", port)}
    assert agent_store("127.0.0.1", port, 1, False, LIMIT).add("count", 1) == 1
    del store


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        serve_store("127.0.0.1", taken.getsockname()[1], LIMIT)
