"""Partitions and nodes of a cluster, and checks of a study's requirements against them.

    cluster = read_cluster()                       # ClusterError: one sentence for whoever submits
    lacks(target, [Need(nodes=2, cores=1)], cluster)      # problems, each naming what would have worked
    partition_nodes(target)                           # names of nodes that can take a job

Two commands are asked, `scontrol show config` for the cluster's name and `sinfo` for all nodes of all partitions, also
of those with Hidden=YES, which take jobs like others (its --format is documented in sinfo(1): %R partition, %P the same
with `*` for the default one, %N node, %c CPUs, %m MB of memory, %G generic resources, %l time limit as
days-hours:minutes:seconds, %T state, %a availability, %f features).
A node's state may end in a sign: `*` does not respond, `$` under maintenance, `~` powered down until a job needs it.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from configs.targets.resources import ClusterTarget
from configs.targets.target import SlurmTarget
from slurm.launcher.node import host_names
from slurm.schedulers.commands.calls import on_cluster, without_defaults

_LIMIT_SECONDS = 30.0
_FORMAT = "%R|%P|%N|%c|%m|%G|%l|%T|%a|%f"
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval", "future", "not_responding", "perfctrs")
_FEATURE = r"[\w.-]+"
_UNSET_MB = 1  # RealMemory where slurm.conf does not set it
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


class ClusterError(ValueError):
    """The scheduler cannot be asked; the message says so in one sentence."""


@dataclass(frozen=True)
class ClusterNode:
    """One node as a partition shows it."""

    name: str
    cpus: int
    memory_mb: int | None
    """None: the cluster does not say (Slurm: RealMemory is not set, whose default is 1; slurm.conf(5))."""
    state: str
    features: tuple[str, ...]
    resources: str = ""

    def gpus_of(self, kind: str | None) -> int:
        """GPUs of a type; of all types for None."""
        return count_gpus(self.resources, kind)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Their types, as the cluster names them; none where it names none."""
        return tuple(dict.fromkeys(each for each, _ in _gpus(self.resources) if each))

    def holds(self, memory_mb: int) -> bool:
        """Whether it has so much memory; true where that is unknown, and left to the scheduler."""
        return self.memory_mb is None or self.memory_mb >= memory_mb

    @property
    def usable(self) -> bool:
        """Whether it takes jobs, now or when others have ended."""
        return not self.state.startswith(_UNUSABLE) and not self.state.endswith("*")

    @property
    def shape(self) -> str:
        """What makes nodes alike: `2 CPUs, 1500 MB`."""
        return self._with("memory unknown" if self.memory_mb is None else f"{self.memory_mb} MB")

    @property
    def kind(self) -> str:
        """The same to the GiB: what a node reports of its memory varies a little."""
        return self._with("memory unknown" if self.memory_mb is None else f"{self.memory_mb / 1024:.0f} GiB")

    def _with(self, memory: str) -> str:
        count = self.gpus_of(None)
        gpus = f", {_several(count, 'GPU')}" if count else ""
        return f"{_several(self.cpus, 'CPU')}, {memory}{gpus}"


@dataclass(frozen=True)
class Partition:
    """A partition with its nodes. `time_limit_minutes` is None where there is no limit."""

    name: str
    default: bool
    up: bool
    time_limit_minutes: int | None
    nodes: tuple[ClusterNode, ...]


@dataclass(frozen=True)
class Partitions:
    """All partitions, by name."""

    name: str
    partitions: dict[str, Partition]

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
        return f"{_several(self.nodes, 'node')} with {_several(self.cores, 'core')}{memory}{' each' * (self.nodes > 1)}"


def read_cluster(cluster: str | None = None) -> Partitions:
    """Ask the scheduler of the cluster that SLURM_CONF names, or of another. Raises ClusterError."""
    config = _asked(["scontrol", "show", "config"], cluster)
    named = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    return Partitions(named.group(1) if named else "unknown", read_partitions(_asked(_SINFO, cluster)))


class Clusters:
    """Each cluster that targets name, asked once."""

    def __init__(self) -> None:
        self._known: dict[str | None, Partitions] = {}

    def of(self, target: SlurmTarget) -> Partitions:
        """The cluster of a target. Raises ClusterError."""
        if target.cluster not in self._known:
            self._known[target.cluster] = read_cluster(target.cluster)
        return self._known[target.cluster]


_SINFO = ["sinfo", "--all", "--Node", "--exact", "--noheader", f"--format={_FORMAT}"]


