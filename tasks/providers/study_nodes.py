"""Nodes that one target of a study rents: up before measuring, extended while the run lives, given back after it.

    nodes = StudyNodes(target, study="demo", run=run_folder, rented=folder, say=print, check=watcher.check)
    hosts = nodes.up(agreed=False)      # an SshTarget; nodes of a run that was killed are used again where they live
    nodes.give_back()                   # LeftBehind names what could not be removed

The rental is named after run folder and target, so a run that goes on finds what the one before it rented.
"""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.common.dollars import dollars
from configs.common.files.reading import read_text
from configs.common.printable import plural
from configs.common.secrets import redacted
from configs.hardware.prices import Offer, listed_offers
from configs.plans.rentals import RentalAttempt, StudyRental
from configs.targets.rented import RentedTarget
from configs.targets.resources import ClusterTarget
from configs.targets.ssh_host import SshHost
from configs.targets.target import SshTarget
from tasks.providers.attempts import attempts_of
from tasks.providers.callers_address import callers_address, check_source
from tasks.providers.clouds import BILLED_WHEN_OFF, provider_named
from tasks.providers.connections import probe
from tasks.providers.giving_back import LeftBehind, Say, Teardown
from tasks.providers.labels import label, owner
from tasks.providers.ladder import RentalOffer
from tasks.providers.leases import (
    in_use,
    last_used,
    mark_used,
    note_abandoned,
    open_ledger,
    read_entries,
    read_lease,
)
from tasks.providers.readiness.node_gpus import gpus_of_instance, lacking_gpus
from tasks.providers.readiness.waiting import Limits
from tasks.providers.rental import Node, Provider, ProviderError, RentalLease, RentalRequest, node_address
from tasks.providers.renting import (
    ROUNDING,
    RentalFailed,
    extend_run,
    give_back_run,
    nodes_of,
    plan_rental,
    provider_of,
    rent,
)

_LOST_AFTER_SECONDS = 120.0
"""A rented node that cannot be reached for so long was taken back: its money is not waited for."""
_AGAIN_SECONDS = 60.0
_LOOK_SECONDS = 0.5
_EXTENDING_SECONDS = 300.0
"""As long as extending a lease takes at most: all nodes, some of which may not answer, and their tags."""
_MARK_SECONDS = 2.0
"""How often a run notes that it lives: so exactly is known for how long nodes of a killed run were unused."""


def request_of(target: RentedTarget) -> RentalRequest:
    """Return what a target asks a cloud for. Raises ValueError where this machine's address is not known."""
    names = ("public_address: false", f"target {target.name}: ssh_from")
    check_source(target.kind, target.public_address, target.ssh_from, names)
    return RentalRequest(
        provider=target.kind,
        instance=target.instance,
        nodes=target.nodes,
        regions=tuple(target.regions),
        zones=tuple(target.zones),
        cheapest_first=target.cheapest_first,
        market=target.market,
        fall_back=target.fall_back,
        image=target.image,
        disk_gb=target.disk_gb,
        placement=target.placement,
        public_address=target.public_address,
        ssh_from=target.ssh_from or callers_address(names[1]),
        user=target.user,
        network=target.network,
        subnet=target.subnet,
        profile=target.profile,
        gpus_per_node=_gpus_of(target),
        hours=target.lease_hours,
    )


def _gpus_of(target: RentedTarget) -> int:
    """Return how many GPUs each node must show: all that are paid for, unless its cores are to compute."""
    if target.device == "cpu":
        return 0
    return max(target.gpus_per_node or 0, gpus_of_instance(target.kind, target.instance))


def offer_of(target: RentedTarget, listed: Sequence[Offer] | None = None) -> RentalOffer:
    """Return what will be asked for, in order, with prices; creates nothing. Raises ValueError, ProviderError.

    listed: known prices, as in `plan_rental`.
    """
    return plan_rental(provider_named(target.kind), request_of(target), target.max_usd_per_hour, listed)


