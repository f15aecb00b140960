"""Hosts to reach by SSH: each has a network, a name, processes, mounts and an OpenSSH server of its own.

with ssh_hosts(tmp_path, 2) as hosts:
    hosts.target(poll_seconds=0.5)         # {"kind": "ssh", "hosts": [...], ...}
    hosts["a"].kill_sshd(); hosts["a"].crash(); hosts["a"].boot()
"""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.patience import wait_for

_INIT = """
import os, sys, time
print("up", flush=True)
while True:
    try:
        os.wait()  # orphans of the host are of this process
    except ChildProcessError:
        time.sleep(0.1)
"""
_LIMIT_SECONDS = 20.0
_LISTEN = "0A"
"""State of a socket in /proc/net/tcp (TCP_LISTEN in include/net/tcp_states.h)."""
_SUBNETS = Path(tempfile.gettempdir()) / "rankwise-tests-subnets.lock"


def why_no_hosts() -> str | None:
    """Why this machine cannot have such hosts; None where it can."""
    if os.geteuid() != 0:
        return "needs root rights, for network namespaces"
    missing = [program for program in ("sshd", "ssh-keygen", "ip", "unshare", "nsenter") if not _program(program)]
    return f"not installed: {', '.join(missing)} (apt-get install openssh-server iproute2)" if missing else None


