"""What is rented, where, and the seam that each cloud implements. Does not import Prefect or a vendor's client.

    provider = provider_named("aws")                     # tasks.providers.clouds
    rung = Rung(region="us-east-1", zone=None, market="spot", usd_per_hour=1.0)
    nodes = provider.create(lease, user_data, rung, token)    # all nodes or ProviderError
    provider.tagged(provider.regions())                  # everything in the account that Rankwise made

Every resource carries the tags of its lease (`RentalLease.tags`). They alone are enough to find and remove it.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from configs.common.base import Frozen
from configs.hardware.catalog import catalog
from configs.hardware.node_names import Cloud
from configs.targets.rented import MarketName, region_name, source_range

ResourceKind = Literal["instance", "disk", "address", "nic", "security_group", "network", "placement", "key", "group"]
Problem = Literal["capacity", "quota", "throttled", "auth", "transient", "invalid", "unreachable", "hardware"]

TAG_STUDY, TAG_RUN, TAG_OWNER, TAG_EXPIRES = "rankwise-study", "rankwise-run", "rankwise-owner", "rankwise-expires"
"""Keys that all three clouds accept: GCP's labels allow lower-case letters, digits and dashes only."""
MAX_HOURS = 30 * 24.0
"""Whoever wants a machine for longer extends it: a forgotten one ends within a month."""
DELETION_ORDER: tuple[ResourceKind, ...] = (
    "instance",
    "nic",
    "disk",
    "address",
    "security_group",
    "network",
    "placement",
    "key",
    "group",
)
"""Machines first: a security group or an address in use cannot be deleted. `group`: a resource group of Azure."""


class ProviderError(Exception):
    """A request that a cloud refused. `problem` decides what is tried next."""

    def __init__(self, problem: Problem, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if code else message)
        self.problem: Problem = problem
        self.code = code


class RentalRequest(Frozen):
    """Nodes that somebody wants: a target's fields, without what a study adds."""

    provider: Cloud
    instance: str = Field(description="as the provider spells it: g5.12xlarge, n1-standard-4+t4")
    nodes: PositiveInt = 1
    regions: tuple[str, ...] = Field(min_length=1)
    zones: tuple[str, ...] = Field((), description="tried in this order; none: all that offer the instance")
    cheapest_first: bool = Field(False, description="ask regions by price, those of unknown price last, not in order")
    market: MarketName = "on_demand"
    fall_back: MarketName | None = None
    image: str | None = Field(None, description="id or name; none: the vendor's deep learning image")
    disk_gb: PositiveInt = 100
    placement: bool | None = Field(None, description="close together; none: where there are several nodes")
    public_address: bool = True
    ssh_from: str = Field(description="address range in CIDR notation that may connect to port 22")
    user: str | None = Field(None, description="login name; none: the image's")
    network: str | None = Field(None, description="existing VPC; none: the default one")
    subnet: str | None = None
    profile: str | None = Field(None, description="existing instance profile, service account or managed identity")
    gpus_per_node: int = Field(0, ge=0, description="GPUs that the driver of each node must show; 0: it is not asked")
    hours: float = Field(1.0, gt=0, le=MAX_HOURS, description="from the create call to the dead man's switch")

    @field_validator("regions")
    @classmethod
    def _as_listed(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        """What is made there is found again by the region's name."""
        return tuple(map(region_name, regions))

    @field_validator("ssh_from")
    @classmethod
    def _is_a_range(cls, ssh_from: str) -> str:
        return source_range(ssh_from)

    @property
    def has_gpu(self) -> bool | None:
        """Whether the machine has accelerators; None: the catalog does not know it."""
        try:
            return catalog().listed_instance(f"{self.provider}/{self.instance}").accelerator.kind != "cpu"
        except ValueError:
            return None

    @property
    def close_together(self) -> bool:
        """Whether a placement group is used."""
        return self.nodes > 1 if self.placement is None else self.placement


class RentalLease(Frozen):
    """One rental: what was asked for, on whose behalf, and until when."""

    study: str
    run: str
    owner: str
    expires_at: int = Field(description="seconds since 1970, UTC")
    request: RentalRequest

    @property
    def tags(self) -> dict[str, str]:
        """The tags of every resource of this lease."""
        return {
            TAG_STUDY: self.study,
            TAG_RUN: self.run,
            TAG_OWNER: self.owner,
            TAG_EXPIRES: str(self.expires_at),
        }

    @property
    def name(self) -> str:
        """Name of the resources that have one per run."""
        return f"rankwise-{self.run}"


class Rung(Frozen):
    """One place and market to ask, with the price of a node there; None: unknown."""

    region: str
    zone: str | None = None
    market: MarketName = "on_demand"
    usd_per_hour: PositiveFloat | None = None

    @property
    def words(self) -> str:
        """Such as `us-east-1, any zone, spot`."""
        return f"{self.region}, {self.zone or 'any zone'}, {self.market.replace('_', ' ')}"


class Node(Frozen):
    """One machine as its cloud describes it."""

    id: str
    region: str
    zone: str | None = None
    state: Literal["pending", "running", "stopping", "gone"]
    private_address: str | None = None
    public_address: str | None = None
    market: MarketName = "on_demand"
    reason: str = Field("", description="why it is stopping or gone, where its cloud says so")


class Resource(Frozen):
    """Anything rented that bears our tags."""

    provider: Cloud
    kind: ResourceKind
    id: str
    region: str
    zone: str | None = None
    study: str = ""
    run: str
    owner: str = ""
    expires_at: int | None = None
    detail: str = Field("", description="an instance's type and state, a disk's size")

    @property
    def words(self) -> str:
        """Such as `aws instance i-0123 in us-east-1`."""
        return f"{self.provider} {self.kind.replace('_', ' ')} {self.id} in {self.zone or self.region}"


class Provider(Protocol):
    """What each cloud can do. Every method raises ProviderError; none retries what it reports as throttled."""

    name: Cloud
    default_user: str

    def identity(self) -> str:
        """Name the account that the credentials belong to. Problem `auth`: none, expired or refused."""
        ...

    def regions(self) -> list[str]:
        """Return all regions that the account can use."""
        ...

    def zones(self, instance: str, region: str) -> list[str]:
        """Return the zones of a region that offer the instance."""
        ...

    def prepare(self, lease: RentalLease, region: str) -> None:
        """Make the network rules and the placement group of a region, unless they are there."""
        ...

    def create(self, lease: RentalLease, user_data: str, rung: Rung, token: str) -> list[Node]:
        """Create all nodes or none. The same token returns the same nodes."""
        ...

    def nodes(self, run: str, region: str) -> list[Node]:
        """Describe the machines of a run; those that ended lately may be among them."""
        ...

    def tagged(self, regions: Sequence[str], run: str | None = None) -> list[Resource]:
        """List every resource with our tags, of all kinds; run: of this run alone."""
        ...

    def delete(self, resource: Resource) -> None:
        """Ask for the end of one resource; returns before it is gone. One that is gone already is no error."""
        ...

    def extend(self, resource: Resource, expires_at: int) -> None:
        """Write a later expiry to the tags of a resource."""
        ...


def node_address(node: Node, request: RentalRequest) -> str:
    """Return the address to connect to."""
    address = node.public_address if request.public_address else node.private_address
    assert address is not None
    return address
