"""From "four H100" or "whatever is cheapest" to a machine of the catalog, with what an hour of it costs.

machine_for(accelerator("h100-80gb"), gpu_count=4)      # the cheapest instance that has them, else a plain node
priced(machine, "spot", catalog())                      # the same at the spot price; None where none is known
"""

from typing import Literal

from configs.hardware import Accelerator, Machine
from configs.hardware_catalog import HOME_REGIONS, HardwareCatalog
from configs.prices import Market, Price, target_prices
from configs.target import LocalTarget
from engine.planner.setup import Precision

DEFAULT_ACCELERATOR = "h100-80gb"
"""Assumed, and said to be assumed, where no hardware is named."""
_PLAIN_NODE = 8


def machine_for(
    accelerator: Accelerator, gpu_count: int, catalog: HardwareCatalog, market: Market = "on_demand"
) -> Machine:
    """The instance of this accelerator that holds so many in the fewest nodes, and of those the cheapest.

    Those without a known price come after those with one. No instance at all: a node of eight without a network,
    which no price is known of.
    """
    found = [
        priced(machine, market, catalog)
        for machine in catalog.instances().values()
        if machine.accelerator.name == accelerator.name
    ]

    def cost(machine: Machine) -> tuple[bool, int, bool, float]:
        nodes = -(-gpu_count // machine.accelerators)
        unjoined = nodes > 1 and machine.between is None
        return unjoined, nodes, machine.usd_per_hour is None, nodes * (machine.usd_per_hour or 0.0)

    if found:
        return min(found, key=cost)
    return Machine(name=accelerator.name, accelerator=accelerator, accelerators=_PLAIN_NODE)


def priced(machine: Machine, market: Market, catalog: HardwareCatalog, region: str | None = None) -> Machine:
    """A machine of the catalog at its price on a market; without a price where none is known there.

    On demand it has its price already, the user's own rate among them.
    """
    if market == "on_demand" and region is None:
        return machine
    price = instance_price(machine.name, market, catalog, region)
    return machine.model_copy(update={"usd_per_hour": price and price.usd_per_hour})


def instance_price(name: str, market: Market, catalog: HardwareCatalog, region: str | None = None) -> Price | None:
    """What an hour costs on a market, in a region (none named: the provider's home region). None: not known there."""
    place = region or HOME_REGIONS.get(name.split("/")[0])
    target = LocalTarget(machine=f"{name}/{place}" if place else name)
    prices = target_prices(target, catalog=[offer for _, offer in catalog.offers()])
    known = ((prices.price,) if prices.price else ()) + prices.others
    return next((price for price in known if price.market == market and price.region in (place, None)), None)


def training_precision(accelerator: Accelerator) -> Precision:
    """16-bit where the device gains by it: a GPU always; a CPU where its bfloat16 is faster than its float32."""
    return "bfloat16_mixed" if _gains(accelerator) else "float32"


def inference_format(accelerator: Accelerator) -> Literal["float32", "bfloat16", "float16"]:
    """The format of weights: bfloat16, float16 where the device has no bfloat16, float32 on a CPU that has neither."""
    if not _gains(accelerator):
        return "float32"
    return "bfloat16" if "bfloat16" in accelerator.peak_flops else "float16"


def _gains(accelerator: Accelerator) -> bool:
    peaks = accelerator.peak_flops
    half = max(peaks.get("bfloat16", 0.0), peaks.get("float16", 0.0))
    return half > 0 and (accelerator.kind != "cpu" or half > 1.5 * peaks.get("float32", 0.0))