def _program(name: str) -> str | None:
    import shutil

    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class SshTestHost:
    """One host. `disk` is what it sees at the folder that the target names."""

    def __init__(self, name: str, base: Path, number: int, link: str, bridge: str, address: str, port: int) -> None:
        self.name, self.base, self.number, self.address, self.port = name, base, number, address, port
        self.folder = base / name
        self.disk = self.folder / "disk"
        self.link, self._bridge = link, bridge
        self.folder.mkdir()
        self.disk.mkdir()
        self.disk_bytes: int | None = None
        self.max_startups = "100"
        """sshd's MaxStartups; taken when it starts."""
        self.environment: dict[str, str] = {}
        """What its SSH server sets for whoever connects; taken when it starts."""
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "host_key")
        self._write_config()
        self._pid: int | None = None

    def _write_config(self) -> None:
        variables = " ".join(f"{name}={value}" for name, value in self.environment.items())
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress {self.address}\nHostKey {self.folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.base}/key.pub\nStrictModes no\nPermitRootLogin prohibit-password\n"
            f"PasswordAuthentication no\nAcceptEnv HF_*\nMaxStartups {self.max_startups}\nMaxSessions 100\n"
            "LogLevel ERROR\n" + (f"SetEnv {variables}\n" if variables else "")
        )

    @property
    def host_key(self) -> str:
        """Its public key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def boot(self) -> None:
        """Make the host, and start its SSH server."""
        size = self.disk_bytes
        disk = f"mount -t tmpfs -o size={size} tmpfs" if size else f"mount --bind {self.disk}"
        script = (
            f"set -e; hostname {self.name}; mount -t tmpfs tmpfs /run; mkdir /run/sshd; mkdir -m 1777 /run/lock; "
            f"{disk} {self.base}/node; ip link set lo up; exec {sys.executable} -S -c '{_INIT}'"
        )
        spaces = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "private"]
        process = subprocess.Popen(
            [*spaces, "sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True, cwd="/"
        )
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        self._pid, self._outer = psutil.Process(process.pid).children()[0].pid, process
        _run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        _run("ip", "link", "set", self.link, "master", self._bridge, "up")
        # Its own for good: neighbours remember it when the host boots again.
        _run(*self.inside("ip", "link", "set", "eth0", "address", f"02:00:0a:d6:00:{1 + self.number:02x}"))
        _run(*self.inside("ip", "link", "set", "eth0", "up"))
        _run(*self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0"))
        # Whoever called it while it was down has "unreachable" on record for some seconds.
        subprocess.run(["ip", "neigh", "flush", "to", self.address], capture_output=True)
        self.start_sshd()

    def inside(self, *command: str) -> list[str]:
        """A command that is run on the host, as root, beside its jobs."""
        return ["nsenter", "--target", str(self._pid), "--net", "--uts", "--mount", "--pid", *command]

    def start_sshd(self) -> None:
        """Start the SSH server; returns when it listens."""
        self._write_config()
        _run(*self.inside(str(_program("sshd")), "-f", f"{self.folder}/sshd_config"))
        wait_for(self._listens, f"sshd of {self.name}", _LIMIT_SECONDS)  # it leaves its terminal before it listens

    def _listens(self) -> bool:
        """Whether something listens on the port, as the host's own list of sockets says."""
        rows = [line.split() for line in Path(f"/proc/{self._pid}/net/tcp").read_text().splitlines()[1:]]
        return any(row[1].endswith(f":{self.port:04X}") and row[3] == _LISTEN for row in rows)

    def kill_sshd(self) -> None:
        """Kill the SSH server and all that serves connections; nobody can connect."""
        killed = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # one that serves a connection may end meanwhile
                if process.name().startswith("sshd"):
                    process.kill()
                    killed.append(process)
        wait_for(lambda: not any(map(_lives, killed)), f"end of sshd of {self.name}", _LIMIT_SECONDS)  # it has the port

    def processes(self) -> list[psutil.Process]:
        """All processes of the host but its first."""
        if self._pid is None:
            return []
        space = os.readlink(f"/proc/{self._pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                there = process.pid != self._pid and os.readlink(f"/proc/{process.pid}/ns/pid") == space
                if there and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def job_processes(self) -> list[str]:
        """Command lines of launchers and ranks on the host."""
        lines = []
        for process in self.processes():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if "job.json" in line or "torchrun" in line:
                    lines.append(line)
        return lines

    def crash(self) -> None:
        """The host loses its power: everything on it is gone at once."""
        if self._pid is None:
            return
        os.kill(self._pid, signal.SIGKILL)
        self._outer.wait(_LIMIT_SECONDS)
        assert self._outer.stdout is not None
        self._outer.stdout.close()
        subprocess.run(["ip", "link", "del", "dev", self.link], capture_output=True)
        self._pid = None

    def cut(self) -> None:
        """Pull the plug of its network."""
        _run("ip", "link", "set", "dev", self.link, "down")

    def mend(self) -> None:
        """Put the plug in again."""
        _run("ip", "link", "set", "dev", self.link, "up")


class SshTestHosts:
    """Some hosts on a network of their own, a key that they accept, and a file of their keys."""

    def __init__(self, base: Path, count: int) -> None:
        self.base = base
        (base / "node").mkdir(parents=True)
        mark = os.getpid() % 10**5
        self._bridge = f"rws{mark}"
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", base / "key")
        _run("ip", "link", "add", "name", self._bridge, "type", "bridge")
        with _SUBNETS.open("a") as subnets:  # another process of tests would choose the same one meanwhile
            fcntl.flock(subnets, fcntl.LOCK_EX)
            subnet = _free_subnet()
            _run("ip", "addr", "add", f"10.214.{subnet}.254/24", "dev", self._bridge)
        _run("ip", "link", "set", "dev", self._bridge, "up")
        self.hosts = [
            SshTestHost(
                f"gpu-{chr(97 + number)}", base, number, f"rwv{mark}-{number}", self._bridge,
                f"10.214.{subnet}.{1 + number}", 2200 + number,
            )
            for number in range(count)
        ]  # fmt: skip
        self.write_known_hosts()

    def __getitem__(self, letter: str) -> SshTestHost:
        return next(host for host in self.hosts if host.name == f"gpu-{letter}")

    @property
    def known_hosts(self) -> Path:
        """The file of host keys."""
        return self.base / "known_hosts"

    def write_known_hosts(self) -> None:
        """Keys of all hosts, as they are now."""
        self.known_hosts.write_text("".join(f"[{host.address}]:{host.port} {host.host_key}\n" for host in self.hosts))

    def target(self, **changes: Any) -> dict[str, Any]:
        """A target of these hosts; nothing is installed on them."""
        hosts = [{"host": host.address, "port": host.port, "name": host.name} for host in self.hosts]
        return {
            "kind": "ssh", "name": "lab", "hosts": hosts, "user": "root", "key": str(self.base / "key"),
            "known_hosts": str(self.known_hosts), "folder": str(self.base / "node"), "python": sys.executable,
            "poll_seconds": 0.5, "preflight": False,
        } | changes  # fmt: skip

    def sent_bytes(self) -> int:
        """Bytes that this machine has sent to its hosts so far; what they send each other is not among them."""
        return int(Path(f"/sys/class/net/{self._bridge}/statistics/tx_bytes").read_text())

    def restore(self) -> None:
        """Hosts as they were at first: up, with empty disks, known by their keys."""
        self.write_known_hosts()
        for host in self.hosts:
            if host.disk_bytes is not None or not host.processes():
                host.disk_bytes = None
                host.crash()
                host.boot()

    def close(self) -> None:
        """Remove everything."""
        for host in self.hosts:
            with suppress(OSError, AssertionError):
                host.crash()
        subprocess.run(["ip", "link", "del", "dev", self._bridge], capture_output=True)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _free_subnet() -> int:
    used = _run("ip", "-o", "-4", "addr", "show")
    return next(number for number in range(1, 255) if f"10.214.{number}." not in used)


@contextmanager
def ssh_hosts(base: Path, count: int = 2) -> Iterator[SshTestHosts]:
    """Hosts that are up; skips where there can be none."""
    if (why := why_no_hosts()) is not None:
        pytest.skip(why)
    made = SshTestHosts(base, count)
    try:
        for host in made.hosts:
            host.boot()
        yield made
    finally:
        made.close()
