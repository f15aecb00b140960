"""Bytes sent and received by this machine, from the kernel's counters of its network interfaces.

    before = network_bytes()                        # None if unavailable
    ...
    after = network_bytes()
    after.sent - before.sent

/proc/self/net/dev (proc_pid_net(5)) counts all processes of the network namespace, protocol headers and retransmissions
included: the real traffic. Traffic between ranks of one machine uses the loopback and is counted separately. Shared
memory, NVLink and InfiniBand verbs are not counted. Bonds, bridges and VLANs count what their own interfaces count
again, and are left out (`lower_*` in sysfs-class-net).
"""

from pathlib import Path
from typing import NamedTuple

_COUNTERS = Path("/proc/self/net/dev")
_INTERFACES = Path("/sys/class/net")
_HEADER_LINES = 2
_RECEIVED, _SENT = 0, 8


class NetworkBytes(NamedTuple):
    """Since boot. `sent` and `received`: over all interfaces but the loopback and those that lie on others; `loopback`:
    through that one.
    """

    sent: int
    received: int
    loopback: int

    def since(self, before: "NetworkBytes") -> "NetworkBytes":
        """Return the difference since `before`."""
        return NetworkBytes(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, moved: "NetworkBytes") -> "NetworkBytes":
        """Return the counters after so many bytes more."""
        return NetworkBytes(*(then + more for then, more in zip(self, moved, strict=True)))


def network_bytes(counters: Path = _COUNTERS, interfaces: Path = _INTERFACES) -> NetworkBytes | None:
    """Return the current counters; None if there are none."""
    try:
        lines = counters.read_text().splitlines()[_HEADER_LINES:]
    except OSError:
        return None
    sent = received = loopback = 0
    for line in lines:
        name, _, values = line.partition(":")
        name, fields = name.strip(), values.split()
        if name == "lo":
            loopback = int(fields[_SENT])
        elif not any((interfaces / name).glob("lower_*")):
            sent += int(fields[_SENT])
            received += int(fields[_RECEIVED])
    return NetworkBytes(sent, received, loopback)
