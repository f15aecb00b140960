"""What a lab is: its name, nodes, addresses, cores and folders. Pure values; nothing is started here."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from configs.common.base import Frozen
from configs.common.files.reading import read_model

BASE_FOLDER = Path("/var/lib/rankwise-lab")
DEFAULT_NAME = "lab"
DEFAULT_PARTITION = "lab"  # of every lab, whatever its name: studies name it
PREEMPTING_PARTITION = "high"
UNSHAPED = "none"
MOST_NODES = 64
SLURMD_PORT = 6818  # the nodes have ports of their own
_SOCKET_CHARACTERS = 107  # of the longest path of a socket, unix(7)
FREEZER = Path("/sys/fs/cgroup/freezer")
CONTROLLERS = (Path("/sys/fs/cgroup/memory"), FREEZER)  # of cgroups(7), first version
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def bits_per_second(bandwidth: str) -> float:
    """`100mbit` -> 1e8. Raises ValueError for what is no bandwidth."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", bandwidth)
    rate = float(match[1]) * _BITS[match[2]] if match else 0.0
    if rate < 10**4:
        raise ValueError(f"got {bandwidth!r}, expected none or a rate such as 100mbit, 1gbit or 2.5gbit")
    return rate


class LabRequest(Frozen):
    """What the user asks for. A lab that is up is changed by no other request."""

    name: str = DEFAULT_NAME
    folder: Path
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 2
    cores_per_node: PositiveInt = 1
    bandwidths: tuple[str, ...] = ()
    hidden: Annotated[tuple[Path, ...], Field(description="folders that the nodes do not see")] = ()
    enforce_limits: Annotated[bool, Field(description="limits of accounts and QOS hold, for root too")] = False

    @field_validator("name")
    @classmethod
    def _short(cls, name: str) -> str:
        # Names of network devices have at most 15 characters, and `rwv-` and the node's number are part of them.
        if not re.fullmatch(r"[a-z][a-z0-9]{0,7}[a-z]|[a-z]", name):
            raise ValueError(f"got {name!r}, expected 1 to 9 lower-case letters and digits, first and last a letter")
        return name

    @field_validator("folder")
    @classmethod
    def _reachable(cls, folder: Path) -> Path:
        if not folder.is_absolute():
            raise ValueError(f"got {folder}, expected an absolute path")
        # These paths are written into files whose readers have no way of quoting.
        if not re.fullmatch(r"[\w/.+-]+", str(folder), re.ASCII):
            raise ValueError(
                f"got {folder}, expected only letters, digits and ._+-, because Slurm's files cannot quote paths"
            )
        return folder

    @model_validator(mode="after")
    def _holds_sockets(self) -> "LabRequest":
        node = f"{self.name}{self.nodes}"
        most = _SOCKET_CHARACTERS - len(f"/spool/{node}/{node}_67108863.4294967295")  # of a step, the longest
        if len(str(self.folder)) > most:
            raise ValueError(f"folder: {self.folder} is longer than {most} characters, the limit for its sockets")
        return self

    @field_validator("bandwidths")
    @classmethod
    def _rates(cls, bandwidths: tuple[str, ...]) -> tuple[str, ...]:
        # `none` is the partition that is always there.
        rates = tuple(dict.fromkeys(bandwidth for bandwidth in bandwidths if bandwidth != UNSHAPED))
        for rate in rates:
            bits_per_second(rate)
        return rates


def requested(**fields: Any) -> LabRequest:
    """A request that was checked. Raises ValueError, a line for each option that is wrong."""
    try:
        return LabRequest(**fields)
    except ValidationError as error:
        details = [
            (".".join(str(each) for each in one["loc"]), one.get("ctx", {}).get("error", one["msg"]))
            for one in error.errors()
        ]
        raise ValueError("\n".join(f"{where}: {why}" if where else str(why) for where, why in details)) from error


