"""The daemons of a lab: started, asked whether they are up, stopped.

Each has a question that only a working daemon answers; that it runs is not enough. All have a low priority, and
slurmd with all that it starts is confined to its node's cores.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm.lab import members
from slurm.lab.commands import LabError, leave_running, obey, output_of, program
from slurm.lab.nodes import confined, end_of
from slurm.lab.plan import DEFAULT_PARTITION, LabPlan

_PRIORITY = ("nice", "-n", "10")
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Daemon:
    """One daemon of a lab: how it is started, and how one knows that it works."""

    program: str
    argv: list[str]
    works: Callable[[], bool]
    log: Path
    limit_seconds: float = 60.0
    node: str | None = None

    @property
    def name(self) -> str:
        """As in `lab status`."""
        return self.program if self.node is None else f"slurmd of {self.node}"


def munged(plan: LabPlan) -> Daemon:
    """Says who somebody is; a key and a socket of its own."""
    log = plan.logs / "munged.log"
    etc, run = plan.folder / "etc", plan.folder / "run"
    argv = ["munged", "--foreground", "--force", "--num-threads", "2", "--socket", str(plan.munge_socket)]
    argv += ["--key-file", str(etc / "munge.key"), "--seed-file", str(run / "munge.seed")]
    argv += ["--pid-file", str(run / "munged.pid"), "--log-file", str(log)]
    return Daemon(
        "munged", argv, lambda: output_of(["munge", "--no-input", "--socket", str(plan.munge_socket)]) is not None, log
    )


def mariadbd(plan: LabPlan) -> Daemon:
    """Keeps the accounts, in a folder of its own; it reads no configuration and listens on no port."""
    log = plan.logs / "mariadbd.log"
    data, run = plan.folder / "db" / "data", plan.folder / "run"
    argv = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={plan.database_socket}"]
    argv += ["--skip-networking", f"--pid-file={run}/mariadbd.pid", f"--log-error={log}", "--performance-schema=off"]
    # A lab's accounts need not survive a loss of power.
    argv += ["--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0"]
    argv += ["--innodb-lock-wait-timeout=900", "--skip-log-bin"]
    asked = ["mariadb-admin", "--no-defaults", "--user=root", f"--socket={plan.database_socket}", "ping"]
    return Daemon("mariadbd", argv, lambda: output_of(asked) is not None, log)


def slurmdbd(plan: LabPlan) -> Daemon:
    """Slurm's accounts. It works when it knows the cluster, which is added here where it does not."""

    def works() -> bool:
        known = output_of(["sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=cluster"], client(plan))
        if known is None:
            return False
        if plan.name not in known.split():
            output_of(["sacctmgr", "--immediate", "add", "cluster", plan.name], client(plan))
            return False
        return True

    return Daemon("slurmdbd", ["slurmdbd", "-D"], works, plan.logs / "slurmdbd.log", limit_seconds=90.0)


def slurmctld(plan: LabPlan) -> Daemon:
    """The scheduler; its state is in the lab's folder and survives a restart."""

    def works() -> bool:
        return " is UP" in (output_of(["scontrol", "ping"], client(plan)) or "")

    return Daemon("slurmctld", ["slurmctld", "-D"], works, plan.logs / "slurmctld.log")


def slurmd(plan: LabPlan, node: str) -> Daemon:
    """A node's daemon. It works when the scheduler would give the node jobs."""

    def works() -> bool:
        return node_state(plan, node).rstrip("*") in ("idle", "mixed", "allocated", "completing")

    log = plan.logs / f"slurmd-{node}.log"
    return Daemon("slurmd", ["slurmd", "-D", "-N", node], works, log, node=node)


def daemons(plan: LabPlan) -> list[Daemon]:
    """All of a lab's, in the order in which they need each other."""
    base = [munged(plan), mariadbd(plan), slurmdbd(plan), slurmctld(plan)]
    return base + [slurmd(plan, node) for node in plan.node_names]


def find_daemon(plan: LabPlan, name: str, node: str | None = None) -> Daemon:
    """A daemon by its program, and slurmd by its node as well. Raises ValueError."""
    found = [each for each in daemons(plan) if each.program == name and each.node == node]
    if not found:
        raise ValueError(
            f"daemon: got {name!r}, expected one of munged, mariadbd, slurmdbd, slurmctld, or slurmd with a node"
        )
    return found[0]


