"""Which sockets the processes of a run listen on, sampled while it runs."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address

import psutil

MARK = "RANKWISE_TEST_MARK"
"""A variable of the run's environment, which all its processes have: many are no children of the command line."""
_ROLES = {
    "engine.agents.torchrun_agent": "torchrun's agent",
    "engine.agents.deepspeed_agent": "DeepSpeed's agent",
    "engine.worker": "rank",
    "slurm.forking.fork_parent": "fork parent",
    "slurm.launch": "launcher",
    "flows.server.process": "Prefect server",
}


class Listeners:
    """Pairs of a process's role and the address that it listened on, and the roles of all processes seen."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()
        self.roles: set[str] = set()

    def beyond_loopback(self) -> set[tuple[str, str]]:
        return {(role, address) for role, address in self.seen if not ip_address(address).is_loopback}

    def of(self, role: str) -> set[str]:
        return {address for found, address in self.seen if found == role}

    def look(self, mark: str) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid == os.getpid() or process.environ().get(MARK) != mark:
                    continue
                line = process.cmdline()
                role = next((name for word, name in _ROLES.items() if word in line), " ".join(line[:4]))
                self.roles.add(role)
                for found in process.net_connections("inet"):
                    if found.status == psutil.CONN_LISTEN:
                        self.seen.add((role, found.laddr.ip))


@contextmanager
def listening(mark: str) -> Iterator[Listeners]:
    """Sample all processes with this mark until the block ends."""
    found, stop = Listeners(), threading.Event()

    def sample() -> None:
        while not stop.wait(0.05):
            found.look(mark)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
