"""Renting nodes: prices, the capacity ladder, and nodes that answer over SSH. All of them or none.

    offer = plan_rental(provider, request, max_usd_per_hour=10)     # rungs with prices; creates nothing
    nodes = rent(provider, lease, offer, folder, say, limits)       # RentalFailed: nothing is left, or what is

Whatever ends `rent` (an error, Ctrl-C, SIGTERM), everything that it made is given back first.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.common.base import write_atomically
from configs.common.printable import plural
from configs.common.secrets import redacted
from configs.hardware.prices import Offer
from tasks.providers.boot import make_keys, remove_keys, user_data
from tasks.providers.clouds import provider_named
from tasks.providers.connections import prolong
from tasks.providers.giving_back import Say, Teardown, found_before, give_back, regions_of
from tasks.providers.ladder import RentalOffer, is_excluded, ladder, node_price, spot_source
from tasks.providers.leases import (
    RentalLedger,
    is_over,
    open_ledger,
    read_entries,
    read_lease,
    token_of,
    unsettled_seconds,
)
from tasks.providers.readiness.node_gpus import has_amd_gpus
from tasks.providers.readiness.waiting import PROBES_AT_ONCE, Limits, NodeWaiting
from tasks.providers.rental import (
    MAX_HOURS,
    Node,
    Problem,
    Provider,
    ProviderError,
    RentalLease,
    RentalRequest,
    Rung,
    node_address,
)

ROUNDING = 1e-9
"""A price times a number of nodes may miss the product by its last bit: 3 x 0.1 is above 0.3."""


class RentalFailed(ValueError):
    """No nodes: what was tried and why each attempt ended. Nothing is left."""


def plan_rental(
    provider: Provider,
    request: RentalRequest,
    max_usd_per_hour: float | None,
    listed: Sequence[Offer] | None = None,
) -> RentalOffer:
    """Return the rungs within the cap, which is for all nodes together. Raises RentalFailed: there is none.

    A region that cannot be asked for its zones keeps its rung without a zone. listed: known prices, those first that
    count; None: the shipped ones.
    """
    if max_usd_per_hour is not None and not 0 < max_usd_per_hour < math.inf:
        raise ValueError(f"max_usd_per_hour: got {max_usd_per_hour}, expected a number above 0")
    if request.image is None and request.has_gpu is None:
        raise RentalFailed(
            f"{request.provider}/{request.instance}: not in the catalog, which would tell the vendor's image for it. "
            "Name one by `image`"
        )
    if request.image is None and request.gpus_per_node and has_amd_gpus(request):
        raise RentalFailed(
            f"{request.provider}/{request.instance}: the vendor's image has no driver for its AMD GPUs. Name one that "
            "has by `image`"
        )
    zones: dict[str, Sequence[str]] = {}
    refused: list[str] = []
    beyond: dict[tuple[str, str, str], int] = {}
    for region in request.regions:
        try:
            zones[region] = provider.zones(request.instance, region)
        except ProviderError as error:
            if error.problem in ("auth", "invalid"):
                raise RentalFailed(redacted(str(error))) from error
            refused.append(f"{region}: zones unknown: {redacted(str(error))}")
            continue
        if request.zones and not set(request.zones) & set(zones[region]):
            named, offered = ", ".join(request.zones), ", ".join(zones[region]) or "none of its zones"
            refused.append(f"{region}: not asked, as the instance is not offered in {named} there, but in {offered}")
    rungs = []
    for rung in ladder(request, zones, listed):
        price = None if rung.usd_per_hour is None else rung.usd_per_hour * request.nodes
        if max_usd_per_hour is not None and price is None:
            reason = f"price unknown, so the cap of {max_usd_per_hour:g} USD/h cannot be checked"
            _count(beyond, rung, reason)
        elif max_usd_per_hour is not None and price is not None and price > max_usd_per_hour * (1 + ROUNDING):
            told = f"{price:.2f}" if round(price, 2) > max_usd_per_hour else f"{price:.9g}"
            _count(beyond, rung, f"{told} USD/h exceeds the cap of {max_usd_per_hour:.9g} USD/h")
        else:
            rungs.append(rung)
    refused += [
        f"{region}, {market.replace('_', ' ')}, {count} place{'s' if count > 1 else ''}: {reason}"
        for (region, market, reason), count in beyond.items()
    ]
    if not rungs:
        raise RentalFailed("\n".join([f"{request.provider}/{request.instance}: nothing can be rented", *refused]))
    on_demand = {region: node_price(request, region, "on_demand", listed) for region in request.regions}
    return RentalOffer(rungs, refused, on_demand, spot_source(request, rungs[0], listed))


def _count(beyond: dict[tuple[str, str, str], int], rung: Rung, reason: str) -> None:
    key = (rung.region, rung.market, reason)
    beyond[key] = beyond.get(key, 0) + 1


def rent(
    provider: Provider, lease: RentalLease, offer: RentalOffer, folder: Path, say: Say, limits: Limits
) -> list[Node]:
    """Rent all nodes and wait until each answers over SSH. Raises RentalFailed, LeftBehind, ValueError."""
    with open_ledger(folder) as ledger:
        if ledger.entries and ledger.entries[-1]["event"] in ("ready", "extended", "kept") and not is_over(ledger):
            raise ValueError(f"{lease.run}: its nodes are up already")
        attempt = 1 + sum(entry["event"] == "opened" for entry in ledger.entries)
        if ledger.entries and ledger.entries[-1]["event"] != "given_back":
            before = _earlier_provider(provider, folder)
            if earlier := regions_of(ledger, before.name):
                say("giving back what an earlier attempt of this run made, which has ended")
                give_back(before, lease.run, earlier, ledger, say, limits.teardown)
        regions = list(dict.fromkeys(rung.region for rung in offer.rungs))
        if attempt == 1 and (others := found_before(provider, regions, lease.run)):
            raise RentalFailed(
                f"{lease.run}: {others[0].owner or 'somebody'} has rented under this name, from another machine or "
                "data folder, and giving back would end both. Use another name, or wait until that is given back"
            )
        write_atomically(folder / "lease.json", lease.model_dump_json(indent=1), mode=0o600)
        make_keys(folder)
        ledger.write("opened", attempt=attempt, expires_at=lease.expires_at)
        try:
            nodes = _Renting(provider, lease, folder, ledger, say, limits, attempt).climb(offer.rungs)
            ledger.write("ready", nodes=[node.model_dump() for node in nodes])
        except BaseException as error:
            ledger.note("failed", problem=redacted(str(error)) or type(error).__name__)
            give_back(provider, lease.run, regions_of(ledger, provider.name), ledger, say, limits.teardown)
            remove_keys(folder)
            if isinstance(error, ProviderError):
                raise RentalFailed(redacted(str(error))) from error
            raise
        return nodes


def provider_of(lease: RentalLease, provider: Provider) -> Provider:
    """Return the cloud of a rental: this one, or the one that an earlier run of the same name has asked."""
    cloud = lease.request.provider
    return provider if cloud == provider.name else provider_named(cloud)


def _earlier_provider(provider: Provider, folder: Path) -> Provider:
    try:
        lease = read_lease(folder)
    except (FileNotFoundError, ValueError):
        return provider
    return provider_of(lease, provider)


@dataclass
class _Renting:
    """One climb of the ladder."""

    provider: Provider
    lease: RentalLease
    folder: Path
    ledger: RentalLedger
    say: Say
    limits: Limits
    attempt: int

    def __post_init__(self) -> None:
        self._waiting = NodeWaiting(self.provider, self.lease, self.folder, self.say, self.limits)

    def climb(self, rungs: list[Rung]) -> list[Node]:
        """Ask rung after rung. Raises RentalFailed when none is left, ProviderError that no other rung can mend."""
        up = 2 * self.limits.ready_seconds  # nodes that are ready at the last moment still live to be extended
        lives = max(60, self.lease.expires_at - int(time.time()))
        tried: list[str] = []
        left = list(rungs)
        while left:
            rung = left[0]
            # What earlier places took is off the lease; a study extends its nodes once they are up.
            lives = max(self.lease.expires_at - int(time.time()), int(min(lives, up)))
            try:
                made = self._one_rung(rung, user_data(self.folder, lives))
                nodes = self._waiting.until_ready(rung, made)
                self._remove_others(rung, nodes)
                return nodes
            except ProviderError as error:
                self._log_refusal(rung, error, tried)
                if error.problem in ("auth", "invalid", "unreachable", "hardware"):
                    raise RentalFailed("\n".join(tried)) from error
                refused = error
            # A spot node that was reclaimed while it booted: the rest of the gang goes back at once.
            if any(entry["event"] == "created" and entry.get("region") == rung.region for entry in self.ledger.entries):
                give_back(self.provider, self.lease.run, [rung.region], self.ledger, self.say, self.limits.teardown)
            left = [other for other in left[1:] if not is_excluded(other, refused.problem, rung)]
        raise RentalFailed("\n".join([f"no capacity for {plural(self.lease.request.nodes, 'node')}:", *tried]))

    def _log_refusal(self, rung: Rung, error: ProviderError, tried: list[str]) -> None:
        line = f"{rung.words}: {error.problem}: {redacted(str(error))}"
        tried.append(line)
        self.ledger.write("no_nodes", problem=f"{error.problem}: {redacted(str(error))}")
        self.say(line)

    def _one_rung(self, rung: Rung, boot: str) -> list[Node]:
        """Make network rules, then all nodes, with retries of what can pass; the token stays the same."""
        price = "price unknown" if rung.usd_per_hour is None else f"{rung.usd_per_hour:.4g} USD/h a node"
        self.say(f"asking for {self.lease.request.nodes} x {self.lease.request.instance} in {rung.words}, {price}")
        self.ledger.write("prepare", provider=self.provider.name, region=rung.region)
        self._waiting.with_retries(lambda: self.provider.prepare(self.lease, rung.region))
        token = token_of(self.lease, self.attempt, rung)
        self.ledger.write("create", provider=self.provider.name, token=token, **rung.model_dump())
        nodes = self._created(boot, rung, token)
        self.ledger.write("created", token=token, region=rung.region, ids=[node.id for node in nodes])
        return nodes

    def _created(self, boot: str, rung: Rung, token: str) -> list[Node]:
        """All nodes of a create call, whose every try is on disk before it: each may take effect without an answer."""
        problems: list[Problem] = []

        def create() -> list[Node]:
            if problems:
                self.ledger.write("create_again", token=token)
            try:
                return self.provider.create(self.lease, boot, rung, token)
            except ProviderError as error:
                problems.append(error.problem)
                raise

        try:
            return self._waiting.with_retries(create)
        except ProviderError as error:
            # After a transient error a call may have taken effect, whatever a later one was told.
            if "transient" not in problems:
                self.ledger.write("refused", token=token, problem=error.problem, code=error.code)
            raise

    def _remove_others(self, rung: Rung, nodes: list[Node]) -> None:
        """Remove nodes of lost answers, and network rules where the ladder began. `down` tries again what fails."""
        settle = self.limits.teardown.settle_seconds
        wait = min(unsettled_seconds(self.ledger.entries, time.time(), settle), settle)
        if wait > 0:
            self.say(f"waiting {wait:.0f} s for what a call without an answer may have made, to remove it")
            self.limits.sleep(wait)
        ids = {node.id for node in nodes}
        for region in regions_of(self.ledger, self.provider.name):
            try:
                for resource in self.provider.tagged([region], self.lease.run):
                    if region != rung.region or (resource.kind == "instance" and resource.id not in ids):
                        self.provider.delete(resource)
            except ProviderError as error:
                self.say(f"{region}: {redacted(str(error))}; removed with the rest later")


def give_back_run(provider: Provider, lease: RentalLease, folder: Path, say: Say, patience: Teardown) -> int:
    """Remove everything of a run and its keys; returns how many resources there were. Raises LeftBehind."""
    with open_ledger(folder) as ledger:
        regions = regions_of(ledger, provider.name) or list(lease.request.regions)
        removed = give_back(provider, lease.run, regions, ledger, say, patience)
    remove_keys(folder)
    return len(removed)


def nodes_of(folder: Path) -> list[Node]:
    """Return the nodes of a run as they were when it became ready; none: it is not up."""
    entries = [entry for entry in read_entries(folder / "ledger.jsonl") if entry["event"] in ("ready", "giving_back")]
    if not entries or entries[-1]["event"] != "ready":
        return []
    return [Node.model_validate(node) for node in entries[-1]["nodes"]]


def extend_run(
    provider: Provider,
    lease: RentalLease,
    folder: Path,
    expires_at: int,
    event: Literal["extended", "kept"] = "extended",
    unused_seconds: float = 0.0,
) -> int:
    """Move the end of a rental on the nodes, then in the tags.

    Raises ValueError naming a node that did not take it, after all the others have: it must not end them. ProviderError
    where the tags keep the old end: the nodes have the new one nevertheless, and the ledger says so.
    event: what the ledger calls it; `kept` nodes are in nobody's use until then, and `reap` leaves them alone.
    unused_seconds: how long no run had used the nodes when this one took them over.
    """
    left = expires_at - time.time()
    if not 0 < left <= 3600 * MAX_HOURS:
        raise ValueError(f"hours: got {left / 3600:.3g}, expected more than 0 and at most {MAX_HOURS:g}")
    with open_ledger(folder) as ledger:
        user = lease.request.user or provider.default_user
        nodes = nodes_of(folder)
        if not nodes:
            raise ValueError(f"{lease.run}: its nodes are not up")

        def took(node: Node) -> bool:
            return prolong(folder, user, node_address(node, lease.request), expires_at - int(time.time()))

        # Side by side, as each that does not answer takes its time: giving back waits for this, and not for ever.
        with ThreadPoolExecutor(min(len(nodes), PROBES_AT_ONCE)) as pool:
            missed = [node.id for node, done in zip(nodes, pool.map(took, nodes), strict=True) if not done]
        if len(missed) == len(nodes):
            raise ValueError(f"{lease.run}: {', '.join(missed)} did not take the new end")
        try:
            for resource in provider.tagged(regions_of(ledger, provider.name), lease.run):
                provider.extend(resource, expires_at)
        except ProviderError as error:
            if error.problem != "invalid":  # that of a cloud which ends them earlier by itself
                ledger.write(event, expires_at=expires_at, unused_seconds=unused_seconds)
            raise
        ledger.write(event, expires_at=expires_at, unused_seconds=unused_seconds)
    later = lease.model_copy(update={"expires_at": expires_at})
    write_atomically(folder / "lease.json", later.model_dump_json(indent=1), mode=0o600)
    if missed:
        raise ValueError(f"{lease.run}: {', '.join(missed)} did not take the new end")
    return expires_at
