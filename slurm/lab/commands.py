"""Run system commands for a lab, without the user's environment."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEEDED = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-client",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "taskset": "util-linux",
}
_LIMIT_SECONDS = 60.0


class LabError(OSError):
    """A lab cannot be started or stopped on this machine; the message has the reason."""


def program(name: str) -> str:
    """Absolute path of a command. Raises LabError."""
    found = shutil.which(name, path=SEARCHED)
    if found is None:
        raise LabError(f"{name}: not installed. Install the lab's packages with `make lab-install`")
    return found


def lab_environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """What daemons and commands of a lab get: nothing of the user's."""
    return {"PATH": SEARCHED, "LANG": "C.UTF-8", "HOME": "/root", **extra}


def obey(argv: Sequence[str], extra: Mapping[str, str] = {}, limit_seconds: float = _LIMIT_SECONDS) -> str:
    """Run a command and return what it says. Raises LabError with its words where it fails."""
    try:
        done = subprocess.run(
            [program(argv[0]), *argv[1:]],
            env=lab_environment(extra),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"`{' '.join(argv)}`: time-out after {limit_seconds:g} s") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LabError(f"`{' '.join(argv)}` failed: {words}")
    return done.stdout


def output_of(argv: Sequence[str], extra: Mapping[str, str] = {}, limit_seconds: float = 10.0) -> str | None:
    """What a command says; None where it fails or does not answer in time."""
    try:
        return obey(argv, extra, limit_seconds)
    except LabError:
        return None


def leave_running(argv: Sequence[str], marks: Mapping[str, str], log: Path) -> None:
    """Start a daemon that belongs to nobody's terminal and is nobody's child; its words go to `log`.

    `setsid --fork` lets init adopt it: a child of ours would stay a zombie after its end for as long as we live.
    Signals are set to what programs expect, since jobs inherit them from slurmd.
    """
    with log.open("wb") as output:
        subprocess.run(
            [program("setsid"), "--fork", program("env"), "--default-signal", *argv],
            env=lab_environment(marks),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=True,
            timeout=_LIMIT_SECONDS,
        )


def why_no_lab() -> str | None:
    """Return why this machine cannot run a lab; None if it can."""
    if os.geteuid() != 0:
        return "a lab requires root to create network and mount namespaces. Use sudo"
    missing = sorted({package for name, package in NEEDED.items() if shutil.which(name, path=SEARCHED) is None})
    if missing:
        return f"not installed: {', '.join(missing)}. Install the lab's packages with `make lab-install`"
    if output_of(["unshare", "--net", "--uts", "--mount", "true"]) is None:
        return "network namespaces are not available in this kernel or container"
    return None


def need_root() -> None:
    """Raises LabError, in one sentence, for a user who has not root's rights."""
    if os.geteuid() != 0:
        raise LabError(str(why_no_lab()))
