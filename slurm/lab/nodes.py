"""The namespaces that make a node: network, host name, mounts.

One process, `sleep`, holds them open; nothing is bound to a path of this machine, so that no mount and no file can
stay behind. They are entered with nsenter: `ip netns exec` remounts /sys, which hides the cgroups from slurmd.
"""

import os
import time
from pathlib import Path

from configs.common.files.reading import MIB, read_tail
from slurm.lab import members
from slurm.lab.commands import LabError, leave_running, program
from slurm.lab.plan import LabPlan

_LIMIT_SECONDS = 20.0


def ensure_node(plan: LabPlan, node: str) -> bool:
    """Make a node's namespaces where they are not there. Returns whether they were not. Raises LabError."""
    if members.holder(plan.name, node) is not None:
        return False
    for cgroup in plan.node_cgroups(node):
        cgroup.mkdir(parents=True, exist_ok=True)
    log = plan.logs / f"node-{node}.log"
    spaces = ["unshare", "--net", "--uts", "--mount", "--propagation", "private"]
    script = plan.folder / "nodes" / node / "node.sh"
    leave_running([*spaces, "sh", str(script)], members.marks(plan.name, plan.folder, node), log)
    deadline = time.monotonic() + _LIMIT_SECONDS
    while members.holder(plan.name, node) is None:
        if time.monotonic() > deadline:
            raise LabError(f"node {node}: not up within {_LIMIT_SECONDS:g} s\n{end_of(log)}")
        time.sleep(0.05)
    return True


def inside(name: str, node: str) -> list[str]:
    """The beginning of a command that shall run on a node. Raises LabError where there is no such node."""
    pid = members.holder(name, node)
    if pid is None:
        raise LabError(f"node {node} of lab {name}: not up. Start it with `rankwise lab up`")
    return ["nsenter", "--target", str(pid), "--net", "--uts", "--mount"]


def confined(plan: LabPlan, node: str) -> list[str]:
    """As `inside`, on the node's own cores only; children inherit them (sched_setaffinity(2))."""
    cores = ",".join(str(core) for core in plan.cores(node))
    return [*inside(plan.name, node), "--wd=/", "taskset", "--cpu-list", cores]


def enter_node(plan: LabPlan, node: str, command: list[str]) -> None:
    """Replace this process by a command on a node, in the current folder if the node sees it."""
    place = os.getcwd()
    shell = 'cd -- "$1" 2>/dev/null || cd /; shift; exec "$@"'
    argv = [*confined(plan, node), "sh", "-c", shell, "sh", place, *command]
    os.execve(program(argv[0]), argv, {**os.environ, "SLURM_CONF": str(plan.slurm_conf)})


def end_of(log: "os.PathLike[str]", lines: int = 12) -> str:
    """The last lines of a log, indented, for an error's message."""
    try:
        told = read_tail(Path(log), MIB).splitlines()[-lines:]
    except (OSError, ValueError):
        told = []
    return "\n".join([f"the end of {os.fspath(log)}:", *(f"  {line}" for line in told or ["(empty)"])])
