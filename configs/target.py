"""A target: where cells run, and what of it each rank gets."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag, field_validator, model_validator

from configs.base import Frozen

NAME_OF_OPTION = r"^[a-z][a-z0-9-]*$"


class Resources(Frozen):
    """What every kind of target says."""

    name: str
    cores_per_rank: PositiveInt = 1
    max_ranks: PositiveInt | None = Field(None, description="none: as many as cores or GPUs allow")
    env: dict[str, str] = Field({}, description="passed to the ranks and kept in the record")
    price_usd_per_hour: Annotated[
        PositiveFloat | None, Field(description="of the whole machine; of one node where a target has several")
    ] = None
    machine: str | None = Field(
        None, description="what is rented, as provider/instance/region: `aws/g4dn.xlarge/us-east-1`; finds its price"
    )

    @field_validator("machine")
    @classmethod
    def _names_an_instance(cls, machine: str | None) -> str | None:
        parts = machine.split("/") if machine is not None else []
        if machine is not None and (
            len(parts) not in (2, 3) or any(not part or part != part.strip() for part in parts)
        ):
            raise ValueError(
                f"{machine!r} is no machine; write it as provider/instance/region, such as aws/g4dn.xlarge/us-east-1"
            )
        return machine

    @property
    def instance(self) -> str | None:
        """`provider/instance`, without the region."""
        return None if self.machine is None else "/".join(self.machine.split("/")[:2])

    @property
    def region(self) -> str | None:
        """The region, where the machine names one."""
        parts = self.machine.split("/") if self.machine is not None else []
        return parts[2] if len(parts) == 3 else None


class LocalTarget(Resources):
    """This machine. A rank gets `cores_per_rank` cores of its own (or one GPU, where there are GPUs)."""

    kind: Literal["local"] = "local"
    name: str = "local"


class Container(Frozen):
    """An Apptainer image in which the ranks run; the job differs from one without only by its wrapper."""

    image: str = Field(description="path of the .sif file on the nodes, or a URI that Apptainer takes")
    binds: list[str] = Field([], description="more folders, as --bind takes them: SOURCE[:DESTINATION[:ro]]")
    python: str = Field("python3", description="the interpreter in the image that has Rankwise")


class NodeLink(Frozen):
    """What a link between two nodes carries, as one all-reduce over it sees it."""

    latency_seconds: PositiveFloat = Field(description="of a message, the library included")
    bytes_per_second: PositiveFloat = Field(description="one direction, of the whole node")


class SlurmTarget(Resources):
    """A partition of a cluster under Slurm. Jobs get whole numbers of nodes, with `ranks_per_node` ranks on each."""

    kind: Literal["slurm"] = "slurm"
    name: str = "slurm"
    nodes: PositiveInt = Field(1, description="the most nodes that one job may have")
    ranks_per_node: PositiveInt = Field(1, description="ranks that one node holds: its GPUs, or what its cores allow")
    gpus_per_node: PositiveInt | None = Field(None, description="asked for with --gpus-per-node; none: ranks on CPUs")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    memory_per_node: str | None = Field(None, pattern=r"^[0-9]+[KMGT]?$", description="as --mem takes it: 16G")
    exclusive: bool = Field(False, description="no other jobs on the nodes meanwhile")
    time_limit_minutes: PositiveInt | None = Field(None, description="the most that a job may ask for; none: no bound")
    extra: dict[str, str | int | bool] = Field({}, description="further options of sbatch: {licenses: gpfs}")
    modules: list[str] = Field([], description="environment modules to load on the nodes")
    setup: list[str] = Field([], description="shell lines that every node runs before the ranks")
    container: Container | None = None
    python: str | None = Field(None, description="the nodes' interpreter that has Rankwise; none: this one by its path")
    shared: str | None = Field(
        None, description="folder that all nodes see under this path, for jobs, models and code; none: all that is here"
    )
    launcher: Literal["torchrun", "deepspeed"] = "torchrun"
    max_queued: PositiveInt = Field(50, description="jobs of a run in the queue at once, running ones included")
    max_running: PositiveInt | None = Field(None, description="of the run's running at once; 1: one after the other")
    retries: int = Field(2, ge=0, description="fresh jobs for a visit lost to a node, a preemption or a failed start")
    on_this_machine: bool = Field(
        False, description="nodes are cores of this machine, as a lab's: its calibration says what they compute"
    )
    link: NodeLink | None = Field(None, description="between two nodes, to predict with; none: what preflight finds")
    preflight: bool | None = Field(None, description="test nodes before measuring; none: where a job has several nodes")
    poll_seconds: PositiveFloat = Field(5.0, description="between two looks at the queue, a squeue and a sacct each")

    @field_validator("extra")
    @classmethod
    def _options(cls, extra: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        import re

        for name in extra:
            if not re.match(NAME_OF_OPTION, name):
                raise ValueError(f"{name!r} is no long option of sbatch; write it without dashes before: licenses")
        return extra

    @model_validator(mode="after")
    def _consistent(self) -> "SlurmTarget":
        if self.gpus_per_node is not None and self.ranks_per_node > self.gpus_per_node:
            raise ValueError(
                f"ranks_per_node: {self.ranks_per_node} ranks cannot have a GPU each of {self.gpus_per_node}; "
                f"use at most {self.gpus_per_node}"
            )
        if self.shared is not None and not self.shared.startswith("/"):
            raise ValueError(f"shared: {self.shared} is no absolute path; all nodes must see it under the same one")
        return self

    @property
    def most_ranks(self) -> int:
        """Ranks that a job of this target can have."""
        held = self.nodes * self.ranks_per_node
        return min(held, self.max_ranks or held)

    def nodes_for(self, ranks: int) -> int:
        """The fewest nodes that hold so many ranks in equal numbers: 3 ranks on nodes of 2 take 3 nodes."""
        return next(count for count in range(-(-ranks // self.ranks_per_node), ranks + 1) if ranks % count == 0)


def kind_of_target(data: Any) -> str:
    """A target without a kind is this machine."""
    kind = data.get("kind", "local") if isinstance(data, dict) else getattr(data, "kind", "local")
    return str(kind)


Target = Annotated[
    Annotated[LocalTarget, Tag("local")] | Annotated[SlurmTarget, Tag("slurm")], Discriminator(kind_of_target)
]