def rental_name(study: str, run: Path, target: str) -> str:
    """Return the name of a rental: the same for every run in this folder of this machine, through links too."""
    place = f"{socket.gethostname()}\n{os.path.realpath(run)}\n{target}"
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:8]
    parts = [label(study)[:24], digest]
    with suppress(ValueError):  # a target's name may have no letter that clouds take in a tag
        parts.insert(1, label(target)[:12])
    return "-".join(parts).replace("--", "-")


class StudyNodes:
    """The rental of one target. A plain class: Prefect would walk through a dataclass.

    Args:
        run: the run folder.
        rented: folder of all rentals of this user.
        check: called while waiting; raises where the run was cancelled.
        cache: the user's cache folder, whose refreshed prices count before the shipped ones; None: these alone.
    """

    def __init__(
        self,
        target: RentedTarget,
        study: str,
        run: Path,
        rented: Path,
        say: Say,
        check: Callable[[], None],
        cache: Path | None = None,
    ) -> None:
        self.target, self._study = target, study
        self.name = rental_name(study, run, target.name)
        self._folder = rented / self.name
        self._say, self._check, self._cache = say, check, cache
        self._provider: Provider = provider_named(target.kind)
        self._held = ExitStack()
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None
        self._left: tuple[str, ...] = ()

    def up(self, agreed: bool) -> SshTarget:
        """Rent, or take over what an earlier run of this folder left up; returns the nodes as hosts.

        agreed: a person has seen the price. Raises RentalFailed, LeftBehind, ValueError; then nothing is up.
        """
        if not agreed and self.target.max_usd_per_hour is None:
            raise ValueError(
                f"target {self.target.name}: max_usd_per_hour is missing, and nobody has agreed to the price. Set it, "
                "or use `rankwise run`, which asks"
            )
        self._held.enter_context(in_use(self._folder))
        used = last_used(self._folder)
        mark_used(self._folder)
        try:
            nodes = self._taken_over(used) or self._rented()
        except BaseException as error:
            self._held.close()
            if isinstance(error, RentalFailed):
                raise RentalFailed(f"target {self.target.name}: {error}") from error
            raise
        self._keeper = threading.Thread(target=self._keep, name=f"lease of {self.name}", daemon=True)
        self._keeper.start()
        return hosts_of_nodes(self.target, nodes, self._folder, self._provider.default_user)

    def give_back(self) -> None:
        """Remove everything of this rental; one that was never begun, or is given back, is no error.

        Raises LeftBehind; `reap` removes the rest once the provider answers.
        """
        self._end_extending()
        try:
            if (self._folder / "lease.json").exists() and not self._is_over():
                self._end_rental(read_lease(self._folder))
            self._left = ()
        except LeftBehind as error:
            self._left = tuple(error.left) or ("unknown: the provider could not be asked",)
            raise
        finally:
            self._held.close()

    def keep(self) -> bool:
        """Leave the nodes up for `keep` of the target, for the next run of this folder; they expire by themselves.

        False: the target has no `keep`. Raises ProviderError, ValueError: then they are to be given back.
        """
        if self.target.keep is None:
            return False
        self._end_extending()
        until = int(time.time() + self.target.keep)
        extend_run(self._provider, read_lease(self._folder), self._folder, until, "kept")
        self._held.close()
        price, one = self._usd_per_hour(), self.target.nodes == 1
        cost = "at an unknown price" if price is None else f"{dollars(price * self.target.keep / 3600)} USD"
        if self.target.kind in BILLED_WHEN_OFF:
            cost = cost if price is None else f"for {cost}"
            cost += " and is billed until it is given back" if one else " and are billed until they are given back"
        elif price is not None:  # a listed spot price is of one day
            cost = f"for {'about' if self._last_attempt().market == 'spot' else 'at most'} {cost}"
        clock = datetime.fromtimestamp(until).astimezone().strftime("%Y-%m-%d %H:%M %Z")
        self._say(
            f"{plural(self.target.nodes, 'node')} {'stays' if one else 'stay'} up until {clock} {cost}: "
            f"`rankwise nodes down {self.name}` ends {'it' if one else 'them'}"
        )
        return True

    def _usd_per_hour(self) -> float | None:
        """Price of all nodes as they were rented last; None: unknown."""
        last = self._last_attempt()
        return None if last.usd_per_hour is None else last.usd_per_hour * self.target.nodes

    def _last_attempt(self) -> RentalAttempt:
        return attempts_of(read_entries(self._folder / "ledger.jsonl"), time.time())[-1]

    def story(self) -> StudyRental:
        """What was asked for over all runs of the folder, and what it cost so far."""
        entries = read_entries(self._folder / "ledger.jsonl")
        return StudyRental(
            target=self.target.name,
            provider=self.target.kind,
            instance=self.target.instance,
            nodes=self.target.nodes,
            name=self.name,
            attempts=attempts_of(entries, time.time(), self.target.kind in BILLED_WHEN_OFF),
            left=self._left,
            up=bool(nodes_of(self._folder)),
            kept_until=_kept_until(entries),
        )

    def _is_over(self) -> bool:
        entries = read_entries(self._folder / "ledger.jsonl")
        return bool(entries) and entries[-1]["event"] == "given_back"

    def _taken_over(self, used: float | None) -> list[Node]:
        """Nodes of a run that was killed: all of them live and answer, or they are given back and none is returned.

        used: when it last used them, in seconds since 1970.
        """
        nodes = nodes_of(self._folder)
        if not nodes:
            return []
        lease = read_lease(self._folder)
        if self._is_wanted(lease) and self._all_answer(lease, nodes) and self._are_extended(lease, used):
            self._say(f"nodes of an earlier run are used again: {', '.join(node.id for node in nodes)}")
            return nodes
        self._say("nodes of an earlier run are gone, or others are wanted now: giving back what is left")
        with open_ledger(self._folder) as ledger:
            note_abandoned(ledger, used)
        self._end_rental(lease)
        return []

    def _is_wanted(self, lease: RentalLease) -> bool:
        """Whether the target asks for these nodes still, within its cap."""
        apart = {"hours", "ssh_from", "gpus_per_node"}  # these are asked of the nodes themselves
        if lease.request.model_dump(exclude=apart) != request_of(self.target).model_dump(exclude=apart):
            return False
        cap, price = self.target.max_usd_per_hour, self._usd_per_hour()
        return cap is None or (price is not None and price <= cap * (1 + ROUNDING))

    def _are_extended(self, lease: RentalLease, used: float | None) -> bool:
        """Extend the nodes of an earlier run; False: they cannot be, such as beyond the end that Google has set.

        Or one does not take the new end, and would power itself off before the others.
        """
        unused = 0.0 if used is None else max(0.0, time.time() - used)
        try:
            extend_run(self._provider, lease, self._folder, self._next_end(), unused_seconds=unused)
        except (ProviderError, ValueError) as error:
            self._say(f"nodes of an earlier run were not extended: {redacted(str(error))}")
            return False
        return True

    def _end_rental(self, lease: RentalLease) -> None:
        """Give back what a lease is for, by its own cloud: the target may name another one by now."""
        give_back_run(provider_of(lease, self._provider), lease, self._folder, self._say, Teardown())

    def _all_answer(self, lease: RentalLease, nodes: list[Node]) -> bool:
        user = lease.request.user or self._provider.default_user
        try:
            found = {node.id: node.state for node in self._provider.nodes(lease.run, nodes[0].region)}
        except ProviderError as error:
            raise RentalFailed(redacted(str(error))) from error
        addresses = [node_address(node, lease.request) for node in nodes]
        running = all(found.get(node.id) == "running" for node in nodes)
        if not running or any(probe(self._folder, user, address) != "ready" for address in addresses):
            return False
        lacking = lacking_gpus(self._folder, user, addresses, lease.request, _gpus_of(self.target))
        for address, why in lacking.items():
            self._say(f"{nodes[addresses.index(address)].id} ({address}) {why}")
        return not lacking

    def _rented(self) -> list[Node]:
        request = request_of(self.target)
        listed = None if self._cache is None else listed_offers(self._cache)
        offer = plan_rental(self._provider, request, self.target.max_usd_per_hour, listed)
        for line in offer.refused:
            self._say(f"left out: {line}")
        lease = RentalLease(
            study=label(self._study), run=self.name, owner=owner(), expires_at=self._next_end(), request=request
        )
        limits = Limits(ready_seconds=60 * self.target.wait_minutes, sleep=self._sleep)
        return rent(self._provider, lease, offer, self._folder, self._say, limits)

    def _next_end(self) -> int:
        return int(time.time() + 3600 * self.target.lease_hours)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._check()
            time.sleep(min(_LOOK_SECONDS, left))

    def _end_extending(self) -> None:
        """Extend the lease no more, and wait for an extension that is under way: it holds the ledger."""
        self._ended.set()
        if self._keeper is not None:
            self._keeper.join(_EXTENDING_SECONDS)

    def _first_pause(self, pause: float) -> float:
        """Until half of the lease is left: renting took a part of it, perhaps a long one where capacity was scarce."""
        with suppress(OSError, ValueError):
            return min(pause, read_lease(self._folder).expires_at - time.time() - pause)
        return pause

    def _keep(self) -> None:
        """Note that the run lives, and extend the lease whenever half of it is over, until the run ends."""
        pause = 1800 * self.target.lease_hours
        due = _asleep_too() + self._first_pause(pause)
        while not self._ended.wait(min(_MARK_SECONDS, pause)):
            with suppress(OSError):  # a folder away for a moment must not end the extending
                mark_used(self._folder)
            if _asleep_too() < due:
                continue
            due = _asleep_too() + pause
            try:
                lease = read_lease(self._folder)  # whose end a person may have moved to a later one
                extend_run(self._provider, lease, self._folder, max(self._next_end(), lease.expires_at))
            except (ProviderError, ValueError, OSError) as error:
                self._say(f"the lease was not extended: {redacted(str(error))}; trying again")
                due = _asleep_too() + min(pause, _AGAIN_SECONDS)


