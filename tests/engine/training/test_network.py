"""What the kernel says of its network interfaces, and that it says so of bytes that are really sent."""

import socket
import threading
from pathlib import Path

from engine.training.network import NetworkBytes, network_bytes

COUNTERS = """Inter-|   Receive                                        |  Transmit
 face |bytes  packets errs drop fifo frame compressed multicast|bytes  packets errs drop fifo colls carrier compressed
    lo:    5000    50    0    0    0     0          0         0   5000      50    0    0    0     0       0          0
  eth0: 1000000  1000    0    0    0     0          0         0 300000     900    0    0    0     0       0          0
  eth1:   20000    10    0    0    0     0          0         0    700       9    0    0    0     0       0          0
"""


def test_the_loopback_is_counted_apart(tmp_path: Path) -> None:
    counters = tmp_path / "dev"
    counters.write_text(COUNTERS)
    found = network_bytes(counters)
    assert found == NetworkBytes(sent=300700, received=1020000, loopback=5000)
    assert found.since(NetworkBytes(700, 20000, 1000)) == NetworkBytes(300000, 1000000, 4000)
    assert network_bytes(tmp_path / "absent") is None


def test_a_bond_and_its_interfaces_are_counted_once(tmp_path: Path) -> None:
    counters = tmp_path / "dev"
    bond = " bond0: 1020000 1010 0 0 0 0 0 0 300700 909 0 0 0 0 0 0\n"
    counters.write_text(COUNTERS + bond + bond.replace("bond0", "bond0.7"))
    for name, below in {"lo": [], "eth0": [], "eth1": [], "bond0": ["eth0", "eth1"], "bond0.7": ["bond0"]}.items():
        (tmp_path / "net" / name / "statistics").mkdir(parents=True)
        for one in below:
            (tmp_path / "net" / name / f"lower_{one}").symlink_to(f"../{one}")
    found = network_bytes(counters, tmp_path / "net")
    assert found == NetworkBytes(sent=300700, received=1020000, loopback=5000)


def test_bytes_that_are_sent_are_counted() -> None:
    before, size = network_bytes(), 4 << 20
    assert before is not None
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        sender = threading.Thread(target=client.sendall, args=(bytes(size),))
        sender.start()
        received = 0
        with peer:
            while received < size:
                received += len(peer.recv(1 << 16))
        sender.join()
    after = network_bytes()
    assert after is not None
    assert after.since(before).loopback >= size
