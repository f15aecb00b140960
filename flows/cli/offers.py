"""What renting will cost, in words, and whether a person wants it."""

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import typer

from configs.common.printable import duration_text, plural

if TYPE_CHECKING:
    from configs.plans.paths import RunPaths
    from configs.plans.plan import Plan
    from configs.spec.study import StudySpec
    from tasks.planning.study_cost import StudyCost
    from tasks.providers.ladder import RentalOffer
    from tasks.providers.rental import RentalRequest


def offer_lines(request: "RentalRequest", offer: "RentalOffer", extended: bool = False) -> list[str]:
    """Return what is left out, the price of the first place, the most that the dearest may cost, a spot price's source.

    extended: a run keeps the nodes for as long as it lives, which nobody knows beforehand.
    """
    from configs.common.dollars import dollars
    from tasks.providers.clouds import BILLED_WHEN_OFF

    lines = [f"left out: {line}" for line in offer.refused]
    if request.provider in BILLED_WHEN_OFF:
        lines.append(
            f"{request.provider}: a node that powers off when its lifetime is over is billed until it is deleted: give "
            "it back in time, or let `rankwise reap` run by a schedule"
        )
    first, dearest = offer.rungs[0], offer.max_usd_per_hour
    node = f"{request.nodes} x {request.provider}/{request.instance}"
    if first.usd_per_hour is None or any(rung.usd_per_hour is None for rung in offer.rungs):
        length = "as long as the run lasts" if extended else f"at most {request.hours:g} h"
        return [*lines, f"{node}: price unknown, for {length}"]
    source = [offer.spot_source] if offer.spot_source else []
    told = f"{node}: {dollars(first.usd_per_hour * request.nodes)} USD/h first ({first.words})"
    if dearest is None:
        return [*lines, f"{told}; its price on demand, to which spot may rise, is unknown", *source]
    most = dearest * request.nodes
    return [
        *lines,
        f"{told}, at most {dollars(most)} USD/h; at most {dollars(most * request.hours)} USD in {request.hours:g} h",
        *source,
    ]


def agreed_to_rent(study: "StudySpec", yes: bool, to_measure: "Mapping[str, StudyCost]") -> bool:
    """Show what the rented targets of a study cost and ask; returns whether a person agreed.

    to_measure: what is expected of each target that has something to measure: only these are rented. Where nobody can
    be asked, a cap in every rented target stands for that. Raises ValueError: nothing may be rented.
    """
    from configs.targets.rented import RentedTarget

    rented = [target for target in study.targets if isinstance(target, RentedTarget) and target.name in to_measure]
    if not rented:
        return False
    for target in rented:
        own_price = study.prices is not None or target.price_usd_per_hour is not None
        for line in (*_priced(target), expected_line(to_measure[target.name], target.nodes, own_price)):
            typer.echo(f"  rent     {target.name}  {line}")
    if yes:
        return True
    if not sys.stdin.isatty():
        open_ended = [target.name for target in rented if target.max_usd_per_hour is None]
        if open_ended:
            raise ValueError(
                f"targets {', '.join(open_ended)}: nobody is there to agree to the price. Use --yes, or set "
                "max_usd_per_hour"
            )
        return False
    if not typer.confirm("Rent?", default=False):
        raise ValueError("nothing was rented")
    return True


def expected_costs(
    plan: "Plan", run: "RunPaths", targets: Collection[str], only_failed: bool
) -> "dict[str, StudyCost]":
    """Return what the measurements that are missing on each of these targets are predicted to take."""
    from tasks.campaign.ledger import missing_launches, read_ledger
    from tasks.planning.study_cost import launches_cost

    missing = missing_launches(plan, read_ledger(run), only_failed) if targets else []
    return {
        name: launches_cost(plan, [launch for launch in missing if launch.measurements[0].cell.target == name])
        for name in targets
    }


def expected_line(cost: "StudyCost", nodes: int, own_price: bool = False) -> str:
    """Return how long so many nodes are predicted to measure, and what that costs on demand, or at the user's price."""
    from configs.common.dollars import dollars

    if cost.nothing_known or cost.node_seconds is None:
        return "how long measuring there takes is unknown"
    usd = "" if cost.usd is None else f", {dollars(cost.usd)} USD{'' if own_price else ' on demand'}"
    left_out = f" and {plural(cost.unknown, 'cell')} of unknown duration" if cost.unknown else ""
    about = duration_text(cost.node_seconds / nodes)
    return f"measuring there takes about {about}{usd}; booting, preparing{left_out} not counted"


def _priced(target: object) -> list[str]:
    from configs.hardware.prices import listed_offers
    from configs.targets.rented import RentedTarget
    from flows.folders import cache_folder
    from tasks.providers.rental import ProviderError
    from tasks.providers.study_nodes import offer_of, request_of

    assert isinstance(target, RentedTarget)
    try:
        return offer_lines(request_of(target), offer_of(target, listed_offers(cache_folder())), extended=True)
    except ProviderError as error:
        raise ValueError(str(error)) from error
