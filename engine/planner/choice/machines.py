"""Resolve hardware requests ("four H100", "the cheapest") to a machine of the catalog with its price per hour.

machine_for(accelerator("h100-80gb"), 4, catalog())     # the cheapest instance that has them, else a plain node
priced_machine(machine, "spot", catalog())              # the same at the spot price; None if unknown
"""

from typing import Literal

from configs.hardware.catalog import HOME_REGIONS, HardwareCatalog
from configs.hardware.hardware import Accelerator, Machine
from configs.hardware.prices import Market, Price, target_prices
from configs.targets.target import LocalTarget
from engine.planner.setup import Precision

DEFAULT_ACCELERATOR = "h100-80gb"
"""Assumed, and reported as an assumption, if no hardware is named."""
_PLAIN_NODE = 8


def machine_for(
    accelerator: Accelerator, gpu_count: int, catalog: HardwareCatalog, market: Market = "on_demand"
) -> Machine:
    """Return the instance with this accelerator that needs the fewest nodes, then the cheapest.

    It has the accelerator's own figures, which the caller may have changed. Instances without a known price come after
    those with one. Without any instance: a node of eight without a network and without a price.
    """
    found = [
        priced_machine(machine, market, catalog)
        for machine in catalog.instances().values()
        if machine.accelerator.name == accelerator.name
    ]

    def cost(machine: Machine) -> tuple[bool, int, bool, float]:
        nodes = -(-gpu_count // machine.accelerators)
        unjoined = nodes > 1 and machine.between is None
        return unjoined, nodes, machine.usd_per_hour is None, nodes * (machine.usd_per_hour or 0.0)

    if found:
        return min(found, key=cost).model_copy(update={"accelerator": accelerator})
    return Machine(name=accelerator.name, accelerator=accelerator, accelerators=_PLAIN_NODE)


def priced_machine(machine: Machine, market: Market, catalog: HardwareCatalog, region: str | None = None) -> Machine:
    """Return a catalog machine at its price on a market; without a price if none is known there.

    Its on-demand price is already set, including the user's own rate.
    """
    if market == "on_demand" and region is None:
        return machine
    price = instance_price(machine.name, market, catalog, region)
    return machine.model_copy(update={"usd_per_hour": price and price.usd_per_hour})


def instance_price(name: str, market: Market, catalog: HardwareCatalog, region: str | None = None) -> Price | None:
    """Return the price per hour on a market, in a region (default: the provider's home region). None: unknown."""
    place = region or HOME_REGIONS.get(name.split("/")[0])
    target = LocalTarget(machine=f"{name}/{place}" if place else name)
    prices = target_prices(target, catalog=[offer for _, offer in catalog.offers()])
    known = ((prices.price,) if prices.price else ()) + prices.others
    return next((price for price in known if price.market == market and price.region in (place, None)), None)


def training_precision(accelerator: Accelerator) -> Precision:
    """Return 16-bit precision if it is faster: always on a GPU; on a CPU if bfloat16 is faster than float32."""
    return "bfloat16_mixed" if _gains(accelerator) else "float32"


def inference_format(accelerator: Accelerator) -> Literal["float32", "bfloat16", "float16"]:
    """Return the weight format: bfloat16, else float16, else float32 on a CPU that supports neither."""
    if not _gains(accelerator):
        return "float32"
    return "bfloat16" if "bfloat16" in accelerator.peak_flops else "float16"


def _gains(accelerator: Accelerator) -> bool:
    peaks = accelerator.peak_flops
    half = max(peaks.get("bfloat16", 0.0), peaks.get("float16", 0.0))
    return half > 0 and (accelerator.kind != "cpu" or half > 1.5 * peaks.get("float32", 0.0))
