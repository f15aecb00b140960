"""Which backend gets a request: a pure function of prices, health and load.

    next_backend(backends, states, tried=set())        # the backend, or None: none is ready

Own machines (no price) take the base, cheaper clouds come before dearer ones and those of unknown price last; a backend
with as many requests as it may have is passed over while another has room, so that peaks go to the next.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from configs.serving.deployment import RoutedServer


@dataclass
class BackendLoad:
    """What is known of a backend now. looked_at: when it was last asked whether it is ready (monotonic)."""

    ready: bool = False
    looked_at: float = 0.0
    in_flight: int = 0
    requests: int = 0
    failures: int = 0


def next_backend(
    backends: Sequence[RoutedServer], loads: Mapping[str, BackendLoad], tried: Collection[str] = ()
) -> RoutedServer | None:
    """Return the backend for the next request; None where none that is ready is left."""
    able = [
        backend
        for backend in backends
        if not backend.draining and backend.name not in tried and loads[backend.name].ready
    ]
    if not able:
        return None

    def rank(backend: RoutedServer) -> tuple[bool, float, float, str]:
        load = loads[backend.name]
        full = load.in_flight >= backend.max_in_flight
        share = load.in_flight / backend.max_in_flight
        price = backend.usd_per_hour or (math.inf if backend.rented else 0.0)
        # Where all are full, the fullest is the worst, whatever it costs.
        return (full, share if full else price, share, backend.name)

    return min(able, key=rank)
