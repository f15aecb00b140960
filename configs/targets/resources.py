"""Fields that kinds of targets have in common: a rank's share of a machine, nodes, and jobs under a scheduler."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from configs.common.base import Frozen
from configs.common.execution import Degree
from configs.common.variables import checked_variables

UNKEYED = frozenset(
    {
        "attributes",
        "chunk",
        "constraint",
        "container",
        "exclusive",
        "extra",
        "gpus_per_node",
        "gres",
        "launcher",
        "modules",
        "place",
        "placement",
        "python",
        "resources",
        "setup",
        "srun_args",
    }
)
"""Fields of targets that figures may depend on, and that are in no key of a cell: `env`, `cores_per_rank` and the
numbers of ranks and nodes are."""

_GPUS: TypeAdapter[int] = TypeAdapter(PositiveInt)


class Resources(Frozen):
    """Common fields of all kinds of targets."""

    name: str
    device: Literal["cpu"] | None = Field(
        None, description="cpu: ranks on CPUs; none: a GPU for each rank wherever there are GPUs"
    )
    cores_per_rank: PositiveInt = 1
    max_ranks: PositiveInt | None = Field(None, description="none: as many as cores or GPUs allow")
    env: dict[str, str] = Field({}, description="passed to the ranks and kept in the record")
    price_usd_per_hour: Annotated[
        PositiveFloat | None, Field(description="of the whole machine, or of one node of a cluster")
    ] = None
    machine: str | None = Field(
        None,
        description="rented instance as provider/instance/region, to look up its price: `aws/g4dn.xlarge/us-east-1`",
    )

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        return checked_variables(env)

    @field_validator("machine")
    @classmethod
    def _names_an_instance(cls, machine: str | None) -> str | None:
        parts = machine.split("/") if machine is not None else []
        if machine is not None and (
            len(parts) not in (2, 3) or any(not part or part != part.strip() for part in parts)
        ):
            raise ValueError(f"got {machine!r}, expected provider/instance/region, such as aws/g4dn.xlarge/us-east-1")
        return machine

    @property
    def unkeyed_settings(self) -> str:
        """Settings that figures may depend on and no key of a cell has (`launcher: deepspeed`); empty: all defaults."""
        given = self.model_dump(mode="json", exclude_defaults=True, include=set(UNKEYED))
        return ", ".join(f"{name}: {value}" for name, value in sorted(given.items()) if name in UNKEYED)

    @property
    def catalog_name(self) -> str | None:
        """`provider/instance`, without the region."""
        return None if self.machine is None else "/".join(self.machine.split("/")[:2])

    @property
    def region(self) -> str | None:
        """The region, or None if the machine has none."""
        parts = self.machine.split("/") if self.machine is not None else []
        return parts[2] if len(parts) == 3 else None


class Container(Frozen):
    """An image in which the ranks run: started by Apptainer, or by srun's plugin pyxis with enroot."""

    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    image: str = Field(description="path of the .sif (pyxis: .sqsh) file on the nodes, or a URI that the runtime takes")
    binds: list[str] = Field([], description="additional folders: SOURCE[:DESTINATION[:ro]]")
    python: str = Field("python3", description="interpreter with Rankwise in the image")


class NodeLink(Frozen):
    """Latency and bandwidth of a link between two nodes, as seen by an all-reduce."""

    latency_seconds: PositiveFloat = Field(description="of a message, including the library")
    bytes_per_second: PositiveFloat = Field(description="one direction, of the whole node")


