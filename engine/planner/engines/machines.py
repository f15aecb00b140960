"""Choose the machines on which an engine serves a model: each of the catalog with its best layout, the cheapest first.

    found = serving_machines(wish, machines, shipped(), requests_per_second=20.0)
    found[0].machine.name, found[0].count, found[0].usd
    maybe_cheaper(found)                       # within the errors of the predictions

A machine's best layout has the most tokens per second of those within the limits of TTFT and TPOT. No replica spans
machines. Rates are those of machines that are never idle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from configs.common.system.blas import one_blas_thread
from configs.hardware.hardware import Machine
from engine.planner.engines.calibrated import CalibratedEngines
from engine.planner.engines.service import ServingLayout, ServingRequest, services

_NOT_COMPUTED_WITH = frozenset({"name", "usd_per_hour", "host_memory_bytes", "storage_bytes"})
"""Fields of a machine that change no speed: clouds rent the same hardware under several names."""


@dataclass(frozen=True)
class ServingMachines:
    """So many machines of one kind, all with the same layout.

    tokens_per_second: that are asked for; None: what one machine makes.
    """

    layout: ServingLayout
    tokens_per_second: float | None

    @property
    def machine(self) -> Machine:
        """One of them."""
        return self.layout.point.machine

    @property
    def count(self) -> int:
        """How many carry what is asked for."""
        return self._count(1.0)

    @property
    def most(self) -> int:
        """How many it takes where each is as slow as the prediction's error allows, 90 %."""
        return self._count(1 / self.layout.spread)

    @property
    def usd_per_hour(self) -> float | None:
        """Of all; None where the price is not known."""
        price = self.machine.usd_per_hour
        return None if price is None else self.count * price

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Of those that are asked for; None where the price is not known."""
        return self._usd(1.0)

    @property
    def least_usd_per_million_tokens(self) -> float | None:
        """The same where each machine is as fast as the prediction's error allows, 90 %."""
        return self._usd(self.layout.spread)

    def _count(self, faster: float) -> int:
        if self.tokens_per_second is None:
            return 1
        return ceil(self.tokens_per_second / (self.layout.tokens_per_second * faster))

    def _usd(self, faster: float) -> float | None:
        price, made = self.machine.usd_per_hour, self.layout.tokens_per_second * faster
        if price is None:
            return None
        return self._count(faster) * price / 3600 / (self.tokens_per_second or made) * 1e6


@one_blas_thread()
def serving_machines(
    wish: ServingRequest,
    machines: Sequence[Machine],
    calibrated: CalibratedEngines,
    requests_per_second: float | None = None,
) -> list[ServingMachines]:
    """Return the machines that hold the model and are fast enough, the cheapest first, those without a price last.

    Machine and devices of the wish do not count.
    """
    tokens = None if requests_per_second is None else requests_per_second * wish.new_tokens
    best: dict[str, ServingLayout | None] = {}
    found = []
    for machine in machines:
        hardware = machine.model_dump_json(exclude=set(_NOT_COMPUTED_WITH))
        if hardware not in best:
            own = services(replace(wish, machine=machine, devices=machine.accelerators), calibrated)
            best[hardware] = own[0] if own else None
        if (layout := best[hardware]) is not None:
            found.append(ServingMachines(replace(layout, point=replace(layout.point, machine=machine)), tokens))
    return sorted(found, key=lambda one: (_known(one.usd_per_million_tokens), one.count, one.machine.name))


def maybe_cheaper(found: Sequence[ServingMachines]) -> list[ServingMachines]:
    """Return those that cost less than the first one where they are as fast as their predictions' error allows."""
    first = _known(found[0].usd_per_million_tokens)
    return [one for one in found[1:] if _known(one.least_usd_per_million_tokens) < first]


def _known(usd: float | None) -> float:
    return inf if usd is None else usd
