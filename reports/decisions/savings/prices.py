"""Savings that follow from prices: another market for the same machine, and another region."""

from collections.abc import Iterator

from configs.hardware.prices import Market, Price, TargetPrices
from configs.spec.objectives import Purpose
from configs.targets.rented import RentedTarget
from configs.targets.resources import Resources
from reports.decisions.cost import market_name
from reports.decisions.savings.saving import BATCH, UNKNOWN_EFFECT, Saving
from reports.reading.load import StudyResult
from reports.text import code, escaped, joined, number, percent, plural


def market_savings(
    study: StudyResult, name: str, purposes: tuple[Purpose, ...], markets: tuple[Market, ...]
) -> Iterator[Saving]:
    """Another market for the same machine: in its own region if that is known, else the cheapest."""
    missing: list[str] = []
    for target, prices, price in _priced_targets(study):
        title, home = f"{name} ({code(target.name)})", price.region or target.region
        if price.market in markets:
            yield Saving(title, purposes, "taken already", f"its cells are priced as {market_name(price)}")
            continue
        if isinstance(target, RentedTarget) and target.market in markets:
            basis = f"its nodes are asked for as {target.market}; its cells are priced as {market_name(price)}"
            yield Saving(title, purposes, "taken already", basis)
            continue
        found = False
        for market in markets:
            known = [other for other in prices.others if other.market == market]
            here = [other for other in known if other.region in (None, home)]
            if known:
                found = True
                other = min(here or known, key=lambda item: item.usd_per_hour)
                yield Saving(title, purposes, _change(price, other), _offers(price, other) + _condition(price, other))
        missing += [] if found else [target.name]
    if missing:
        words = joined(f"`market: {market}`" for market in markets)
        basis = f"no such price of {joined(map(code, missing))} is known; give it with {words} in a file under `prices`"
        yield Saving(name, purposes, UNKNOWN_EFFECT, basis)
    yield from _without_price(study, name, purposes)


def region_savings(study: StudyResult) -> Iterator[Saving]:
    """The same machine in the same market elsewhere."""
    name = "a cheaper region"
    missing: list[str] = []
    for target, prices, price in _priced_targets(study):
        home = price.region or target.region
        others = [other for other in prices.others if other.market == price.market and other.region not in (None, home)]
        if not others:
            missing.append(target.name)
            continue
        best = min(others, key=lambda item: item.usd_per_hour)
        effect = _change(price, best) if best.usd_per_hour < price.usd_per_hour else "nothing"
        basis = f"{_offers(price, best)}, the cheapest of {plural(len(others), 'other region')} known"
        yield Saving(f"{name} ({code(target.name)})", BATCH, effect, f"{basis}; moving the data is not counted")
    if missing:
        basis = f"no price of {joined(map(code, missing))} in another region is known; give one under `prices`"
        yield Saving(name, BATCH, UNKNOWN_EFFECT, basis)
    yield from _without_price(study, name, BATCH)


def _priced_targets(study: StudyResult) -> Iterator[tuple[Resources, TargetPrices, Price]]:
    for target in study.plan.targets:
        prices = study.plan.prices.get(target.name)
        if prices is not None and prices.price is not None:
            yield target, prices, prices.price


def _without_price(study: StudyResult, name: str, purposes: tuple[Purpose, ...]) -> Iterator[Saving]:
    """One row for all targets whose own price is unknown."""
    known = {target.name for target, _, _ in _priced_targets(study)}
    unknown = [target.name for target in study.plan.targets if target.name not in known]
    if unknown:
        yield Saving(name, purposes, UNKNOWN_EFFECT, f"the price of {joined(map(code, unknown))} is unknown")


def _condition(price: Price, other: Price) -> str:
    """What a market asks in return."""
    if other.market == "spot":
        return "; work that is lost when the machine is taken away is not counted"
    share = other.usd_per_hour / price.usd_per_hour
    return f"; paid around the clock, so it pays from {percent(share, 2)} use on" if share < 1 else ""


def _change(price: Price, other: Price) -> str:
    share = 1 - other.usd_per_hour / price.usd_per_hour
    return f"**{percent(share)}** less" if share > 0 else f"{percent(-share)} more" if share < 0 else "nothing"


def _offers(price: Price, other: Price) -> str:
    """Both prices, with market, place, day and source of the other."""
    place = f" in {escaped(other.region)}" if other.region else ""
    day = f", {other.as_of}" if other.as_of else ""
    return (
        f"${number(other.usd_per_hour, 4)} an hour {market_name(other)}{place} ({escaped(other.source)}{day}) "
        f"against ${number(price.usd_per_hour, 4)}"
    )
