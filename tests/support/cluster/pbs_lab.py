"""OpenPBS on the nodes of a lab, beside its Slurm: a server in namespaces of its own, a pbs_mom on each node.

    def test_something(pbs: PbsLab) -> None:
        assert pbs.qmgr("list server")

`make pbs-install` builds OpenPBS into /opt/rankwise-pbs; OPENPBS=folder names another installation. The server has a
mount namespace for its home, which must not lie below /tmp, and for a name that is not the loopback's; qsub and the
others are entered there by scripts of the same names. Nodes have one core each, as in the lab.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm.lab import files, nodes
from slurm.lab.plan import LabPlan
from tests.support.patience import patient

HEAD = "pbshead"
CLIENTS = ("qsub", "qstat", "qdel", "qselect", "qhold", "qrls", "qrerun", "qmgr", "pbsnodes")
_START_SECONDS = 60.0


@dataclass
class PbsLab:
    """A server that is up, and questions to it."""

    plan: LabPlan
    folder: Path
    installed: Path
    moms: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def call(self, *argv: str, check: bool = True) -> str:
        """What a program of PBS says."""
        done = subprocess.run([self.bin / argv[0], *argv[1:]], capture_output=True, text=True, timeout=600)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def qmgr(self, command: str, check: bool = True) -> str:
        return self.call("qmgr", "-c", command, check=check)

    def start_mom(self, node: str) -> None:
        """Start the daemon of a node; returns when the server has its node."""
        script = self.folder / f"mom-{node}.sh"
        log = self.folder / f"mom-{node}.log"
        script.write_text(_mom_script(self, node))
        command = [*nodes.confined(self.plan, node), "unshare", "--mount", "--propagation", "private"]
        with log.open("wb") as output:
            self.moms[node] = subprocess.Popen(
                [*command, "sh", str(script)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )  # fmt: skip
        self.wait_for_state(node, "free")

    def wait_for_state(self, node: str, state: str) -> None:
        deadline = time.monotonic() + patient(_START_SECONDS)
        while f"state = {state}" not in self.call("pbsnodes", node, check=False):
            assert time.monotonic() < deadline, f"{node}: {self.call('pbsnodes', node, check=False)}"
            time.sleep(0.5)

    def kill_mom(self, node: str) -> None:
        """SIGKILL a node's daemon; what it started goes on, as far as it may."""
        self.moms[node].kill()
        self.moms.pop(node).wait()

    def active(self) -> list[str]:
        """Ids of jobs that wait, run or end."""
        return self.call("qselect").split()


def _mom_script(lab: PbsLab, node: str) -> str:
    home = f"/var/spool/rankwise-{node}"
    inner = lab.folder / f"home-{node}"
    folders = "aux checkpoint mom_logs mom_priv/jobs mom_priv/hooks/tmp spool undelivered server_logs"
    conf = _conf(lab, home, node) + f"PBS_START_MOM=1\nPBS_MOM_NODE_NAME={node}\n"
    (lab.folder / f"pbs-{node}.conf").write_text(conf)
    return f"""set -e
mkdir -p {home} {inner}
mount --bind {inner} {home}
mount --bind {lab.folder}/hosts /etc/hosts
cd {home}
mkdir -p {folders}
chmod 1777 spool undelivered; chmod 751 mom_priv mom_priv/jobs
echo PATH={lab.installed}/bin:/usr/local/bin:/usr/bin:/bin > pbs_environment
printf '$clienthost {HEAD}\\n$usecp *:/ /\\n' > mom_priv/config
export PBS_CONF_FILE={lab.folder}/pbs-{node}.conf
exec {lab.installed}/sbin/pbs_mom -N
"""


def _conf(lab: PbsLab, home: str, name: str) -> str:
    return "".join(
        f"{line}\n"
        for line in (
            f"PBS_EXEC={lab.installed}",
            f"PBS_SERVER={HEAD}",
            f"PBS_HOME={home}",
            f"PBS_LEAF_NAME={name}",
            "PBS_SCP=/bin/cp",
            "PBS_RSHCOMMAND=/bin/false",
            "PBS_DATA_SERVICE_USER=postgres",
        )
    )


