"""What a run rented, as its run folder keeps it: `rentals.json`."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from configs.common.base import Frozen


class RentalAttempt(Frozen):
    """One request for all nodes of a target, in one place and market."""

    at: str
    region: str
    zone: str | None = None
    market: str
    usd_per_hour: PositiveFloat | None = Field(None, description="of one node; none: unknown")
    problem: str | None = Field(None, description="why there were no nodes; none: there were")
    seconds: NonNegativeFloat = Field(0, description="from the answer of the create call to when they were given back")
    nodes: PositiveInt | None = Field(None, description="how many it got; none: none, or not known")
    unused_seconds: NonNegativeFloat = Field(
        0, description="of `seconds`: from the end of a killed run to the next one, or all where no run got the nodes"
    )

    def usd(self, nodes: int) -> float | None:
        """What that cost, by the price an hour; None: the price is unknown.

        nodes: as many as there were where the attempt does not know, as of an earlier version.
        """
        return self._usd(nodes, self.seconds)

    def unused_usd(self, nodes: int) -> float | None:
        """What of it was for time in which no run used the nodes."""
        return self._usd(nodes, self.unused_seconds)

    def _usd(self, nodes: int, seconds: float) -> float | None:
        if seconds == 0:
            return 0.0
        return None if self.usd_per_hour is None else (self.nodes or nodes) * self.usd_per_hour * seconds / 3600


class StudyRental(Frozen):
    """The nodes of one target, over all runs of the folder."""

    target: str
    provider: str
    instance: str
    nodes: PositiveInt
    name: str = Field(description="of the rental, as in tags and for `rankwise nodes`")
    attempts: tuple[RentalAttempt, ...] = ()
    left: tuple[str, ...] = Field((), description="what could not be given back")
    kept_until: str | None = Field(None, description="when nodes that were kept for a later run end; none: none were")
    up: bool = Field(False, description="whether nodes were up when this was written")

    @property
    def usd(self) -> float | None:
        """Dollars for all attempts; None where a price is unknown."""
        return _sum([attempt.usd(self.nodes) for attempt in self.attempts])

    @property
    def unused_usd(self) -> float | None:
        """Dollars of these for nodes that no run used: the cost of killed runs; None where a price is unknown."""
        return _sum([attempt.unused_usd(self.nodes) for attempt in self.attempts])


def _sum(costs: list[float | None]) -> float | None:
    return None if None in costs else sum(cost for cost in costs if cost is not None)


class Rentals(Frozen):
    """All rented targets of a study."""

    rentals: tuple[StudyRental, ...] = ()
