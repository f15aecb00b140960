"""Two hosts on one machine, for jobs of several nodes without Slurm: namespaces of network, host name and mounts.

    with TwoHosts(tmp_path) as hosts:
        hosts.launch(paths)         # slurm.launch on both, with the variables that srun sets

Needs root. A cable (a pair of veth devices) connects them; nothing else does, and no name server answers.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from configs.plans.job import JobEnd
from configs.plans.paths import JobPaths

NAMES = ("east1", "east2")


def why_not() -> str | None:
    """What is missing to make two hosts here; None where nothing is."""
    if os.geteuid() != 0:
        return "two hosts on one machine need root, for namespaces"
    missing = [program for program in ("unshare", "nsenter", "ip") if shutil.which(program) is None]
    if missing:
        return f"two hosts on one machine need {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True)
    return "namespaces may not be made here" if tried.returncode else None


class TwoHosts:
    """Both, and what was started on them."""

    def __init__(self, folder: Path) -> None:
        self._hosts_file = folder / "hosts"
        self._holders: list[subprocess.Popen[bytes]] = []
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._job_ids = itertools.count(os.getpid() * 1000)

    def __enter__(self) -> "TwoHosts":
        addresses = [f"10.99.0.{place}" for place in (1, 2)]
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in zip(addresses, NAMES, strict=True))]
        self._hosts_file.write_text("\n".join(lines) + "\n")
        script = (
            'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind /dev/null /etc/resolv.conf'
            " && ip link set lo up && echo up && exec sleep infinity"
        )
        for name in NAMES:
            namespaces = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, "sh", name, self._hosts_file]
            holder = subprocess.Popen(namespaces, stdout=subprocess.PIPE)
            self._holders.append(holder)
            assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
            holder.stdout.close()
        first, second = (str(holder.pid) for holder in self._holders)
        cable = ["ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second]
        subprocess.run(cable, check=True)
        for place, address in enumerate(addresses):
            self.run(place, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            self.run(place, "ip", "link", "set", "eth0", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for launcher in self._launchers:
            with suppress(ProcessLookupError):
                os.kill(launcher.pid, signal.SIGTERM)
        for launcher in self._launchers:
            launcher.wait(600)
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def inside(self, place: int) -> list[str]:
        """What to put before a command to run it on one of the hosts."""
        return ["nsenter", "--net", "--uts", "--mount", "--target", str(self._holders[place].pid)]

    def run(self, place: int, *command: str) -> str:
        """Run a command on one of the hosts, to its end; its output."""
        done = subprocess.run([*self.inside(place), *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, paths: JobPaths, *places: int, below_a_shell: bool = False) -> list[subprocess.Popen[bytes]]:
        """Start the launcher on these hosts (both) as srun would, and return at once."""
        job_id = str(next(self._job_ids))
        started = []
        for place in places or range(len(NAMES)):
            slurm = {
                "SLURM_JOB_ID": job_id,
                "SLURM_STEP_ID": "0",
                "SLURM_NODEID": str(place),
                "SLURM_JOB_NUM_NODES": str(len(NAMES)),
                "SLURM_JOB_NODELIST": "east[1-2]",
                "SLURMD_NODENAME": NAMES[place],
            }
            # As the scheduler confines them: a core each.
            core = str(sorted(os.sched_getaffinity(0))[place % len(os.sched_getaffinity(0))])
            command = ["taskset", "-c", core, sys.executable, "-m", "slurm.launch", str(paths.job)]
            if below_a_shell:
                command = ["sh", "-c", '"$@" & wait', "sh", *command]
            started.append(subprocess.Popen([*self.inside(place), *command], env=os.environ | slurm))
        self._launchers += started
        return started

    def launch(self, paths: JobPaths, limit_seconds: float = 120) -> list[JobEnd]:
        """Run the job on both hosts to its end; how each node says that it ended."""
        deadline = time.monotonic() + limit_seconds
        for launcher in self.start(paths):
            assert launcher.wait(deadline - time.monotonic()) == 0
        return node_ends(paths)


def node_ends(paths: JobPaths) -> list[JobEnd]:
    """How each node says that the job ended."""
    return [JobEnd.model_validate_json(paths.node_end(place).read_bytes()) for place in range(len(NAMES))]
