"""Queues and nodes of a PBS server, and checks of a study's requirements against them.

    cluster = read_pbs_cluster()                          # ClusterError: one sentence for whoever submits
    cluster.lacks(target, [Need(nodes=2, cores=1)])       # problems, each naming what would have worked

`pbsnodes -a -F json` and `qstat -Q -f -F json` are asked. Several vnodes of one host are added up: with
`place=scatter` a host gives one chunk, which is held against the largest of its vnodes only by PBS itself.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.targets.target import PbsTarget
from slurm.schedulers.commands.accounting import duration_seconds
from slurm.schedulers.commands.listing import ClusterError, ClusterNode
from slurm.schedulers.commands.partitions import Need, too_few
from slurm.schedulers.pbs.calls import run_pbs
from slurm.schedulers.pbs.jobs import size_bytes

_LIMIT_SECONDS = 30.0
_AWAY = ("down", "offline", "stale", "state-unknown", "unresolvable", "initializing", "provisioning", "maintenance")


@dataclass(frozen=True)
class PbsNode:
    """A node, and the queue that it is kept for; None for all."""

    node: ClusterNode
    queue: str | None


@dataclass(frozen=True)
class PbsCluster:
    """What a server said of its queues, by name, and of its nodes."""

    server: str
    queues: dict[str, dict[str, Any]]
    nodes: tuple[PbsNode, ...]

    def lacks(self, target: PbsTarget, needs: Sequence[Need]) -> list[str]:
        """Return the requirements of a study that the target's queue does not meet, as `field: what is wrong`."""
        problems = []
        queue = self.queues.get(target.queue) if target.queue is not None else {}
        if queue is None:
            known = ", ".join(sorted(self.queues)) or "none"
            return [f"queue: unknown queue {target.queue} of server {self.server}\n  use one of: {known}"]
        for word, what in (("enabled", "takes"), ("started", "starts")):
            if str(queue.get(word, "True")) != "True":
                problems.append(f"queue: {target.queue} {what} no jobs ({word} is {queue[word]})")
        most = queue.get("resources_max")
        limit = duration_seconds(str(most.get("walltime", ""))) if isinstance(most, dict) else None
        if limit is not None and target.time_limit_minutes is not None and 60 * target.time_limit_minutes > limit:
            problems.append(
                f"time_limit_minutes: got {target.time_limit_minutes}, but queue {target.queue} allows {limit / 60:g}"
            )
        asked = size_bytes(target.memory_per_node) if target.memory_per_node else 0
        for need in dict.fromkeys(needs):
            problem = too_few(target, need, self._of(target), (asked or 0) >> 20, "pbsnodes -l")
            if problem is not None:
                problems.append(f"nodes: server {self.server} {problem}")
        return problems

    def identity(self, target: PbsTarget) -> str:
        """What figures of a target are comparable by: `server head, queue workq, nodes of 1 CPU, 9 GiB`."""
        kinds = " or ".join(sorted({node.kind for node in self._of(target)})) or "unknown"
        return f"server {self.server}, {target.where}, nodes of {kinds}"

    def _of(self, target: PbsTarget) -> tuple[ClusterNode, ...]:
        """Nodes that a target's jobs may get.

        Where each is kept for a queue, the default queue and one that routes jobs to others may get any.
        """
        own = tuple(each.node for each in self.nodes if each.queue is None or each.queue == target.queue)
        takes_jobs = self.queues.get(target.queue or "", {}).get("queue_type") == "Execution"
        return own if own or takes_jobs else tuple(each.node for each in self.nodes)


def read_pbs_cluster(server: str | None = None) -> PbsCluster:
    """Ask the server that pbs.conf names, or another one. Raises ClusterError."""
    told = _asked(["pbsnodes", "-a", "-F", "json"], server)
    queues = _asked(["qstat", "-Q", "-f", "-F", "json"], server)
    return read_nodes(told, queues)


def parse_answer(text: str) -> dict[str, Any] | None:
    """What a program of PBS wrote as JSON; None for what is none."""
    try:
        said = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def read_nodes(told: dict[str, Any], queues: dict[str, Any]) -> PbsCluster:
    """The cluster of what pbsnodes and qstat -Q said."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for name, vnode in _objects(told.get("nodes")).items():
        there = _objects(vnode)
        host = _objects(there.get("resources_available")).get("host", name)
        hosts.setdefault(str(host), []).append(there)
    nodes = tuple(_node(host, vnodes) for host, vnodes in hosts.items())
    known = {name: _objects(queue) for name, queue in _objects(queues.get("Queue")).items()}
    return PbsCluster(str(told.get("pbs_server", "unknown")), known, nodes)


def _node(host: str, vnodes: Sequence[dict[str, Any]]) -> PbsNode:
    there = [_objects(vnode.get("resources_available")) for vnode in vnodes]
    states = [str(vnode.get("state", "")) for vnode in vnodes]
    away = next((word for state in states for word in state.split(",") if word in _AWAY), None)
    memory = (sum(size_bytes(str(each.get("mem", ""))) or 0 for each in there) >> 20) or None
    gpus = sum(_whole(each.get("ngpus")) for each in there)
    state = f"down ({away})" if away else states[0]
    node = ClusterNode(host, sum(_whole(each.get("ncpus")) for each in there), memory, state, (), f"gpu:{gpus}")
    queue = vnodes[0].get("queue")
    return PbsNode(node, None if queue is None else str(queue))


def _whole(value: object) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0


def _objects(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _asked(command: list[str], server: str | None) -> dict[str, Any]:
    """What a command of PBS says. Raises ClusterError."""
    if shutil.which(command[0]) is None:
        raise ClusterError(f"`{command[0]}`: not found on PATH. Submit from a machine of the cluster")
    answer = run_pbs(command, os.environ, _LIMIT_SECONDS, server)
    said = None if answer.failed else parse_answer(answer.text)
    if said is None:
        raise ClusterError(f"PBS: no response of `{' '.join(command)}` (server {server or 'of pbs.conf'})")
    return said
