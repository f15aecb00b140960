"""Where this process stands among the nodes of a job, and by which way it reaches the others.

    node = node_of(os.environ)      # from the variables that srun sets (man srun, OUTPUT ENVIRONMENT VARIABLES)
    node = pbs_node(os.environ)     # from those of pbsdsh's tasks, and PBS_NODES
    host_names("node[01-03,7],gpu1")

Lists of hosts are read by submitit and not by `scontrol show hostnames`, which a container need not have.
"""

import ipaddress
import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from configs.common.files.reading import brief, parse_json
from configs.common.printable import some_of
from configs.records.record import Status
from slurm.launcher.end_cause import JobVerdict, NotStartedError

PBS_NODES = "RANKWISE_PBS_NODES"
"""Variable in which a job's script hands on the lines of PBS_NODEFILE, which only the first node has."""
GIVEN = "RANKWISE_NODE"
"""Variable that names the nodes of a job which no scheduler started: a JSON object."""
GIVEN_NAME = "RANKWISE_NODE_NAME"
"""Variable with the name that an SSH target gives this host."""

_NAME = re.compile(r"[^,\[\]]+")
_HOST_LIST = re.compile(r"[^\[\]]*(\[[0-9,-]*\][^\[\]]*)*")
_MAX_NAMES = 65_536


@dataclass(frozen=True)
class JobNode:
    """One node of a job (of a step, where a job has several). `names` are the scheduler's, by rank; the first is the
    head.

    addresses: by which the others reach each node, where its name does not say.
    """

    rank: int
    names: tuple[str, ...]
    job_id: str
    step_id: str = "batch"
    addresses: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.names[self.rank]

    @property
    def head(self) -> str:
        return self.names[0]

    @property
    def head_address(self) -> str:
        """Name or address of the head, by which the others reach it."""
        return self.addresses[0] if self.addresses else self.head

    @property
    def count(self) -> int:
        return len(self.names)


def under_slurm(environment: Mapping[str, str]) -> bool:
    """Whether Slurm started this process on a node of a job."""
    told = all(environment.get(name) for name in ("SLURM_JOB_ID", "SLURM_NODEID"))
    # srun tells a step of its own nodes; of its job's only where it was called with the job's variables.
    return told and any(
        environment.get(f"SLURM_{of}_NUM_NODES") and environment.get(f"SLURM_{of}_NODELIST") for of in ("STEP", "JOB")
    )


def given_node(environment: Mapping[str, str]) -> JobNode | None:
    """This node, where whoever started the launcher says so by the variable GIVEN; None where it is not set.

    Raises ValueError.
    """
    if GIVEN not in environment:
        return None
    told = parse_json(environment[GIVEN].encode(), GIVEN)
    node = JobNode(int(told["rank"]), tuple(told["names"]), str(told["job_id"]), addresses=tuple(told["addresses"]))
    if not 0 <= node.rank < node.count or len(node.addresses) != node.count:
        raise ValueError(f"{GIVEN}: got {brief(environment[GIVEN])}, expected a rank, and an address for each name")
    return node


def under_pbs(environment: Mapping[str, str]) -> bool:
    """Whether pbsdsh started this process on a node of a job."""
    return all(environment.get(name) for name in ("PBS_JOBID", "PBS_NODENUM", PBS_NODES))


def rank_under(kind: str, environment: Mapping[str, str]) -> int | None:
    """Which node of a job of a target's kind this is; None where this process was not started as one.

    Raises KeyError and ValueError.
    """
    if kind == "slurm" and under_slurm(environment):
        return int(environment["SLURM_NODEID"])
    if kind == "pbs" and under_pbs(environment):
        return int(environment["PBS_NODENUM"])
    given = given_node(environment) if kind == "ssh" else None
    return None if given is None else given.rank


def node_name(environment: Mapping[str, str]) -> str:
    """This node as its target or Slurm names it, by which jobs can be kept from it; else the machine's own name.

    Slurm takes no host name for a node's (`node1.cluster.org` of the node `node1`) and refuses the job.
    """
    return environment.get(GIVEN_NAME) or environment.get("SLURMD_NODENAME") or socket.gethostname()


