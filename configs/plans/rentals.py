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

    def usd(self, nodes: int) -> float | None:
        """What that cost, by the price an hour; None: the price is unknown."""
        if self.seconds == 0:
            return 0.0
        return None if self.usd_per_hour is None else nodes * self.usd_per_hour * self.seconds / 3600


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
        costs = [attempt.usd(self.nodes) for attempt in self.attempts]
        return None if None in costs else sum(cost for cost in costs if cost is not None)


class Rentals(Frozen):
    """All rented targets of a study."""

    rentals: tuple[StudyRental, ...] = ()