class LabPlan(LabRequest):
    """A lab as it is set up on this machine; kept in `lab.json`."""

    subnet: Annotated[int, Field(ge=1, le=254, description="third number of its addresses")]
    host: Annotated[str, Field(description="name of this machine, where slurmctld runs")]
    machine_cores: Annotated[tuple[int, ...], Field(min_length=1, description="cores that nodes may have")]
    machine_memory_bytes: PositiveInt
    first_job_id: PositiveInt
    cgroups: Annotated[bool, Field(description="whether the kernel can limit memory and find all processes of a job")]

    @property
    def request(self) -> LabRequest:
        """What was asked for."""
        return LabRequest(**{name: getattr(self, name) for name in LabRequest.model_fields})

    @property
    def node_names(self) -> tuple[str, ...]:
        """`lab1`, `lab2`, ..."""
        return tuple(f"{self.name}{number}" for number in range(1, self.nodes + 1))

    def number(self, node: str) -> int:
        """Of a node, from 1. Raises ValueError."""
        if node not in self.node_names:
            raise ValueError(f"node: lab {self.name} has no node {node!r}. Use one of: {', '.join(self.node_names)}")
        return self.node_names.index(node) + 1

    def address(self, node: str) -> str:
        """Of a node, on the lab's own network."""
        return f"10.213.{self.subnet}.{self.number(node)}"

    @property
    def head_address(self) -> str:
        """Of this machine, on the lab's own network."""
        return f"10.213.{self.subnet}.254"

    @property
    def slurmctld_port(self) -> int:
        """Where slurmctld listens, at the head's address."""
        return 21000 + self.subnet

    @property
    def slurmdbd_port(self) -> int:
        """Where slurmdbd listens."""
        return 22000 + self.subnet

    def cores(self, node: str) -> tuple[int, ...]:
        """Cores of this machine that a node has; with more nodes than cores they share them."""
        first = (self.number(node) - 1) * self.cores_per_node
        count = len(self.machine_cores)
        return tuple(self.machine_cores[(first + offset) % count] for offset in range(self.cores_per_node))

    @property
    def shares_cores(self) -> bool:
        """Whether nodes share cores, so that figures of speed mean nothing."""
        return self.nodes * self.cores_per_node > len(self.machine_cores)

    @property
    def memory_per_node_megabytes(self) -> int:
        """What the nodes' jobs may have; a quarter of the machine's memory is left to everything else."""
        return max(64, int(0.75 * self.machine_memory_bytes / 2**20 / self.nodes))

    @property
    def partitions(self) -> dict[str, str | None]:
        """Bandwidth of each partition; None where links are not shaped."""
        shaped: dict[str, str | None] = {f"link-{bandwidth}": bandwidth for bandwidth in self.bandwidths}
        return {DEFAULT_PARTITION: None, PREEMPTING_PARTITION: None} | shaped

    @property
    def bridge(self) -> str:
        """The device that connects the nodes."""
        return bridge_of(self.name)

    def link(self, node: str) -> str:
        """This machine's end of a node's link; the node's own is `eth0`."""
        return f"{link_prefix(self.name)}{self.number(node)}"

    def node_cgroups(self, node: str) -> dict[Path, Path]:
        """The cgroups that a node takes for the whole hierarchy of a controller, which is the value."""
        tops = CONTROLLERS if self.cgroups else ()
        return {top / cgroup_of(self.name) / node: top for top in tops}

    @property
    def slurm_conf(self) -> Path:
        """What users export as SLURM_CONF."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def logs(self) -> Path:
        """One log for each daemon."""
        return self.folder / "log"

    @property
    def shared(self) -> Path:
        """The folder that all nodes see, whatever is hidden from them."""
        return self.folder / "shared"

    @property
    def munge_socket(self) -> Path:
        """Where munge answers."""
        return self.folder / "run" / "munge.sock"

    @property
    def database_socket(self) -> Path:
        """Where MariaDB answers; it listens on no port."""
        return self.folder / "db" / "mysql.sock"


def bridge_of(name: str) -> str:
    """Name of a lab's bridge."""
    return f"rwb-{name}"


def link_prefix(name: str) -> str:
    """With what the names of this machine's ends of a lab's links begin."""
    return f"rwv-{name}"


def cgroup_of(name: str) -> str:
    """Name of a lab's folder in a cgroup hierarchy."""
    return f"rankwise-lab-{name}"


def lab_file(folder: Path) -> Path:
    """Where a lab's plan is kept."""
    return folder / "lab.json"


def read_lab_plan(folder: Path) -> LabPlan | None:
    """The lab in this folder; None where there is none. Raises ValueError where the file cannot be understood."""
    try:
        return read_model(lab_file(folder), LabPlan)
    except FileNotFoundError:
        return None
