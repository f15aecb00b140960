"""Nodes of a cloud that a study rents, measures on, and gives back.

targets:
  - {kind: aws, name: g5, instance: g5.12xlarge, nodes: 2, gpus_per_node: 4, regions: [us-east-1, us-west-2],
     market: spot, fall_back: on_demand, max_usd_per_hour: 12}

Once they are up, their jobs are those of an `SshTarget` with an address and a host key for each node
(`tasks.providers.study_nodes`).
"""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.common.base import Period
from configs.targets.resources import ClusterTarget

MAX_LEASE_HOURS = 24
MarketName = Literal["on_demand", "spot"]
_ADDRESS_RANGE = r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"


def region_name(text: str) -> str:
    """Return a region as the clouds list it. Azure takes `East US` and `EastUS`, and answers with eastus."""
    return text.replace(" ", "").lower()


def source_range(text: str) -> str:
    """Return who may connect in CIDR notation, which AWS takes alone: no bare address, no mask.

    Raises ValueError for what is no range, for everybody, and for IPv6.
    """
    from ipaddress import ip_network

    network = ip_network(text)
    if network.prefixlen == 0:
        raise ValueError(f"got {text}, which is everybody. Name an address, such as 203.0.113.7/32")
    if network.version != 4:
        raise ValueError(f"got {text}, but nodes have IPv4 addresses only. Name one, such as 203.0.113.7/32")
    return str(network)


class RentedTarget(ClusterTarget):
    """Nodes that are rented before measuring and given back after it, whatever ends the run."""

    scheduler: ClassVar[str] = "SSH"

    kind: Literal["aws", "gcp", "azure"] = "aws"
    name: str = Field("", description="not set: the kind")
    instance: str = Field(pattern=r"^[A-Za-z0-9][\w.+-]*$", description="as the provider spells it: g5.12xlarge")
    regions: list[str] = Field(min_length=1, max_length=64, description="in the order in which they are asked")
    zones: list[str] = Field([], description="in the order in which they are asked; none: all that offer the instance")
    cheapest_first: bool = Field(False, description="ask regions by price, those of unknown price last, not in order")
    market: MarketName = "on_demand"
    fall_back: MarketName | None = Field(None, description="market to ask after all regions")
    max_usd_per_hour: PositiveFloat | None = Field(
        None, description="of all nodes together; without it only a person at the command line can agree to the price"
    )
    lease_hours: PositiveFloat = Field(
        1.0,
        le=MAX_LEASE_HOURS,
        description="nodes of a run that has died end by themselves so long after it last extended them",
    )
    keep: Period | None = Field(
        None,
        le=24 * 3600,
        description="how long nodes stay up after a run that has ended well, for the next run of "
        "this folder (10m, 1h); none: they are given back",
    )
    image: str | None = Field(None, description="id or name; none: the vendor's deep learning image")
    disk_gb: PositiveInt = 100
    user: str | None = Field(None, pattern=r"^[^\s:@-][^\s:@]*$", description="login name; none: the image's")
    ssh_from: str | None = Field(
        None, pattern=_ADDRESS_RANGE, description="who may connect, in CIDR notation; none: this machine's address"
    )
    network: str | None = Field(None, description="existing VPC; none: the default one")
    subnet: str | None = None
    profile: str | None = Field(None, description="existing instance profile")
    public_address: bool = Field(True, description="false: this machine reaches the private addresses")
    placement: bool | None = Field(None, description="close together; none: where there are several nodes")
    wait_minutes: PositiveFloat = Field(10.0, description="limit until all nodes answer over SSH")
    python: str | None = Field(
        None, description="interpreter of the image that has the libraries; none: they are installed"
    )
    poll_seconds: PositiveFloat = Field(2.0, description="seconds between two looks at the jobs")

    @field_validator("ssh_from")
    @classmethod
    def _is_a_range(cls, ssh_from: str | None) -> str | None:
        return None if ssh_from is None else source_range(ssh_from)

    @model_validator(mode="before")
    @classmethod
    def _named_by_kind_and_instance(cls, data: Any) -> Any:
        """The price is looked up by provider, instance and first region, unless the study names another machine."""
        if not isinstance(data, dict):
            return data
        kind, instance, regions = data.get("kind", "aws"), data.get("instance"), data.get("regions")
        found = {"name": kind} | data
        if isinstance(regions, list | tuple):
            regions = [region_name(region) if isinstance(region, str) else region for region in regions]
            found["regions"] = regions
        if data.get("machine") is None and isinstance(instance, str) and isinstance(regions, list) and regions:
            found["machine"] = f"{kind}/{instance}/{regions[0]}"
        return found

    @model_validator(mode="after")
    def _nothing_shared(self) -> Self:
        if self.shared is not None:
            raise ValueError("shared: rented nodes share no folder; everything is carried to each. Leave it out")
        return self

    @property
    def where(self) -> str:
        """Which nodes, for a person: `aws/g5.12xlarge, spot`."""
        return f"{self.kind}/{self.instance}, {self.market.replace('_', ' ')}"

    @property
    def adapter(self) -> str:
        """That of the hosts which the nodes become."""
        return "ssh"