def start_daemon(plan: LabPlan, daemon: Daemon) -> None:
    """Start it and return at once; nothing happens where it runs."""
    if pid(plan, daemon) is not None:
        return
    words = [*_PRIORITY, program(daemon.argv[0]), *daemon.argv[1:]]
    if daemon.node is not None:
        words = [*confined(plan, daemon.node), *words]
    marks = members.marks(plan.name, plan.folder, daemon.node)
    marks |= client(plan) | {"MYSQL_UNIX_PORT": str(plan.database_socket)}
    leave_running(words, marks, _said_at_start(plan, daemon))


def wait_until_it_works(plan: LabPlan, daemon: Daemon) -> None:
    """Raises LabError with the end of its log where it does not within its limit, or ends."""
    began = time.monotonic()
    while not daemon.works():
        age_seconds = time.monotonic() - began
        gone = age_seconds > 3.0 and pid(plan, daemon) is None
        if gone or age_seconds > daemon.limit_seconds:
            why = "ended" if gone else f"did not respond within {daemon.limit_seconds:g} s"
            raise LabError(f"{daemon.name} {why}\n{end_of(_spoken(plan, daemon))}")
        time.sleep(_LOOK_SECONDS)


def stop(plan: LabPlan, daemon: Daemon, signal_number: int = signal.SIGKILL, limit_seconds: float = 15.0) -> None:
    """End it, without its jobs; return when it is gone. Raises LabError where it does not end."""
    found = pid(plan, daemon)
    if found is None:
        return
    with suppress(ProcessLookupError):
        os.kill(found, signal_number)
    deadline = time.monotonic() + limit_seconds
    while pid(plan, daemon) == found:
        if time.monotonic() > deadline:
            raise LabError(f"{daemon.name} (pid {found}) did not end within {limit_seconds:g} s")
        time.sleep(0.05)


def restart(plan: LabPlan, daemon: Daemon) -> None:
    """End it and bring it up again; jobs go on meanwhile."""
    stop(plan, daemon, signal.SIGTERM)
    start_daemon(plan, daemon)
    wait_until_it_works(plan, daemon)


def _said_at_start(plan: LabPlan, daemon: Daemon) -> Path:
    """What a daemon says before it has a log: of a wrong configuration, for one."""
    return plan.logs / f"{daemon.log.stem}.start.log"


def _spoken(plan: LabPlan, daemon: Daemon) -> Path:
    """Where the reason of a failure is."""
    early = _said_at_start(plan, daemon)
    return early if early.exists() and early.stat().st_size else daemon.log


def pid(plan: LabPlan, daemon: Daemon) -> int | None:
    """None where it does not run."""
    return members.running(plan.name, daemon.program, daemon.node)


def node_state(plan: LabPlan, node: str) -> str:
    """As sinfo says: idle, allocated, down*; `unknown` where nobody can be asked."""
    told = output_of(
        ["sinfo", "--noheader", "--nodes", node, "--partition", DEFAULT_PARTITION, "--format=%T"], client(plan)
    )
    return (told or "").strip() or "unknown"


def resume(plan: LabPlan, node: str) -> bool:
    """Let a node have jobs again that Slurm took out of service, for a failed prolog, say. Returns whether it was."""
    if not node_state(plan, node).startswith("drain"):
        return False
    obey(["scontrol", "update", f"nodename={node}", "state=resume"], client(plan))
    return True


def client(plan: LabPlan) -> dict[str, str]:
    """What a command of Slurm needs to find this cluster."""
    return {"SLURM_CONF": str(plan.slurm_conf)}


def install_database(plan: LabPlan) -> bool:
    """Make an empty database where there is none. Returns whether there was none."""
    data = plan.folder / "db" / "data"
    done = plan.folder / "db" / "installed"
    if done.exists():
        return False
    # What a killed `lab up` has left is not to be trusted.
    obey(["rm", "-rf", str(data)])
    argv = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
    argv += ["--auth-root-authentication-method=normal"]
    obey(argv, members.marks(plan.name, plan.folder), limit_seconds=120.0)
    done.touch()
    return True
