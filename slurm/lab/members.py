"""Which processes on this machine belong to a lab, found from nothing but the processes themselves.

Everything that `lab up` starts carries the lab's name in its environment, jobs do not; those are found by the
network namespace in which they live. So a lab can be taken down when its state folder is gone, and nobody else's
process is ever taken for one of a lab.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from configs.common.system.proc import environment_of, network_namespace, process_ids
from slurm.lab.commands import output_of

LAB = "RANKWISE_LAB"
FOLDER = "RANKWISE_LAB_FOLDER"
NODE = "RANKWISE_LAB_NODE"
HOLDER = "sleep"  # what holds a node's namespaces once they are complete


@dataclass(frozen=True)
class LabProcess:
    """A living process that bears a lab's mark."""

    pid: int
    program: str
    node: str | None
    folder: Path


def marks(name: str, folder: Path, node: str | None = None) -> dict[str, str]:
    """Environment of everything that is started for a lab."""
    found = {LAB: name, FOLDER: str(folder)}
    return found | {NODE: node} if node is not None else found


def alias(name: str, node: str) -> str:
    """What a node's network device is called beside its name: tells whose namespace it is."""
    return f"rankwise-lab {name} {node}"


def members(name: str | None = None) -> list[LabProcess]:
    """Living processes with a lab's mark; of all labs without a name."""
    found = []
    for pid in process_ids():
        with suppress(OSError):
            environment = environment_of(pid)
            if LAB in environment and name in (None, environment[LAB]):
                program = Path(f"/proc/{pid}/comm").read_text().strip()
                found.append(LabProcess(pid, program, environment.get(NODE), Path(environment.get(FOLDER, "/"))))
    return found


def running(name: str, program: str, node: str | None = None) -> int | None:
    """The pid of a lab's daemon; None where it does not run."""
    return next((each.pid for each in members(name) if each.program == program and each.node == node), None)


def holder(name: str, node: str) -> int | None:
    """The process that holds a node's namespaces; None where the node is not there or not complete."""
    return running(name, HOLDER, node)


def folder_of(name: str) -> Path | None:
    """The state folder of a lab of which anything runs."""
    return next((each.folder for each in members(name)), None)


def inhabitants(name: str, node: str | None = None) -> list[int]:
    """Everything that lives on a node, or on any node: its slurmd, the jobs, what `lab exec` started.

    Without the process that holds the namespace open, which is the node itself.
    """
    spaces = namespaces(name, node)
    return [pid for pid in in_namespaces(spaces) if pid not in {holder(name, each) for each in spaces.values()}]


def namespaces(name: str, node: str | None = None) -> dict[str, str]:
    """Network namespaces of a lab's nodes, and whose each is.

    By the marks of those who live in them, and where none of these is left, by the name of the network device.
    """
    mine = network_namespace()
    found: dict[str, str] = {}
    marked = {each.pid: each.node for each in members(name) if each.node is not None}
    for pid, whose in marked.items():
        if (space := network_namespace(pid)) not in (None, mine):
            assert space is not None
            found[space] = whose
    seen = {mine, *found}
    for pid in process_ids():
        space = network_namespace(pid)
        if space is None or space in seen:
            continue
        seen.add(space)
        told = output_of(["nsenter", "--target", str(pid), "--net", "ip", "-o", "link", "show", "dev", "eth0"])
        whose = next((word for word in _words_after(told, alias(name, "").strip())), "")
        if whose:
            found[space] = whose
    return {space: whose for space, whose in found.items() if node in (None, whose)}


def in_namespaces(spaces: dict[str, str]) -> list[int]:
    """All processes in these network namespaces."""
    return [pid for pid in process_ids() if network_namespace(pid) in spaces]


def _words_after(text: str | None, start: str) -> list[str]:
    return (text or "").partition(start)[2].split()[:1] if text and start in text else []
