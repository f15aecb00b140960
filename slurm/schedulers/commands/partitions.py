"""Partitions and nodes of a cluster, and checks of a study's requirements against them.

    cluster = read_cluster()                       # ClusterError: one sentence for whoever submits
    lacks(target, [Need(nodes=2, cores=1)], cluster)      # problems, each naming what would have worked
    partition_nodes(target)                           # names of nodes that can take a job

What a site hides from its users (PrivateData of slurm.conf) is left to sbatch, which is asked before jobs are
submitted.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from configs.targets.resources import ClusterTarget
from configs.targets.target import SlurmTarget
from slurm.launcher.node import host_names
from slurm.schedulers.commands.listing import (
    ClusterNode,
    Partition,
    asked,
    megabytes,
    several,
    shown_partitions,
)

_FEATURE = r"[\w.-]+"


@dataclass(frozen=True)
class Partitions:
    """All partitions, by name. `private` where the site shows its users none."""

    name: str
    partitions: dict[str, Partition]
    private: bool = False

    @cached_property
    def default(self) -> Partition | None:
        """Where jobs go that name no partition."""
        return next((partition for partition in self.partitions.values() if partition.default), None)

    def partition_of(self, target: SlurmTarget) -> Partition | None:
        """The partition that a target names or its allocation is of, else the default one; None where there is none."""
        named = _chosen(target, "partition") if target.allocation is None else os.environ.get("SLURM_JOB_PARTITION")
        return self.default if named is None else self.partitions.get(named)


@dataclass(frozen=True)
class Need:
    """What some cell needs: so many nodes, on each so many cores and so much memory."""

    nodes: int
    cores: int
    memory_mb: int = 0

    def __str__(self) -> str:
        memory = f" and {self.memory_mb} MB" if self.memory_mb else ""
        return f"{several(self.nodes, 'node')} with {several(self.cores, 'core')}{memory}{' each' * (self.nodes > 1)}"


def read_cluster(cluster: str | None = None) -> Partitions:
    """Ask the scheduler of the cluster that SLURM_CONF names, or of another. Raises ClusterError."""
    config = asked(["scontrol", "show", "config"], cluster)
    named = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    shown = shown_partitions(cluster)
    return Partitions(named.group(1) if named else "unknown", shown or {}, private=shown is None)


class Clusters:
    """Each cluster that targets name, asked once."""

    def __init__(self) -> None:
        self._known: dict[str | None, Partitions] = {}

    def of(self, target: SlurmTarget) -> Partitions:
        """The cluster of a target. Raises ClusterError."""
        if target.cluster not in self._known:
            self._known[target.cluster] = read_cluster(target.cluster)
        return self._known[target.cluster]


def partition_nodes(target: SlurmTarget) -> tuple[str, ...]:
    """Nodes of the target's partition that take its jobs, by name.

    None where the scheduler cannot say, or jobs can avoid none: sbatch refuses to keep one from a node of its list.
    """
    if target.extra.get("nodelist") or target.extra.get("nodefile"):
        return ()
    try:
        found = Partitions("", shown_partitions(target.cluster) or {}).partition_of(target)
        nodes = found.nodes if found is not None else ()
        usable = tuple(node.name for node in nodes if node.usable and _suits(node, target))
        if target.allocation is not None:
            return tuple(name for name in usable if name in _own_nodes())
        return _allowed(target, usable)
    except ValueError:
        return ()


def _suits(node: ClusterNode, target: SlurmTarget) -> bool:
    """Whether a node has the features, GPUs and memory that jobs of the target ask for.

    Raises ValueError for a constraint with other operators than one of & and |.
    """
    memory = megabytes(target.memory_per_node) if target.memory_per_node else 0
    if not node.holds(memory) or node.gpus_of(target.gpu_type) < (target.gpus_per_node or 0):
        return False
    constraint = _chosen(target, "constraint")
    if constraint is None:
        return True
    for operator, enough in (("&", all), ("|", any)):
        features = constraint.split(operator)
        if all(re.fullmatch(_FEATURE, feature) for feature in features):
            return enough(feature in node.features for feature in features)
    raise ValueError(f"constraint: {constraint} is left to Slurm")


def _allowed(target: SlurmTarget, names: Sequence[str]) -> tuple[str, ...]:
    """The nodes of the target's reservation alone, and none that its own `exclude` leaves out.

    Raises ClusterError, and ValueError for a list of nodes that cannot be read, as that of a file.
    """
    reservation = _chosen(target, "reservation")
    if reservation is not None:
        told = asked(["scontrol", "--oneliner", "show", "reservation", reservation], target.cluster)
        nodes = re.search(r" Nodes=(\S+)", told)
        reserved = host_names(nodes[1]) if nodes else ()
        names = [name for name in names if name in reserved]
    excluded = str(target.extra.get("exclude") or "")
    if "/" in excluded:
        raise ValueError(f"target.extra: exclude: {excluded} is a file")
    left_out = host_names(excluded) if excluded else ()
    return tuple(name for name in names if name not in left_out)


def _own_nodes() -> tuple[str, ...]:
    """Nodes of the allocation that this process runs in, by name; none outside of one."""
    try:
        return host_names(os.environ.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return ()


def cluster_identity(target: SlurmTarget, cluster: Partitions) -> str:
    """What figures of a target are comparable by: `cluster lab, partition lab, nodes of 1 CPU, 9 GiB`."""
    partition = cluster.partition_of(target)
    if partition is None:
        return f"cluster {cluster.name}, partition {_chosen(target, 'partition') or 'by default'}"
    shapes = " or ".join(sorted({node.kind for node in _wanted(target, partition)})) or "unknown"
    return f"cluster {cluster.name}, partition {partition.name}, nodes of {shapes}"


def lacks(target: SlurmTarget, needs: Sequence[Need], cluster: Partitions) -> list[str]:
    """Return the requirements of a study that the target's partition does not meet, as `field: what is wrong`."""
    partition = cluster.partition_of(target)
    if partition is None and cluster.private:
        return []
    if partition is None:
        known = ", ".join(sorted(cluster.partitions)) or "none"
        named = _chosen(target, "partition")
        if named is None:
            return [f"partition: not set, and cluster {cluster.name} has no default partition. Use one of: {known}"]
        source = "" if target.partition or target.extra.get("partition") else " (of SBATCH_PARTITION)"
        return [f"partition: unknown partition {named}{source} of cluster {cluster.name}\n  use one of: {known}"]
    problems = [] if partition.up else [f"partition: {partition.name} is not up and starts no jobs"]
    limit, wanted = partition.time_limit_minutes, target.time_limit_minutes
    if limit is not None and wanted is not None and wanted > limit:
        problems.append(f"time_limit_minutes: got {wanted}, but partition {partition.name} allows {limit}")
    if partition.hidden_nodes is not None:
        return problems + _more_than_hidden(partition, needs)
    nodes = _wanted(target, partition)
    if partition.nodes and not nodes:
        feature = _chosen(target, "constraint")
        problems.append(f"constraint: no node of partition {partition.name} has the feature {feature}")
        return problems
    memory = megabytes(target.memory_per_node) if target.memory_per_node else 0
    for need in dict.fromkeys(needs):
        problem = too_few(target, need, nodes, memory, "scontrol show node")
        if problem is not None:
            problems.append(f"partition: {partition.name} {problem}")
    return problems


