"""The order in which places and markets are asked for nodes, and what a refusal rules out.

    for rung in ladder(request, zones):             # no zone, then zones, then regions, then the other market
        ...
    is_excluded(rung, "quota", refused)             # the rest of this region and market

Pure functions; `tasks.providers.renting` makes the calls.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from configs.hardware.prices import Offer, Price, target_prices
from configs.targets.rented import MarketName
from configs.targets.target import LocalTarget
from tasks.providers.rental import Problem, RentalRequest, Rung


@dataclass(frozen=True)
class RentalOffer:
    """What will be asked for, in order, and what was left out for its price.

    on_demand: dollars an hour of one node by region, to which a spot price may rise; None: unknown. spot_source: where
    the price of the first rung is from, if it is a spot one, in words.
    """

    rungs: list[Rung]
    refused: list[str]
    on_demand: Mapping[str, float | None] = field(default_factory=dict)
    spot_source: str = ""

    @property
    def max_usd_per_hour(self) -> float | None:
        """Dollars an hour that one node may cost at the dearest rung; None: a price is unknown."""
        prices = [self._most(rung) for rung in self.rungs]
        return None if None in prices else max((price for price in prices if price is not None), default=None)

    def _most(self, rung: Rung) -> float | None:
        """A listed spot price is of one day."""
        risen = self.on_demand.get(rung.region)
        if rung.market == "on_demand" or rung.usd_per_hour is None:
            return rung.usd_per_hour
        return None if risen is None else max(risen, rung.usd_per_hour)


def ladder(
    request: RentalRequest, zones: Mapping[str, Sequence[str]], listed: Sequence[Offer] | None = None
) -> list[Rung]:
    """Return all rungs in order. zones: those of each region that offer the instance; listed: as `node_price`."""
    markets = [request.market]
    if request.fall_back is not None and request.fall_back != request.market:
        markets.append(request.fall_back)
    rungs = []
    for market in markets:
        prices = {region: node_price(request, region, market, listed) for region in request.regions}
        for region in sorted(prices, key=lambda region: _place(request, prices[region])):
            price = prices[region]
            offered = list(zones.get(region, ()))
            named = [zone for zone in request.zones if zone in offered] if request.zones else offered
            places = named if request.zones else [None, *named]
            rungs += [Rung(region=region, zone=zone, market=market, usd_per_hour=price) for zone in places]
    return rungs


def _place(request: RentalRequest, price: float | None) -> float:
    """For sorting regions, which stay as they are where nobody asked for the cheapest."""
    if not request.cheapest_first:
        return 0.0
    return math.inf if price is None else price


def node_price(
    request: RentalRequest, region: str, market: MarketName, listed: Sequence[Offer] | None = None
) -> float | None:
    """Return dollars an hour of one node; None: unknown. listed: as `listed_price`."""
    price = listed_price(request, region, market, listed)
    return None if price is None else price.usd_per_hour


def listed_price(
    request: RentalRequest, region: str, market: MarketName, listed: Sequence[Offer] | None = None
) -> Price | None:
    """Return the price of one node; None: unknown.

    listed: offers, those first that count (`configs.hardware.prices.listed_offers`); None: the shipped ones.
    A spot price that the catalog lacks is bounded by the price on demand, which all three clouds charge at most.
    """
    known = target_prices(LocalTarget(machine=f"{request.provider}/{request.instance}/{region}"), catalog=listed)
    offers = [price for price in (known.price, *known.others) if price is not None and price.region == region]
    for wanted in (market, "on_demand"):
        for price in offers:
            if price.market == wanted:
                return price
    return None


def spot_source(request: RentalRequest, rung: Rung, listed: Sequence[Offer] | None = None) -> str:
    """Return where the price of a spot rung is from, in words; empty: on demand, or of an unknown price."""
    price = listed_price(request, rung.region, rung.market, listed)
    if rung.market != "spot" or price is None:
        return ""
    when = f" on {price.as_of}" if price.as_of else ""
    if price.market == "spot":
        return f"spot prices change: this is the one listed{when} ({price.source})"
    return f"no spot price is listed: this is the one on demand, listed{when} ({price.source})"


def is_excluded(rung: Rung, problem: Problem, refused: Rung) -> bool:
    """Return whether a refusal of one rung makes asking another one pointless.

    A quota holds for a region and a market; a region that does not answer holds for all its zones and markets.
    """
    if problem == "quota":
        return (rung.region, rung.market) == (refused.region, refused.market)
    if problem == "transient":
        return rung.region == refused.region
    return rung == refused
