"""Hourly prices of targets and their sources. An unknown price is None, never 0.

    prices = target_prices(target, own=read_price_file(path, "prices.yaml"))

Three sources, the first that knows counts: the study itself, the user's own file (`configs.hardware.price_file`),
the catalog that comes with Rankwise (`configs/catalog/prices.csv`: a snapshot, each row with its date and
source). What else is known of the same machine (spot, reserved, other regions) is kept to weigh savings.
"""

import csv
import io
from collections.abc import Sequence
from datetime import date
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, ValidationError, field_validator

from configs.common.base import Frozen
from configs.common.files.reading import PLAN_BYTES, read_text
from configs.targets.rented import RentedTarget, region_name
from configs.targets.resources import Resources

Market = Literal["on_demand", "spot", "reserved_1_year", "reserved_3_years"]
CATALOG = Path(__file__).parents[1] / "catalog" / "prices.csv"
CATALOG_COLUMNS = ("machine", "region", "market", "usd_per_hour", "as_of", "source")
OF_STUDY = "the study file"
"""Source of a price that the study itself states."""
STALE_DAYS = 30
"""Clouds change prices without notice; Google alone reserves to change spot prices daily."""


class Price(Frozen):
    """One offer of one machine."""

    usd_per_hour: PositiveFloat
    source: str
    as_of: str | None = Field(None, description="YYYY-MM-DD")
    market: Market = "on_demand"
    region: str | None = None

    @field_validator("as_of")
    @classmethod
    def _is_a_date(cls, as_of: str | None) -> str | None:
        if as_of is not None:
            try:
                date.fromisoformat(as_of)
            except ValueError:
                raise ValueError(f"got {as_of!r}, expected a date such as 2026-01-31") from None
        return as_of

    def age_days(self, on: date) -> int | None:
        """Days from the price to that date; None where the price has no date."""
        return None if self.as_of is None else (on - date.fromisoformat(self.as_of)).days


class TargetPrices(Frozen):
    """What is known of a target's price: `price` is what its cells are priced with, the others could be had.

    own: whether the user states it, in the study or in a price file.
    """

    price: Price | None = None
    others: tuple[Price, ...] = ()
    own: bool = False


class Offer(Frozen):
    """A price and what it is for: targets of that name, or machines `provider/instance`; `*` stands for anything."""

    target: str | None = None
    machine: str | None = None
    price: Price

    def is_like(self, name: str, machine: str | None) -> bool:
        """Whether it is for a target of this name, or for this machine (`provider/instance`) in whatever region."""
        pattern, wanted = (self.machine, machine) if self.target is None else (self.target, name)
        if pattern is None or wanted is None:
            return False
        return _is_like(wanted, pattern)

    def is_of_provider(self, provider: str) -> bool:
        """Whether it may be for a machine of this provider."""
        return self.machine is not None and _is_like(provider, self.machine.partition("/")[0])

    def is_in(self, region: str | None) -> bool:
        """Whether it holds in this region: as one that names none does, or one for a target of which none is known."""
        return self.price.region in (None, region) or (self.target is not None and region is None)


def _is_like(name: str, pattern: str) -> bool:
    """Whether a name fits a pattern, in which `*` stands for anything."""
    # Most are no patterns, and a plan for a fleet asks each offer for each of a thousand machines.
    if "*" not in pattern:
        return pattern == name
    return fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]"))


def target_prices(target: Resources, own: Sequence[Offer] = (), catalog: Sequence[Offer] | None = None) -> TargetPrices:
    """What the study, the user's file and the catalog know of a target, the first source that knows first.

    In the user's file the first offer that fits counts, so narrow ones stand above wide ones. The catalog
    gives on-demand prices only; its other markets are among `others`. A machine with attached accelerators
    (`gcp/n1-standard-8+2xt4`) that no source prices as a whole costs what its parts cost together, where the price
    of each is known.
    """
    shipped = read_catalog() if catalog is None else catalog
    whole = _prices_of(target, own, shipped)
    parts = [] if target.catalog_name is None else machine_parts(target.catalog_name)
    if len(parts) < 2:
        return whole
    place = f"/{target.region}" if target.region else ""
    for_machines = [offer for offer in own if offer.machine is not None]
    known = [
        (count, _prices_of(target.model_copy(update=_as_part(name + place)), for_machines, shipped))
        for name, count in parts
    ]
    price = whole.price or _sum([(count, prices.price) for count, prices in known])
    own_price = whole.own or (whole.price is None and any(prices.own for _, prices in known))
    taken = {(other.market, other.region) for other in (price, *whole.others) if other is not None}
    places = {(other.market, other.region): None for _, prices in known for other in _all_of(prices)}
    sums = [
        _sum([(count, _at(prices, market, region)) for count, prices in known])
        for market, region in places
        if (market, region) not in taken
    ]
    others = (*whole.others, *(total for total in sums if total is not None))
    return TargetPrices(price=price, others=others, own=own_price)


def machine_parts(instance: str) -> list[tuple[str, int]]:
    """`gcp/n1-standard-8+2xt4` as the machine and what is attached to it, each with how many of it."""
    provider, _, rest = instance.partition("/")
    machine, *attached = rest.split("+")
    parts = [(f"{provider}/{machine}", 1)]
    for item in attached:
        count, cross, name = item.partition("x")
        many = cross and count.isdecimal() and int(count) > 0
        parts.append((f"{provider}/{name if many else item}", int(count) if many else 1))
    return parts