def _more_than_hidden(partition: Partition, needs: Sequence[Need]) -> list[str]:
    """What asks for more nodes than there are, of a partition whose nodes the site does not show."""
    most = max((need.nodes for need in needs), default=0)
    if most <= partition.node_count:
        return []
    there = several(partition.node_count, "node")
    return [f"partition: {partition.name} cannot give {several(most, 'node')}: it has {there}"]


def too_few(
    target: ClusterTarget, need: Need, nodes: Sequence[ClusterNode], memory_mb: int, command: str
) -> str | None:
    """Return why these nodes cannot meet a requirement; None where they can.

    memory_mb: on each node, by the target. command: says why a node takes no jobs.
    """
    memory = max(need.memory_mb, memory_mb)
    large = [
        node
        for node in nodes
        if node.cpus >= need.cores
        and node.holds(memory)
        and node.gpus_of(target.gpu_type) >= (target.gpus_per_node or 0)
    ]
    wanted = f"{Need(need.nodes, need.cores, memory)}"
    kind = f"{target.gpu_type} GPU" if target.gpu_type else "GPU"
    wanted += f", {several(target.gpus_per_node, kind)} per node" if target.gpus_per_node else ""
    if len(large) < need.nodes:
        there = "; ".join(f"{several(count, 'node')} of {shape}" for shape, count in _shapes(nodes).items())
        return f"cannot give {wanted}: it has {there or 'no nodes'}"
    away = [node for node in large if not node.usable]
    if len(large) - len(away) < need.nodes:
        states = ", ".join(f"{node.name} is {node.state}" for node in away[:4])
        return f"cannot give {wanted} now: {states} ({command} says why)"
    return None


def _shapes(nodes: Sequence[ClusterNode]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.shape] = counts.get(node.shape, 0) + 1
    return counts


def _wanted(target: SlurmTarget, partition: Partition) -> tuple[ClusterNode, ...]:
    """The nodes that the target's constraint leaves; one with operators is left to Slurm."""
    feature = _chosen(target, "constraint")
    if feature is None or not re.fullmatch(_FEATURE, feature):
        return partition.nodes
    return tuple(node for node in partition.nodes if feature in node.features)


def _chosen(target: SlurmTarget, option: str) -> str | None:
    """The value of an option that jobs are submitted with: the target's, else that of the user's variable of sbatch.

    `extra` comes before the field of the same name, as in what sbatch is given. Submissions keep such a variable
    (`SBATCH_PARTITION`) where the target leaves the choice open.
    """
    given = target.extra.get(option) or getattr(target, option)
    if given is not None or target.allocation is not None:
        return None if given is None else str(given)
    return os.environ.get(f"SBATCH_{option.upper()}") or None
