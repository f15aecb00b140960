"""Targets: machines and clusters on which cells run."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from configs.load.job import Endpoint
from configs.targets.rented import RentedTarget
from configs.targets.resources import ClusterTarget, Resources, ScheduledTarget
from configs.targets.ssh_host import SshHost, jump_host

_Option = TypeVar("_Option")
NAME_OF_OPTION = r"^[a-z][a-z0-9-]*$"
_GRES = r"^gpu(:\w[\w.-]*)?:[1-9][0-9]*(,[\w.:-]+)*$"  # a type may be 2080ti, 3090 or 1g.10gb
_SRUN_OURS = (
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--output",
    "--error",
    "--container-image",
    "--container-mounts",
)
_OF_ALLOCATIONS = (
    "cluster",
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "exclusive",
    "extra",
    "comment",
)
_QSUB_OURS = {
    "chunk": ("ncpus", "ngpus", "mem", "mpiprocs", "ompthreads"),
    "resources": ("select", "place", "walltime", "nodes", "ncpus", "mem"),
    "attributes": ("block", "stagein", "stageout", "sandbox", "depend"),
}


class LocalTarget(Resources):
    """This machine. Each rank has `cores_per_rank` exclusive cores, and one GPU on a machine with GPUs."""

    kind: Literal["local"] = "local"
    name: str = "local"

    @property
    def adapter(self) -> str:
        """Which of `slurm.schedulers` starts its jobs."""
        return "local"


class EndpointTarget(LocalTarget):
    """An OpenAI-compatible server that is there already; the load generator runs on this machine."""

    kind: Literal["endpoint"] = "endpoint"  # type: ignore[assignment]
    name: str = "endpoint"
    device: Literal["cpu"] | None = "cpu"
    url: str = Field(description="http(s)://host[:port][/path]; /v1/completions is appended")
    model: str = Field(min_length=1, description="name of the model at the server")
    token_variable: str | None = Field(None, description="environment variable that holds the bearer token")
    max_rate: PositiveFloat | None = Field(
        None, description="cap: requests per second, bursts up to three times it; bounds a search"
    )
    max_tokens: PositiveInt | None = Field(None, description="cap: tokens asked for in a run, prompts and answers")

    @model_validator(mode="after")
    def _an_endpoint(self) -> Self:
        try:
            Endpoint(url=self.url, model=self.model, token_variable=self.token_variable)
        except ValidationError as error:
            detail = error.errors()[0]
            raise ValueError(f"{detail['loc'][0]}: {detail.get('ctx', {}).get('error', detail['msg'])}") from error
        return self


class SlurmTarget(ScheduledTarget):
    """A partition of a cluster under Slurm."""

    scheduler: ClassVar[str] = "Slurm"

    kind: Literal["slurm"] = "slurm"
    name: str = "slurm"
    gres: str | None = Field(
        None, pattern=_GRES, description="value of --gres, in place of --gpus-per-node: gpu:a100:4"
    )
    allocation: Literal["current"] | None = Field(
        None, description="current: run as steps of the allocation that this runs in; none: submit jobs with sbatch"
    )
    cluster: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.-]{0,39}$",
        description="value of --clusters: another cluster of the same slurmdbd; none: the one that SLURM_CONF names",
    )
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    memory_per_node: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$", description="value of --mem: 16G")
    exclusive: bool = Field(False, description="no other jobs on the nodes")
    extra: dict[str, str | int | bool] = Field({}, description="additional options of sbatch: {licenses: gpfs}")
    srun_args: list[str] = Field([], description="additional options of srun, after Rankwise's own: [--mpi=pmix]")
    comment: str | None = Field(
        None, min_length=1, max_length=200, pattern=r"^[^\n]*$", description="none: path of the run folder"
    )

    @field_validator("extra")
    @classmethod
    def _options(cls, extra: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        for name, value in extra.items():
            if not re.fullmatch(NAME_OF_OPTION, name):
                raise ValueError(
                    f"{name!r} is not a long option of sbatch. Write it without leading dashes, such as licenses"
                )
            _on_one_line(value, f"{name}: ")
        return extra

    @field_validator("partition", "account", "qos", "constraint", "reservation")
    @classmethod
    def _plain(cls, value: str | None) -> str | None:
        return _on_one_line(value)

    @field_validator("partition")
    @classmethod
    def _one_partition(cls, partition: str | None) -> str | None:
        """sbatch takes several: figures of whichever starts a job first are those of no one machine."""
        if partition is not None and "," in partition:
            raise ValueError(
                f"got {partition}, expected one partition. Write a target for each: their figures are kept apart"
            )
        return partition

    @field_validator("srun_args")
    @classmethod
    def _long_options(cls, options: list[str]) -> list[str]:
        for option in options:
            name = option.partition("=")[0]
            if not option.startswith("--") or name in _SRUN_OURS or "\n" in option:
                raise ValueError(f"got {option!r}, expected an option such as --mpi=pmix, and none of {_SRUN_OURS}")
        return options

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given = [name for name in _OF_ALLOCATIONS if getattr(self, name)]
        if self.allocation is not None and given:
            raise ValueError(
                f"allocation: {self.allocation}, which was made without {', '.join(given)}. Leave them out here and "
                "give them to salloc or sbatch"
            )
        if self.gres is not None and int(self.gres.partition(",")[0].rpartition(":")[2]) != self.gpus_per_node:
            raise ValueError(
                f"gres: got {self.gres}, and gpus_per_node {self.gpus_per_node}. Both name the GPUs of a node: make "
                "them equal"
            )
        return self

    @property
    def gpu_type(self) -> str | None:
        """The type of GPU that `gres` names: `a100` of gpu:a100:4."""
        parts = self.gres.partition(",")[0].split(":") if self.gres is not None else []
        return parts[1] if len(parts) == 3 else None

    @property
    def has_arrays(self) -> bool:
        """Whether jobs are submitted to Slurm, and are no steps."""
        return self.allocation is None

    @property
    def where(self) -> str:
        """Which of the cluster's nodes, for a person: `partition gpu`."""
        if self.allocation is not None:
            return "the current allocation"
        named = self.extra.get("partition") or self.partition
        return f"partition {named}" if named else "default partition"

    @property
    def adapter(self) -> str:
        """Which of `slurm.schedulers` starts its jobs."""
        return "slurm" if self.allocation is None else "steps"


