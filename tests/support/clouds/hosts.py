"""Machines behind the clouds of the tests: each has namespaces of its own, an OpenSSH server and an address.

    with Hosts(tmp_path) as hosts:
        hosts.start("i-1", ["10.0.0.4", "198.51.100.7"], user_data, gpus=1)     # applies it, runs sshd
        hosts.running()

Needs root, for namespaces and a bridge; `why_not()` names what is missing.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

INIT = Path(__file__).parent / "host_init.py"
CALLER = "10.250.0.1"
_NUMBERS = itertools.count(1)
"""Of bridges and links of this process: several clouds may be up at once."""


def why_not() -> str | None:
    """What is missing to make hosts here; None where nothing is."""
    if os.geteuid() != 0:
        return "machines of the tests need root, for namespaces"
    missing = [name for name in ("unshare", "nsenter", "ip", "ssh", "ssh-keygen") if shutil.which(name) is None]
    missing += [] if Path("/usr/sbin/sshd").exists() else ["sshd"]
    if missing:
        return f"machines of the tests need {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "namespaces may not be made here" if tried.returncode else None


class Hosts:
    """All machines of one test session, on one bridge."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bridge = f"rwc{os.getpid() % 1000000}x{next(_NUMBERS)}"
        self._machines: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self.faults: list[dict[str, Any]] = []
        """What the next machines suffer from, one entry for each: keys of `host_init.main`."""

    def __enter__(self) -> "Hosts":
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{CALLER}/32", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._machines):
            self.stop(name)
        _ip("link", "delete", self._bridge)

    def start(self, name: str, addresses: Sequence[str], user_data: str, gpus: int = 0) -> None:
        """Boot a machine with this host name and these addresses.

        gpus: how many it says that it has, as the instance that it stands for; it has none (`host_init`).
        """
        with self._lock:
            self._count += 1
            folder = self._folder / f"{self._count}-{name[:40]}"
            link = f"rv{os.getpid() % 1000000}x{next(_NUMBERS)}"
            faults = self.faults.pop(0) if self.faults else {}
        folder.mkdir(parents=True)
        (folder / "user_data").write_text(user_data)
        (folder / "faults.json").write_text(json.dumps({"gpus": gpus} | faults))
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # Not an interpreter of the checkout: its folders may be hidden on the machine.
        command = ["unshare", *spaces, "--propagation", "private", sys.executable, "-S", str(INIT), str(folder)]
        machine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert machine.stdin is not None and machine.stdout is not None
        assert machine.stdout.readline() == "up\n", f"{name} did not start"
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(machine.pid))
        _ip("link", "set", link, "master", self._bridge, "up")
        inside = ["nsenter", "--net", "--uts", "--target", str(machine.pid)]
        subprocess.run([*inside, "hostname", name[:60]], check=True)
        for address in addresses:
            subprocess.run([*inside, "ip", "address", "add", f"{address}/32", "dev", "eth0"], check=True)
            _ip("route", "replace", f"{address}/32", "dev", self._bridge, "src", CALLER)
        subprocess.run([*inside, "ip", "link", "set", "lo", "up"], check=True)
        subprocess.run([*inside, "ip", "link", "set", "eth0", "up"], check=True)
        # Neighbours and the caller are all on the one bridge.
        subprocess.run([*inside, "ip", "route", "add", "default", "dev", "eth0"], check=True)
        machine.stdin.write("go\n")
        machine.stdin.flush()
        with self._lock:
            self._machines[name] = machine

    def stop(self, name: str) -> None:
        """Power a machine off for good; one that is off already is no error."""
        with self._lock:
            machine = self._machines.pop(name, None)
        if machine is not None:
            machine.kill()
            machine.wait()
            for pipe in (machine.stdin, machine.stdout):
                assert pipe is not None
                pipe.close()

    def powered_off(self) -> list[str]:
        """Names of machines that have switched themselves off."""
        with self._lock:
            return [name for name, machine in self._machines.items() if machine.poll() is not None]

    def running(self) -> list[str]:
        """Names of the machines that run."""
        with self._lock:
            return [name for name, machine in self._machines.items() if machine.poll() is None]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
