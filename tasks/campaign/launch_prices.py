"""What a second of a target's node costs, of rented ones by the price at which they were asked for.

    prices = LaunchPrices(plan, run)
    prices.per_second("gpu"), prices.per_second("gpu", launch.began)      # USD; None: unknown

A price of the user's own (of the study, or of its price file) counts before all others. Clouds do not say what they
charge for a node; the ledger of a rental has the listed price of the place and the market that gave it.
"""

from datetime import datetime

from configs.common.files.reading import read_model
from configs.plans.paths import RunPaths
from configs.plans.plan import Plan
from configs.plans.rentals import Rentals

_HOUR_SECONDS = 3600.0


class LaunchPrices:
    """Prices of all targets on which a run folder has launches, also of those that the study has no more."""

    def __init__(self, plan: Plan, run: RunPaths) -> None:
        known = [(name, found.price, found.own) for name, found in plan.prices.items()]
        self._planned = {name: price.usd_per_hour for name, price, _ in known if price is not None}
        self._own = {name for name, _, own in known if own}
        self._run = run
        self._read: tuple[int, int] | None = None
        self._rented: dict[str, list[tuple[float, float]]] = {}

    def per_second(self, target: str, at: float | None = None) -> float | None:
        """Return USD for a second of one node. at: when it was had, in seconds since 1970; None: now."""
        planned = self._planned.get(target)
        rented = [] if target in self._own else self._rented_at(target, at)
        price = rented[-1] if rented else planned
        return None if price is None else price / _HOUR_SECONDS

    def _rented_at(self, target: str, at: float | None) -> list[float]:
        """Prices of a target's rentals that had begun by then, in order."""
        self._read_rentals()
        return [usd for began, usd in self._rented.get(target, ()) if at is None or began <= at]

    def _read_rentals(self) -> None:
        """Read the file of rentals again where it has changed: nodes come up while a run goes on."""
        try:
            state = self._run.rentals.stat()
            if (read := (state.st_mtime_ns, state.st_size)) == self._read:
                return
            found = read_model(self._run.rentals, Rentals)
        except (OSError, ValueError):
            return  # nothing was rented
        self._read = read
        self._rented = {
            rental.target: [
                (datetime.fromisoformat(attempt.at).timestamp(), attempt.usd_per_hour)
                for attempt in rental.attempts
                if attempt.problem is None and attempt.usd_per_hour is not None
            ]
            for rental in found.rentals
        }
