"""What Slurm shows of a cluster's partitions and nodes, asked and read.

    shown_partitions()                     # {"gpu": Partition(...)}; ClusterError: one sentence for whoever submits
    asked(["scontrol", "show", "config"])

`sinfo` shows all nodes of all partitions, also of those with Hidden=YES, which take jobs like others (its --format is
documented in sinfo(1): %R partition, %P the same with `*` for the default one, %N node, %c CPUs, %m MB of memory, %G
generic resources, %l time limit as days-hours:minutes:seconds, %T state, %a availability, %f features).
A node's state may end in a sign: `*` does not respond, `$` under maintenance, `~` powered down until a job needs it.

A site can hide all nodes from its users (PrivateData=nodes, slurm.conf(5)). sinfo then shows nothing at all, and
`scontrol show partition` still how many nodes a partition has and how long it lets jobs run; PrivateData=partitions
hides these, too.
"""

import os
import re
import subprocess
from dataclasses import dataclass

from slurm.schedulers.commands.calls import on_cluster, without_defaults

_LIMIT_SECONDS = 30.0
_FORMAT = "%R|%P|%N|%c|%m|%G|%l|%T|%a|%f"
_SINFO = ["sinfo", "--all", "--Node", "--exact", "--noheader", f"--format={_FORMAT}"]
_SHOW_PARTITIONS = ["scontrol", "--all", "--oneliner", "show", "partition"]
_UNUSABLE = ("down", "drain", "fail", "error", "unknown", "inval", "future", "not_responding", "perfctrs")
_UNSET_MB = 1  # RealMemory where slurm.conf does not set it
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
# Slurm's text of ESLURM_ACCESS_DENIED, slurm_errno.c of Slurm 20.11 to 25.05.
DENIED = "Access/permission denied"


class ClusterError(ValueError):
    """The scheduler cannot be asked; the message says so in one sentence."""


class Denied(ClusterError):
    """The site shows its users no such thing."""


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
        gpus = f", {several(count, 'GPU')}" if count else ""
        return f"{several(self.cpus, 'CPU')}, {memory}{gpus}"


@dataclass(frozen=True)
class Partition:
    """A partition with its nodes. `time_limit_minutes` is None where there is no limit."""

    name: str
    default: bool
    up: bool
    time_limit_minutes: int | None
    nodes: tuple[ClusterNode, ...]
    hidden_nodes: int | None = None
    """How many nodes it has, where the site shows its users none of them; else None."""

    @property
    def node_count(self) -> int:
        """How many nodes it has, shown or not."""
        return len(self.nodes) if self.hidden_nodes is None else self.hidden_nodes


def shown_partitions(cluster: str | None = None) -> dict[str, Partition] | None:
    """All partitions, by name; None where the site shows its users none. Raises ClusterError."""
    try:
        return read_partitions(asked(_SINFO, cluster))
    except Denied:
        pass
    try:
        return read_hidden(asked(_SHOW_PARTITIONS, cluster))
    except Denied:
        return None


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


def read_hidden(text: str) -> dict[str, Partition]:
    """Of the lines of `scontrol --oneliner show partition`, which name the nodes and do not say what they are."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        name = fields.get("PartitionName")
        if name is not None:
            found[name] = Partition(
                name=name,
                default=fields.get("Default") == "YES",
                up=fields.get("State", "UP") == "UP",
                time_limit_minutes=minutes_of(fields.get("MaxTime", "")),
                nodes=(),
                hidden_nodes=_whole(fields.get("TotalNodes", "")),
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


def asked(command: list[str], cluster: str | None = None) -> str:
    """What a command of Slurm says. Raises ClusterError; Denied where the site hides it from its users."""
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
    except OSError as error:  # a site may keep a program from its users
        why = "not found on PATH" if isinstance(error, FileNotFoundError) else error.strerror
        raise ClusterError(
            f"`{command[0]}`: {why}. Submit from a machine of the cluster "
            "(docs/how-to/clusters/lab.md: how to run a cluster on this machine)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"Slurm: `{command[0]}` timed out after {_LIMIT_SECONDS:.0f} s ({where})") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        denied = DENIED in said
        raise (Denied if denied else ClusterError)(f"Slurm: {'refused' if denied else 'no response'} ({where}): {said}")
    return done.stdout


def several(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
