"""Stores of torch.distributed listen on the address that they are told, and on no other."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest

from engine.rank.stores import agent_store, join_store, serve_own_store, serve_store

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


def test_a_store_behind_a_translated_address_listens_on_all() -> None:
    before = listened_on()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = serve_own_store("192.0.2.1", port, LIMIT)
    assert listened_on() - before == {("0.0.0.0", port)}
    del store


_RANK = """
import json, psutil
from engine.rank.joining import join_group
from engine.rank.processes import place_from_environment
barrier = join_group(place_from_environment(), "gloo", 60.0, None)
found = psutil.Process().net_connections("inet")
print(json.dumps([each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]))
barrier()
"""


@pytest.mark.slow
def test_ranks_without_a_launcher_meet_at_their_address_only() -> None:
    """As those of a server."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK], env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=600)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert {address for one in said for address in json.loads(one)} == {"127.0.0.1"}