def restarts(environment: Mapping[str, str]) -> int:
    """How often Slurm has started the job before (a requeue); 0 where it does not say."""
    text = environment.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def node_of(environment: Mapping[str, str]) -> JobNode:
    """This node, from Slurm's variables: those of the step, which may have fewer nodes than its job.

    Raises ValueError where they contradict each other, and NotStartedError where the place that is claimed is
    another node's.
    """
    names = host_names(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
    count = _integer(environment, "SLURM_STEP_NUM_NODES" if environment.get("SLURM_STEP_NUM_NODES") else None)
    rank = int(environment["SLURM_NODEID"])
    if count != len(names) or not 0 <= rank < count:
        raise ValueError(f"SLURM_NODEID: got {rank} of {count} nodes, but the node list is {some_of(names)}")
    own = environment.get("SLURMD_NODENAME")
    if own in names and own != names[rank]:
        raise NotStartedError(
            JobVerdict(
                status=Status.NODE_FAILED,
                kind="DuplicateNodeRank",
                nodes=(own,),
                message=f"{own}: registered as node {rank}, which is {names[rank]}, expected node {names.index(own)}",
            )
        )
    return JobNode(rank, names, environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID") or "batch")


def pbs_node(environment: Mapping[str, str]) -> JobNode:
    """This node, by pbsdsh's number of it. Raises ValueError where there is none of that number."""
    names, rank = tuple(environment[PBS_NODES].split(",")), int(environment["PBS_NODENUM"])
    if not 0 <= rank < len(names) or len({*names}) < len(names):
        raise ValueError(f"PBS_NODENUM: got {rank}, but the nodes are {some_of(names)}, each expected once")
    return JobNode(rank, names, environment["PBS_JOBID"])


def _integer(environment: Mapping[str, str], name: str | None) -> int:
    return int(environment[name or "SLURM_JOB_NUM_NODES"])


def host_names(expression: str) -> tuple[str, ...]:
    """The names of a host list in their order: `node[01-03,7],gpu1`. Raises ValueError for what is none."""
    # Imported here: a launcher without Slurm need not wait for it.
    from submitit.slurm.slurm import SlurmParseException, _parse_node_list

    try:
        names = tuple(_parse_node_list(expression)) if _num_names(expression) <= _MAX_NAMES else ()
    except SlurmParseException:
        names = ()
    # It lets stray commas and brackets through.
    if not names or expression.endswith(",") or not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(f"host list: got {brief(expression)}, expected one such as node[01-03,7],gpu1")
    return names


def _num_names(expression: str) -> int:
    """How many names a host list stands for; more than allowed where it is none."""
    if not _HOST_LIST.fullmatch(expression):
        return _MAX_NAMES + 1
    count = 0
    for group in re.split(r",(?![0-9,-]*\])", expression):
        sizes = [sum(map(_num_suffixes, bracket.split(","))) for bracket in re.findall(r"\[([0-9,-]*)\]", group)]
        count += math.prod(sizes)
    return count


def _num_suffixes(written: str) -> int:
    low, dash, high = written.partition("-")
    if not dash:
        return 1
    if not (low.isdigit() and high.isdigit() and len(high) <= 9 >= len(low)):
        return _MAX_NAMES + 1
    return max(1, int(high) - int(low) + 1)


def addresses_of(host: str) -> tuple[str, ...]:
    """A host's IPv4 addresses by its name, one at least. Raises OSError."""
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(place[0]) for *_, place in found))


def own_address_towards(address: str) -> str:
    """The address by which this machine would connect to another one. Raises OSError where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # nothing is sent
        return str(probe.getsockname()[0])


def listening_addresses(host: str) -> tuple[str, ...]:
    """The addresses of this machine on which other nodes of a job may reach it by this name.

    All private ones, since the others may know another network than this machine, and those that the name resolves
    to. All interfaces (an empty address) only where the name says nothing, as where /etc/hosts maps a machine's own
    name to its loopback.
    """
    own = {
        found.address
        for addresses in psutil.net_if_addrs().values()
        for found in addresses
        if found.family is socket.AF_INET
    }
    try:
        named = {address for address in addresses_of(host) if not ipaddress.ip_address(address).is_loopback} & own
    except OSError:
        return ("",)
    if not named:
        return ("",)
    return tuple(sorted(named | {address for address in own if ipaddress.ip_address(address).is_private}))


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return None


def link_is_up(interface: str | None) -> bool:
    """Whether the interface has a carrier, as far as can be told from here."""
    stats = psutil.net_if_stats().get(interface or "")
    return stats is None or stats.isup


def has_network() -> bool:
    """Whether any interface but the loopback has a carrier."""
    return any(stats.isup for name, stats in psutil.net_if_stats().items() if name != "lo")