class PbsTarget(ScheduledTarget):
    """A queue of a cluster under OpenPBS or PBS Professional. A job is a chunk on each of its nodes."""

    scheduler: ClassVar[str] = "PBS"

    kind: Literal["pbs"] = "pbs"
    name: str = "pbs"
    server: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][\w.-]*(:[0-9]+)?$", description="host[:port] of the server; none: as in pbs.conf"
    )
    queue: str | None = Field(None, pattern=r"^[A-Za-z0-9_][\w.-]*$", description="value of -q; none: the default one")
    project: str | None = Field(None, description="value of -P")
    memory_per_node: str | None = Field(None, pattern=r"^[0-9]+([kmgt]?[bw])?$", description="mem of each chunk: 16gb")
    place: Literal["scatter", "scatter:excl", "scatter:exclhost", "scatter:shared"] = Field(
        "scatter", description="value of -l place; excl: no other jobs on the nodes"
    )
    chunk: dict[str, str | int] = Field({}, description="further resources of each chunk of select: {gpu_model: a100}")
    resources: dict[str, str | int] = Field({}, description="further -l options of the job: {filesystems: home}")
    attributes: dict[str, str | int] = Field({}, description="further -W options: {umask: 27}")

    @field_validator("chunk", "resources", "attributes")
    @classmethod
    def _named(cls, given: dict[str, str | int], info: ValidationInfo) -> dict[str, str | int]:
        for name, value in given.items():
            if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name in _QSUB_OURS[info.field_name or ""]:
                ours = ", ".join(_QSUB_OURS[info.field_name or ""])
                raise ValueError(f"{name!r}: expected the name of a resource, and none of {ours}")
            if re.search(r"[\s,+]" if info.field_name == "chunk" else r"\n", str(value)):
                raise ValueError(f"{name}: got {value!r}, which qsub would read as several values")
        return given

    @model_validator(mode="after")
    def _apptainer(self) -> Self:
        if self.container is not None and self.container.runtime != "apptainer":
            raise ValueError("container.runtime: got pyxis, a plugin of Slurm's srun. Use apptainer")
        return self

    @property
    def where(self) -> str:
        """Which of the cluster's nodes, for a person: `queue workq`."""
        return f"queue {self.queue}" if self.queue else "default queue"

    @property
    def adapter(self) -> str:
        """Which of `slurm.schedulers` starts its jobs."""
        return "pbs"