def _server_script(lab: PbsLab) -> str:
    home = "/var/spool/rankwise-pbs"
    started = "".join(f"PBS_START_{name}=1\n" for name in ("SERVER", "SCHED", "COMM"))
    (lab.folder / "pbs.conf").write_text(_conf(lab, home, HEAD) + started)
    (lab.folder / "hosts").write_text(files.hosts(lab.plan) + f"{lab.plan.head_address}\t{HEAD}\n")
    return f"""set -e
mkdir -p {home} {lab.folder}/home
chmod 755 {lab.folder}/home
mount --bind {lab.folder}/home {home}
mount --bind {lab.folder}/hosts /etc/hosts
hostname {HEAD}
export PBS_CONF_FILE={lab.folder}/pbs.conf
. {lab.folder}/pbs.conf
export PBS_EXEC PBS_HOME PBS_SERVER PBS_DATA_SERVICE_USER
$PBS_EXEC/libexec/pbs_habitat || true
$PBS_EXEC/sbin/pbs_comm
$PBS_EXEC/sbin/pbs_server < /dev/null
$PBS_EXEC/sbin/pbs_sched
touch {lab.folder}/started
exec sleep infinity
"""


def installation() -> Path | None:
    """Where OpenPBS is; None where it is not."""
    found = Path(os.environ.get("OPENPBS", "/opt/rankwise-pbs"))
    return found if (found / "sbin" / "pbs_server").exists() else None


@contextmanager
def pbs_for_tests(plan: LabPlan, folder: Path) -> Iterator[PbsLab]:
    """A server and a daemon on each node of a lab; skips where OpenPBS is not installed."""
    installed = installation()
    if installed is None:
        pytest.skip("OpenPBS is not installed: make pbs-install, or OPENPBS=folder")
    folder.chmod(0o755)
    lab = PbsLab(plan, folder, installed)
    lab.bin.mkdir()
    (folder / "server.sh").write_text(_server_script(lab))
    with (folder / "server.log").open("wb") as output:
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        server = subprocess.Popen(
            [*spaces, "--propagation", "private", "bash", str(folder / "server.sh")], stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True, env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        )  # fmt: skip
    path = os.environ["PATH"]
    try:
        for name in CLIENTS:
            client = lab.bin / name
            enter = f"nsenter --target {server.pid} --mount --uts --wd=/"
            client.write_text(
                f'#!/bin/sh\nexport PBS_CONF_FILE={folder}/pbs.conf\nexec {enter} {installed}/bin/{name} "$@"\n'
            )
            client.chmod(0o755)
        (lab.bin / "pbsdsh").symlink_to(installed / "bin" / "pbsdsh")
        os.environ["PATH"] = f"{lab.bin}:{path}"
        _set_up(lab)
        yield lab
    finally:
        os.environ["PATH"] = path
        for mom in lab.moms.values():
            mom.kill()
            mom.wait()
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
        server.kill()
        server.wait()
        for name in ("pbs", *plan.node_names):
            with suppress(OSError):  # bound over in the namespaces alone
                Path(f"/var/spool/rankwise-{name}").rmdir()


def _set_up(lab: PbsLab) -> None:
    deadline = time.monotonic() + patient(_START_SECONDS)
    # pbs_habitat runs a server of its own for a while.
    while not (lab.folder / "started").exists() or "Server" not in lab.qmgr("list server", check=False):
        if time.monotonic() > deadline:
            sys.stderr.write((lab.folder / "server.log").read_text())
            raise AssertionError("pbs_server is not up")
        time.sleep(0.5)
    for command in (
        "set server acl_roots = root@*",
        "set server flatuid = True",
        "set server job_history_enable = True",
        "set server node_fail_requeue = 20",
        "set server scheduler_iteration = 5",
    ):
        lab.qmgr(command)
    for node in lab.plan.node_names:
        lab.qmgr(f"create node {node}")
    for node in lab.plan.node_names:
        lab.start_mom(node)
        lab.qmgr(f"set node {node} resources_available.ncpus = 1")
