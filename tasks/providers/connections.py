"""SSH to rented nodes with the OpenSSH client: only the run's own key, only the planted host key.

write_known_hosts(folder, ["198.51.100.7"])
probe(folder, "ubuntu", "198.51.100.7")    # "ready", "pending", "failed", "wrong host key", "unreachable: ..."
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from configs.common.base import write_atomically
from configs.common.files.reading import read_text
from configs.common.printable import printable
from tasks.providers.boot import STATE

_CONNECT_SECONDS = 5


def write_known_hosts(folder: Path, addresses: Sequence[str]) -> None:
    """Write the one host key of the run for these addresses."""
    key = " ".join(read_text(folder / "host_ed25519.pub").split()[:2])
    write_atomically(folder / "known_hosts", "".join(f"{address} {key}\n" for address in addresses))


def quoted_path(path: str | Path) -> str:
    """Return a path as an option of OpenSSH, which splits at blanks and replaces what follows a `%`."""
    whole = os.path.expanduser(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{whole}"'


def ssh_argv(folder: Path, user: str, address: str, command: Sequence[str] = ()) -> list[str]:
    """Return the command line that connects to a node. The user's own keys, agent and settings are not used."""
    options = {
        "IdentityFile": quoted_path(folder / "id_ed25519"),
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "UserKnownHostsFile": quoted_path(folder / "known_hosts"),
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "HostKeyAlgorithms": "ssh-ed25519",
        "PasswordAuthentication": "no",
        "ConnectTimeout": str(_CONNECT_SECONDS),
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-F", "none", *words, f"{user}@{address}", *command]


def probe(folder: Path, user: str, address: str) -> str:
    """Connect once and return how far the node is."""
    question = f"cat {STATE}/ready 2>/dev/null || {{ [ -f {STATE}/failed ] && echo failed; }} || echo pending"
    done = _run(ssh_argv(folder, user, address, ["--", question]))
    if done is None:
        return "unreachable: no answer"
    if done.returncode == 0:
        return done.stdout.strip() or "pending"
    if "Host key verification failed" in done.stderr:
        return "wrong host key"
    return "unreachable: " + printable((done.stderr.strip().splitlines() or ["no answer"])[-1], 200)


def prolong(folder: Path, user: str, address: str, lives_seconds: int) -> bool:
    """Set the dead man's switch of a node anew; False: the node did not take it."""
    file = f"{STATE}/remaining_seconds.extended"
    root = 'if [ "$(id -u)" = 0 ]; then r=; else r="sudo -n"; fi'
    # Written under another name first: the switch must not read a part of it.
    script = f"{root}; echo {lives_seconds} | $r tee {file}.tmp >/dev/null && $r mv {file}.tmp {file}"
    done = _run(ssh_argv(folder, user, address, ["--", script]))
    return done is not None and done.returncode == 0


def run_there(
    folder: Path, user: str, address: str, command: str, seconds: float
) -> "subprocess.CompletedProcess[str] | None":
    """Run a line of shell on a node; None: it has not ended within so many seconds."""
    return _run(ssh_argv(folder, user, address, ["--", command]), seconds)


def _run(argv: list[str], seconds: float = 4 * _CONNECT_SECONDS) -> "subprocess.CompletedProcess[str] | None":
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return None