class ClusterTarget(Resources):
    """Common fields of targets with nodes. Jobs get whole nodes, with `ranks_per_node` ranks on each."""

    scheduler: ClassVar[str]
    """What gives a job its nodes, for a person."""

    nodes: Degree = Field(1, description="maximum number of nodes of a job")
    ranks_per_node: Degree = Field(
        1, description="ranks per node; not set: one for each of its gpus_per_node, or one on CPUs"
    )
    gpus_per_node: PositiveInt | None = Field(
        None, description="GPUs that a job gets of each node; none: ranks on CPUs"
    )
    time_limit_minutes: PositiveInt | None = Field(None, description="maximum time limit of a job; none: unlimited")
    modules: list[str] = Field([], description="environment modules to load on the nodes")
    setup: list[str] = Field([], description="shell lines run on every node before the ranks")
    python: str | None = Field(
        None, description="interpreter with Rankwise on the nodes; none: the path of the current one"
    )
    shared: str | None = Field(
        None,
        description="folder shared by all nodes, for jobs, models and code; none: nodes share this file system",
    )
    launcher: Literal["torchrun", "deepspeed"] = "torchrun"
    max_queued: PositiveInt = Field(50, description="maximum jobs of a run in the queue, including running ones")
    max_running: PositiveInt | None = Field(None, description="maximum concurrent jobs of a run; 1: sequential")
    max_queue_minutes: PositiveFloat | None = Field(
        None, description="maximum minutes that a job is pending while no job of the run runs; none: unlimited"
    )
    retries: int = Field(
        2, ge=0, description="maximum retries of a measurement after a node failure, a preemption or a failed start"
    )
    on_this_machine: bool = Field(
        False, description="nodes are cores of this machine, as in a lab; predict with its calibration"
    )
    link: NodeLink | None = Field(
        None, description="link between two nodes, for predictions; none: from preflight checks"
    )
    preflight: bool | None = Field(
        None, description="run preflight checks before measuring; none: only for multi-node jobs"
    )
    poll_seconds: PositiveFloat = Field(5.0, description="seconds between two looks at the jobs")

    @model_validator(mode="before")
    @classmethod
    def _a_rank_for_each_gpu(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("gpus_per_node") is None or "ranks_per_node" in data:
            return data
        try:
            return data | {"ranks_per_node": _GPUS.validate_python(data["gpus_per_node"])}  # of a text too, as "4"
        except ValidationError:
            return data  # the field says what is wrong with it

    @model_serializer(mode="wrap")
    def _ranks_beside_gpus(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A single rank beside several GPUs is written although it is the default: left out, it is read as one each."""
        data: dict[str, Any] = handler(self)
        return data if self.gpus_per_node is None else data | {"ranks_per_node": self.ranks_per_node}

    @model_validator(mode="after")
    def _nodes_hold_their_ranks(self) -> Self:
        if self.gpus_per_node is not None and self.device == "cpu":
            raise ValueError(f"device: got cpu, but gpus_per_node is {self.gpus_per_node}. Leave one of them out")
        if self.gpus_per_node is not None and self.ranks_per_node > self.gpus_per_node:
            raise ValueError(
                f"ranks_per_node: got {self.ranks_per_node}, more than gpus_per_node ({self.gpus_per_node}). "
                f"Use at most {self.gpus_per_node}"
            )
        if self.shared is not None and not self.shared.startswith("/"):
            raise ValueError(f"shared: got {self.shared}, expected an absolute path that is the same on all nodes")
        return self

    @property
    def gpu_type(self) -> str | None:
        """The type of GPU that the target names; None where it names none."""
        return None

    @property
    def has_arrays(self) -> bool:
        """Whether jobs of one shape are submitted as an array, which itself runs no more than `max_running`."""
        return False

    @property
    def where(self) -> str:
        """Which of the cluster's nodes, for a person: `partition gpu`."""
        raise NotImplementedError

    @property
    def adapter(self) -> str:
        """Which of `slurm.schedulers` starts its jobs."""
        raise NotImplementedError

    @property
    def rank_limit(self) -> int:
        """Maximum number of ranks of a job."""
        held = self.nodes * self.ranks_per_node
        return min(held, self.max_ranks or held)

    def nodes_for(self, ranks: int) -> int:
        """Return the fewest nodes that hold the ranks in equal numbers: 3 ranks on nodes of 2 need 3 nodes."""
        return ranks // next(held for held in range(min(self.ranks_per_node, ranks), 0, -1) if ranks % held == 0)


class ScheduledTarget(ClusterTarget):
    """Common fields of targets under a batch scheduler."""

    account: str | None = None
    memory_per_node: str | None = None
    job_name: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][\w.-]{0,39}$", description="beginning of the jobs' names; none: rw"
    )
    container: Container | None = None
