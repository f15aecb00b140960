"""What the clouds of the tests do wrong on demand."""

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Fault:
    """What happens to the next `times` calls of an action; -1: to all. Fields that are None match everything.

    code: refuse. lose: do it and close the connection. late_seconds: close the connection, do it afterwards.
    """

    action: str
    code: str | None = None
    region: str | None = None
    zone: str | None = None
    market: str | None = None
    times: int = -1
    lose: bool = False
    late_seconds: float | None = None
    after: int = 0
    hook: Callable[[], None] | None = None

    def takes(self, action: str, region: str, zone: str | None, market: str) -> bool:
        """Whether it happens to this call; counts it."""
        wanted = ((self.region, region), (self.zone, zone), (self.market, market))
        if self.times == 0 or not re.fullmatch(self.action, action):
            return False
        if any(asked is not None and asked != given for asked, given in wanted):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        return True