def partition_nodes(target: SlurmTarget) -> tuple[str, ...]:
    """Nodes of the target's partition that take its jobs, by name.

    None where the scheduler cannot say, or jobs can avoid none: sbatch refuses to keep one from a node of its list.
    """
    if target.extra.get("nodelist") or target.extra.get("nodefile"):
        return ()
    try:
        partitions = read_partitions(_asked(_SINFO, target.cluster))
        found = Partitions("", partitions).partition_of(target)
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
        told = _asked(["scontrol", "--oneliner", "show", "reservation", reservation], target.cluster)
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
        return f"cluster {cluster.name}, partition {_chosen(target, 'partition')}"
    shapes = " or ".join(sorted({node.kind for node in _wanted(target, partition)})) or "unknown"
    return f"cluster {cluster.name}, partition {partition.name}, nodes of {shapes}"


def lacks(target: SlurmTarget, needs: Sequence[Need], cluster: Partitions) -> list[str]:
    """Return the requirements of a study that the target's partition does not meet, as `field: what is wrong`."""
    partition = cluster.partition_of(target)
    if partition is None:
        known = ", ".join(sorted(cluster.partitions)) or "none"
        named = _chosen(target, "partition")
        if named is None:
            return [f"partition: not set, and cluster {cluster.name} has no default partition. Use one of: {known}"]
        source = "" if target.partition or target.extra.get("partition") else " (of SBATCH_PARTITION)"
        return [f"partition: unknown partition {named}{source} of cluster {cluster.name}\n  use one of: {known}"]
    problems = [] if partition.up else [f"partition: {partition.name} is not up and starts no jobs"]
    limit, asked = partition.time_limit_minutes, target.time_limit_minutes
    if limit is not None and asked is not None and asked > limit:
        problems.append(f"time_limit_minutes: got {asked}, but partition {partition.name} allows {limit}")
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
    wanted += f", {_several(target.gpus_per_node, kind)} per node" if target.gpus_per_node else ""
    if len(large) < need.nodes:
        there = "; ".join(f"{_several(count, 'node')} of {shape}" for shape, count in _shapes(nodes).items())
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


def megabytes(written: str) -> int:
    """Of a size as --mem takes it: `16G`, or megabytes without a unit."""
    unit = written[-1] if written[-1] in _SIZES else "M"
    return int(float(written.rstrip("KMGT")) * _SIZES[unit])


def read_partitions(text: str) -> dict[str, Partition]:
    """Of sinfo's lines, one for each node in each partition."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != _FORMAT.count("|") + 1:
            continue
        name, starred, node, cpus, memory, resources, limit, state, available, features = fields
        known = found.get(name)
        memory_mb = _whole(memory) if _whole(memory) > _UNSET_MB else None
        there = ClusterNode(node, _whole(cpus), memory_mb, state.lower(), tuple(features.split(",")), resources)
        found[name] = Partition(
            name=name,
            default=starred.endswith("*"),
            up=available.lower() == "up",
            time_limit_minutes=minutes_of(limit),
            nodes=(*(known.nodes if known is not None else ()), *([there] if node not in ("", "(null)") else [])),
        )
    return found


def _whole(text: str) -> int:
    digits = re.match(r"[0-9]{1,15}", text)
    return int(digits.group()) if digits else 0


def count_gpus(resources: str, kind: str | None) -> int:
    """Of `gpu:h100:4(S:0-1),gpu:a100:2,lustre:1`: 6, and of kind h100: 4."""
    found = _gpus(resources)
    return sum(int(count) for each, count in found if kind is None or each.lower() == kind.lower())


def _gpus(resources: str) -> list[tuple[str, str]]:
    """Type, empty where there is none, and count."""
    return re.findall(r"(?:^|,)gpu(?::([^:,()]+))?:([0-9]{1,9})", resources)


def minutes_of(limit: str) -> int | None:
    """`1-02:00:00`, `02:00:00` or `30:00` in minutes, rounded down; None for `infinite` and `n/a`."""
    matched = re.fullmatch(r"(?:(\d{1,9})-)?(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})", limit.strip(), re.ASCII)
    if matched is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in matched.groups())
    return (days * 24 + hours) * 60 + minutes


def _asked(command: list[str], cluster: str | None = None) -> str:
    """What a command of Slurm says. Raises ClusterError."""
    where = f"SLURM_CONF={os.environ['SLURM_CONF']}" if "SLURM_CONF" in os.environ else "SLURM_CONF is not set"
    where += f", cluster {cluster}" if cluster else ""
    try:
        done = subprocess.run(
            on_cluster(command, cluster),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_SECONDS,
            env=without_defaults(os.environ),
        )
    except FileNotFoundError as error:
        raise ClusterError(
            f"`{command[0]}`: not found on PATH. Submit from a machine of the cluster "
            "(docs/how-to/clusters/lab.md: how to run a cluster on this machine)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"Slurm: `{command[0]}` timed out after {_LIMIT_SECONDS:.0f} s ({where})") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ClusterError(f"Slurm: no response ({where}): {said}")
    return done.stdout


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