def _asleep_too() -> float:
    """Seconds by a clock that nobody sets and that goes on while this machine is suspended, as the nodes' leases do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def hosts_of_nodes(target: RentedTarget, nodes: list[Node], folder: Path, default_user: str) -> SshTarget:
    """Return rented nodes as the hosts that they are. folder: of the rental, with its lease and keys."""
    lease, kind = read_lease(folder), "ssh"
    key = " ".join(read_text(folder / "host_ed25519.pub").split()[:2])
    hosts = [
        SshHost(
            host=node_address(node, lease.request),
            name=node.id.rpartition("/")[2],  # Azure's has its resource group before it
            user=lease.request.user or default_user,
            key=str(folder / "id_ed25519"),
            host_key=key,
            address=node.private_address,
        )
        for node in nodes
    ]
    shared = {name: getattr(target, name) for name in ClusterTarget.model_fields}
    return SshTarget.model_validate(shared | {"kind": kind, "hosts": hosts, "lost_after_seconds": _LOST_AFTER_SECONDS})


def _kept_until(entries: list[dict[str, Any]]) -> str | None:
    """When nodes that a run kept will end, in UTC; None: they are not kept."""
    if not entries or entries[-1]["event"] != "kept":
        return None
    return datetime.fromtimestamp(entries[-1]["expires_at"], UTC).isoformat(timespec="minutes")
