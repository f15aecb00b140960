"""A user who rents nodes of a cloud of the tests, and can be killed meanwhile."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.providers.giving_back import ReapResult, Teardown, remove_expired
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, Provider, RentalLease, RentalRequest
from tasks.providers.renting import extend_run, give_back_run, plan_rental, rent
from tests.support.clouds.faults import Fault
from tests.support.patience import patient

PATIENCE = Teardown(limit_seconds=30, settle_seconds=3)
LIMITS = Limits(
    ready_seconds=8,
    host_key_seconds=2,
    driver_seconds=1,
    poll_seconds=0.2,
    first_pause_seconds=0.05,
    teardown=PATIENCE,
)
DRIVER = """
import sys
from pathlib import Path
from tasks.providers.clouds import provider_named
from tasks.providers.rental import RentalLease
from tasks.providers.readiness.waiting import Limits
from tasks.providers.renting import give_back_run, plan_rental, rent
from tasks.providers.giving_back import Teardown
lease = RentalLease.model_validate_json(sys.argv[1])
folder, provider = Path(sys.argv[2]) / lease.run, provider_named(lease.request.provider)
limits = Limits(ready_seconds=30, poll_seconds=0.2, teardown=Teardown(settle_seconds=1))
rent(provider, lease, plan_rental(provider, lease.request, None), folder, print, limits)
give_back_run(provider, lease, folder, print, limits.teardown)
"""


class Renter:
    """One user: a folder of rentals and what was printed. usual: fields of every request."""

    def __init__(self, cloud: Any, folder: Path, provider: Provider, usual: dict[str, Any]) -> None:
        self.cloud, self.rented, self.printed = cloud, folder, list[str]()
        self.provider = provider
        self._usual = {"nodes": 2, "ssh_from": "203.0.113.7/32", "provider": provider.name} | usual

    def lease(self, run: str, hours: float = 0.25, **wanted: Any) -> RentalLease:
        """What is wanted for one run."""
        request = RentalRequest.model_validate(self._usual | wanted)
        return RentalLease(
            study="faults", run=run, owner="tester", expires_at=int(time.time() + 3600 * hours), request=request
        )

    def switched_off(self, lease: RentalLease) -> None:
        """Let the lease run out in seconds, and wait until it has and the nodes have powered themselves off.

        They count uptime in whole seconds, so they may do so shortly before.
        """
        expires_at = int(time.time()) + 4
        extend_run(self.provider, lease, self.rented / lease.run, expires_at)
        deadline = time.monotonic() + patient(30)
        while self.cloud.hosts.running() or time.time() <= expires_at:
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def rent(self, lease: RentalLease, limits: Limits = LIMITS, cap: float | None = None) -> list[Node]:
        """Climb the ladder."""
        offer = plan_rental(self.provider, lease.request, cap)
        return rent(self.provider, lease, offer, self.rented / lease.run, self.printed.append, limits)

    def down(self, lease: RentalLease) -> int:
        """Give everything of a run back."""
        return give_back_run(self.provider, lease, self.rented / lease.run, self.printed.append, PATIENCE)

    def reap(self, everything: bool = False, dry_run: bool = False) -> ReapResult:
        """Sweep the account."""
        return remove_expired([self.provider], self.rented, everything, dry_run, self.printed.append, PATIENCE)

    def suffer(self, *faults: Fault) -> None:
        """Let these happen."""
        self.cloud.faults += faults

    def killed(self, stage: str, fault: Fault, machine: dict[str, Any]) -> RentalLease:
        """Rent in another process that is killed when its first call of this kind arrives."""
        lease = self.lease(re.sub(r"\W", "-", f"kill-{stage}").lower()[:60])
        if machine:
            self.cloud.hosts.faults += [machine]
        command = [sys.executable, "-c", DRIVER, lease.model_dump_json(), str(self.rented)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.suffer(replace(fault, times=1, hook=lambda: os.kill(process.pid, signal.SIGKILL)))
        assert process.wait(600) == -signal.SIGKILL
        return lease
