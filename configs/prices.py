"""What an hour of a target costs, and where that is known from. Unknown stays unknown, never 0."""

from typing import Literal

from pydantic import PositiveFloat

from configs.base import Frozen

Market = Literal["on_demand", "spot", "reserved_1_year", "reserved_3_years"]


class Price(Frozen):
    """One offer of one machine."""

    usd_per_hour: PositiveFloat
    source: str
    as_of: str | None = None
    market: Market = "on_demand"
    region: str | None = None


class TargetPrices(Frozen):
    """What is known of a target's price: `price` is what its cells are priced with, the others could be had."""

    price: Price | None = None
    others: tuple[Price, ...] = ()