def _as_part(machine: str) -> dict[str, object]:
    """What makes a target one of its parts: no price of the whole."""
    return {"machine": machine, "price_usd_per_hour": None}


def _all_of(prices: TargetPrices) -> tuple[Price, ...]:
    return prices.others if prices.price is None else (prices.price, *prices.others)


def _at(prices: TargetPrices, market: Market, region: str | None) -> Price | None:
    return next((price for price in _all_of(prices) if (price.market, price.region) == (market, region)), None)


def _sum(parts: Sequence[tuple[int, Price | None]]) -> Price | None:
    """The price of all parts together; None where one is unknown, or where they are of different markets."""
    known = [(count, price) for count, price in parts if price is not None]
    markets = {price.market for _, price in known}
    if len(known) < len(parts) or len(markets) > 1:
        return None
    dates = [price.as_of for _, price in known]
    return Price(
        usd_per_hour=sum(count * price.usd_per_hour for count, price in known),
        source=" + ".join(f"{count} x {price.source}" if count > 1 else price.source for count, price in known),
        as_of=min(day for day in dates if day is not None) if all(dates) else None,
        market=known[0][1].market,
        region=next((price.region for _, price in known if price.region is not None), None),
    )


def _prices_of(target: Resources, own: Sequence[Offer], shipped: Sequence[Offer]) -> TargetPrices:
    """Prices of exactly this machine, its parts left alone."""
    machine, region = target.catalog_name, target.region
    like_own = [_spelled_as(offer, region) for offer in own if offer.is_like(target.name, machine)]
    like_shipped = [_spelled_as(offer, region) for offer in shipped if offer.is_like(target.name, machine)]
    found = [offer.price for offer in like_own if offer.is_in(region)]
    own_price = bool(found) or target.price_usd_per_hour is not None
    found += [offer.price for offer in like_shipped if offer.is_in(region) and offer.price.market == "on_demand"]
    if target.price_usd_per_hour is not None:
        # What the study says that its nodes cost is of the market in which it asks for them.
        market: Market = target.market if isinstance(target, RentedTarget) else "on_demand"
        stated = Price(usd_per_hour=target.price_usd_per_hour, source=OF_STUDY, market=market, region=region)
        found.insert(0, stated)
    price = found[0] if found else None
    taken = {(price.market, price.region or region)} if price else set()
    others: list[Price] = []
    for offer in (*like_own, *like_shipped):
        place = (offer.price.market, offer.price.region or region)
        if place not in taken:
            taken.add(place)
            others.append(offer.price)
    return TargetPrices(price=price, others=tuple(others), own=own_price)


def _spelled_as(offer: Offer, region: str | None) -> Offer:
    """Return an offer of this region with its spelling of it: Azure's `East US` and `EastUS` are eastus."""
    own = offer.price.region
    if own is None or region is None or own == region or region_name(own) != region_name(region):
        return offer
    return offer.model_copy(update={"price": offer.price.model_copy(update={"region": region})})


def read_catalog(path: Path = CATALOG) -> tuple[Offer, ...]:
    """The offers of a catalog. Raises ValueError naming the line: a price not above 0, none without date and source."""
    state = path.stat()
    return _read_catalog(path, state.st_mtime_ns, state.st_size)


def listed_offers(cache: Path) -> tuple[Offer, ...]:
    """The offers of the catalog, those first that `rankwise catalog refresh` keeps in the user's cache folder.

    Raises as `read_catalog`.
    """
    return (*refreshed_offers(cache), *read_catalog())


def refreshed_offers(cache: Path) -> tuple[Offer, ...]:
    """The offers that `rankwise catalog refresh` keeps in the user's cache folder. Raises as `read_catalog`."""
    path = cache / "catalog" / CATALOG.name
    try:
        return read_catalog(path) if path.exists() else ()
    except ValueError as error:
        raise ValueError(f"{error}. Remove the file to fetch it again") from error


@lru_cache(maxsize=4)
def _read_catalog(path: Path, changed_ns: int, size: int) -> tuple[Offer, ...]:
    """changed_ns, size: of the file, so that a refreshed one is read anew."""
    offers: list[Offer] = []
    seen: set[tuple[str, str, str]] = set()
    with io.StringIO(read_text(path, PLAN_BYTES), newline="") as file:
        rows = csv.DictReader(file, strict=True)  # else a quote that is never closed swallows all the rows after it
        try:
            listed = [(rows.line_num, row) for row in rows]
        except csv.Error as error:
            raise ValueError(f"{path}: not a CSV file ({error})") from error
        if tuple(rows.fieldnames or ()) != CATALOG_COLUMNS:
            raise ValueError(f"{path}: columns are {rows.fieldnames}; expected {', '.join(CATALOG_COLUMNS)}")
        for line, row in listed:
            where = f"{path}, line {line}"
            if None in row or not all(row.values()):
                raise ValueError(f"{where}: expected exactly the columns {', '.join(CATALOG_COLUMNS)}")
            place = (row["machine"], row["region"], row["market"])
            if place in seen:
                raise ValueError(f"{where}: duplicate price of {' '.join(place)}")
            seen.add(place)
            fields = {name: row[name] for name in CATALOG_COLUMNS if name != "machine"}
            try:
                offers.append(Offer(machine=row["machine"], price=Price.model_validate(fields)))
            except ValidationError as error:
                problem = error.errors()[0]
                field = problem["loc"][0] if problem["loc"] else "row"
                raise ValueError(f"{where}: {field}: {problem['msg']}, got {problem['input']!r}") from error
    return tuple(offers)