class SshTarget(ClusterTarget):
    """Hosts that are reached by SSH. Each runs one job at a time, whoever's."""

    scheduler: ClassVar[str] = "SSH"

    kind: Literal["ssh"] = "ssh"
    name: str = "ssh"
    hosts: list[SshHost] = Field(min_length=1, max_length=1024, description="names, or mappings with the fields below")
    user: str | None = Field(None, pattern=r"^[^\s:@-][^\s:@]*$", description="on hosts that name none of their own")
    port: int | None = Field(None, ge=1, le=65_535, description="of hosts that name none of their own")
    key: str | None = Field(None, description="private key for hosts that name none of their own")
    jump: str | None = Field(None, description="jump host, `user@host:port`; none: ProxyJump of ~/.ssh/config")
    known_hosts: str | None = Field(None, description="file of known host keys; none: those of ~/.ssh and /etc/ssh")
    nodes: int = Field(0, ge=0, le=65_536, description="maximum number of hosts of a job; not set: all of them")
    python: str | None = Field(
        None,
        description="interpreter or virtual environment on the hosts that has the libraries; none: they are installed",
    )
    shared: str | None = Field(
        None, description="folder that all hosts and this machine see; none: everything is carried to each host"
    )
    folder: str = Field(
        ".rankwise",
        pattern=r"^[A-Za-z0-9_./+-]+$",
        description="on each host, for jobs, models and code; from its home folder",
    )
    lost_after_seconds: PositiveFloat = Field(
        300.0, description="a host that cannot be reached for so long is lost, and its jobs with it"
    )
    poll_seconds: PositiveFloat = Field(2.0, description="seconds between two looks at the jobs")

    @model_validator(mode="before")
    @classmethod
    def _all_hosts(cls, data: Any) -> Any:
        hosts = data.get("hosts") if isinstance(data, dict) else None
        return {"nodes": len(hosts)} | data if isinstance(hosts, list | tuple) else data

    @field_validator("jump")
    @classmethod
    def _one_host(cls, jump: str | None) -> str | None:
        if jump is not None:
            jump_host(jump)
        return jump

    @model_validator(mode="after")
    def _known_apart(self) -> "SshTarget":
        names = [host.name for host in self.hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"hosts: {', '.join(twice)} named twice. Give each host a name of its own")
        if not 1 <= self.nodes <= len(names):
            raise ValueError(f"nodes: got {self.nodes}, but the target has {len(names)} hosts")
        return self

    @property
    def where(self) -> str:
        """Which hosts, for a person: `hosts a, b`."""
        return f"hosts {', '.join(host.name for host in self.hosts)}"

    @property
    def adapter(self) -> str:
        """Which of `slurm.schedulers` starts its jobs."""
        return "ssh"


def _on_one_line(value: _Option, where: str = "") -> _Option:
    """Return an option's value. Raises ValueError for several lines: the rest would be commands of the job's script."""
    if {"\n", "\r", "\0"} & {*str(value)}:
        raise ValueError(f"{where}got {value!r}, expected one line, without a line feed at its end")
    return value


def kind_of_target(data: Any) -> str:
    """Set the default kind, `local`."""
    kind = data.get("kind", "local") if isinstance(data, dict) else getattr(data, "kind", "local")
    return str(kind)


Target = Annotated[
    Annotated[LocalTarget, Tag("local")]
    | Annotated[SlurmTarget, Tag("slurm")]
    | Annotated[PbsTarget, Tag("pbs")]
    | Annotated[SshTarget, Tag("ssh")]
    | Annotated[RentedTarget, Tag("aws")]
    | Annotated[RentedTarget, Tag("gcp")]
    | Annotated[RentedTarget, Tag("azure")]
    | Annotated[EndpointTarget, Tag("endpoint")],
    Discriminator(kind_of_target),
]
