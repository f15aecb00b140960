"""Removing everything of a run, and finding what earlier runs left: by the tags in the cloud, not by the ledger alone.

give_back(provider, run, regions, ledger, say, patience)    # LeftBehind names exactly what could not be removed
# All regions, all kinds: expired, or of a run that has died.
remove_expired([provider], rented, everything=False, dry_run=False, say=say, patience=patience)
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from configs.common.files.reading import reason_of
from configs.common.printable import duration_text
from configs.common.secrets import redacted
from tasks.providers.leases import (
    SETTLED_SECONDS,
    RentalLedger,
    is_dead,
    known_end,
    last_used,
    note_abandoned,
    open_ledger,
    read_lease,
    unsettled_seconds,
)
from tasks.providers.rental import DELETION_ORDER, Provider, ProviderError, Resource

Say = Callable[[str], None]
GIVE_BACK_SECONDS = 900.0
"""A GPU instance can need minutes to shut down; its security group can be deleted only after that."""
_RUN = re.compile(r"[a-z0-9][a-z0-9-]*")
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.5, 15.0
_REGIONS_AT_ONCE = 8
_REFUSALS = 3
"""Credentials that were refused this often in a row do not come back by waiting."""


class LeftBehind(Exception):
    """Resources that may go on costing money, each named, with the last errors. removed: those that are gone."""

    def __init__(
        self, run: str, left: Sequence[str], problems: Sequence[str], removed: Sequence[Resource] = ()
    ) -> None:
        self.run, self.left, self.problems, self.removed = run, list(left), list(problems), list(removed)
        named = [f"  {words}" for words in left] or ["  unknown: the provider could not be asked"]
        lines = [f"NOT given back of run {run}:", *named, *problems]
        super().__init__("\n".join([*lines, "Run `rankwise reap` once the provider answers."]))


@dataclass
class Teardown:
    """How patient a teardown is."""

    limit_seconds: float = GIVE_BACK_SECONDS
    settle_seconds: float = SETTLED_SECONDS
    sleep: Callable[[float], None] = time.sleep


def give_back(
    provider: Provider, run: str, regions: Sequence[str], ledger: RentalLedger, say: Say, patience: Teardown
) -> list[Resource]:
    """Remove everything that bears the run's tag in these regions; returns what was removed.

    A create call without an answer may still take effect, and machines that were made just now may be listed late, so
    the search goes on until both are settled. Raises LeftBehind after the time limit.
    """
    # By the monotonic clock from here on: the other may be set, and a line of the ledger lie in its future.
    made = _made_lately(ledger, regions, patience.settle_seconds)
    wait = unsettled_seconds(ledger.entries, time.time(), patience.settle_seconds)
    settled_at = time.monotonic() + min(wait, patience.settle_seconds)
    ledger.note("giving_back", regions=list(regions))
    deadline = time.monotonic() + patience.limit_seconds
    removed: dict[str, Resource] = {}
    pause = _FIRST_PAUSE_SECONDS
    refusals = 0
    while True:
        left, problems, hopeless, unasked = _remove_once(provider, run, regions, removed)
        refusals = refusals + 1 if hopeless else 0
        listed = {resource.id for resource in removed.values()}
        unlisted = [until for id, until in made.items() if id not in listed]
        open_seconds = max([settled_at, *unlisted]) - time.monotonic()
        if not left and not problems and open_seconds <= 0:
            ledger.note("given_back", removed=sorted(removed))
            return list(removed.values())
        if time.monotonic() > deadline or refusals >= _REFUSALS:
            named = [resource.words for resource in left] + _made_and_not_given_back(provider, ledger, unasked)
            ledger.note("left", resources=named, problems=problems)
            gone = [resource for words, resource in removed.items() if words not in named]
            raise LeftBehind(run, named, problems, gone)
        for problem in problems:
            say(f"giving back: {problem}; trying again")
        patience.sleep(pause if left or problems else min(pause, open_seconds))
        pause = min(2 * pause, _LAST_PAUSE_SECONDS)


def _remove_once(
    provider: Provider, run: str, regions: Sequence[str], removed: dict[str, Resource]
) -> tuple[list[Resource], list[str], bool, list[str]]:
    """Ask once for the end of what can end now.

    Returns what is left, what went wrong, whether that is hopeless, and the regions that did not answer.
    """
    left: list[Resource] = []
    problems: list[str] = []
    unasked: list[str] = []
    hopeless = False
    for region in regions:  # one that does not answer must not keep the others
        try:
            left += provider.tagged([region], run)
        except ProviderError as error:
            hopeless = hopeless or error.problem == "auth"
            unasked.append(region)
            problems.append(f"{provider.name} {region}: {redacted(str(error))}")
    machines = [resource for resource in left if resource.kind == "instance"]
    # The rest is in use until the machines are really gone.
    for resource in machines or sorted(left, key=lambda resource: DELETION_ORDER.index(resource.kind)):
        removed[resource.words] = resource
        try:
            provider.delete(resource)
        except ProviderError as error:
            hopeless = hopeless or error.problem == "auth"
            problems.append(f"{resource.words}: {redacted(str(error))}")
    return left, problems, hopeless, unasked


def _made_and_not_given_back(provider: Provider, ledger: RentalLedger, regions: Sequence[str]) -> list[str]:
    """Return the machines that the ledger knows in these regions, which cannot be asked for what is there."""
    named: list[str] = []
    for entry in ledger.entries:
        if entry["event"] == "given_back":
            named = []
        elif entry["event"] == "created" and entry["region"] in regions:
            named += [f"{provider.name} instance {id} in {entry['region']}" for id in entry["ids"]]
    return named


def _made_lately(ledger: RentalLedger, regions: Sequence[str], settle: float) -> dict[str, float]:
    """Return machines that were made in these regions and may not be listed yet; those that were ready were.

    With the moment (monotonic) from which on one that is not listed is gone.
    """
    found: dict[str, float] = {}
    for entry in ledger.entries:
        if entry["event"] in ("ready", "given_back"):
            found = {}
        elif entry["event"] == "created" and entry["region"] in regions:
            left = min(entry["epoch"] + settle - time.time(), settle)
            found |= dict.fromkeys(entry["ids"], time.monotonic() + left)
    return found


def regions_of(ledger: RentalLedger, cloud: str) -> list[str]:
    """Return the regions of a cloud in which the run may have made something; an earlier one may have asked another."""
    named = [
        entry.get("region")
        for entry in ledger.entries
        if entry["event"] in ("prepare", "create") and entry.get("provider", cloud) == cloud
    ]
    return list(dict.fromkeys(region for region in named if isinstance(region, str)))


@dataclass
class ReapResult:
    """What `remove_expired` found: to be removed, kept with the reason, removed, and what it could not do.

    regions: how many of each provider have answered.
    """

    doomed: list[tuple[Resource, str]] = field(default_factory=list)
    kept: list[tuple[Resource, str]] = field(default_factory=list)
    removed: list[Resource] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    regions: dict[str, int] = field(default_factory=dict)


class Search(NamedTuple):
    """What has our tags, what could not be asked, and how many regions of each provider have answered."""

    found: list[Resource]
    problems: list[str]
    regions: dict[str, int]


def find_everything(providers: Iterable[Provider]) -> Search:
    """List all resources with our tags in all regions."""
    found: list[Resource] = []
    problems: list[str] = []
    answered: dict[str, int] = {}

    def ask(provider: Provider, region: str) -> list[Resource] | str:
        try:
            return provider.tagged([region])
        except ProviderError as error:
            return f"{provider.name} {region}: {redacted(str(error))}"

    with ThreadPoolExecutor(_REGIONS_AT_ONCE) as pool:
        for provider in providers:
            try:
                regions = provider.regions()
            except ProviderError as error:
                problems.append(f"{provider.name}: {redacted(str(error))}")
                continue
            answered[provider.name] = 0
            for answer in pool.map(lambda region, provider=provider: ask(provider, region), regions):
                if isinstance(answer, str):
                    problems.append(answer)
                else:
                    found += answer
                    answered[provider.name] += 1
    return Search(found, problems, answered)


def remove_expired(
    providers: Sequence[Provider], rented: Path, everything: bool, dry_run: bool, say: Say, patience: Teardown
) -> ReapResult:
    """Remove what has expired or whose run has died; with `everything` all that bears our tags."""
    found, problems, regions = find_everything(providers)
    sweep = ReapResult(problems=problems, regions=regions)
    unread: dict[str, None] = {}
    for resource in _with_last_ends(found):
        try:
            reason = why_doomed(resource, rented, everything, time.time())
        except (OSError, ValueError) as error:  # of this run's ledger: what others have left is removed nevertheless
            where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
            unread[f"run {resource.run}: whether it has ended is not known: {where}{reason_of(error)}"] = None
            reason = None
        (sweep.kept if reason is None else sweep.doomed).append((resource, reason or _why_kept(resource)))
    sweep.problems += unread
    if dry_run:
        return sweep
    by_name = {provider.name: provider for provider in providers}
    runs = {(resource.provider, resource.run): None for resource, _ in sweep.doomed}
    for name, run in runs:
        mine = [resource for resource, _ in sweep.doomed if (resource.provider, resource.run) == (name, run)]
        regions = list(dict.fromkeys(resource.region for resource in mine))
        try:
            # Giving back others takes minutes, in which a run may have extended these or taken them over.
            there = there_now(by_name[name], regions, run)
            if there and not any(why_doomed(resource, rented, everything, time.time()) for resource in there):
                sweep.doomed = [item for item in sweep.doomed if item[0] not in mine]
                sweep.kept += [(resource, _why_kept(resource)) for resource in there]
                continue
            with ExitStack() as stack:
                ledger = stack.enter_context(open_ledger(rented / run))
                # A region that did not answer, too: "given back" must be true of the whole run.
                regions = list(dict.fromkeys([*regions, *regions_of(ledger, name)]))
                note_abandoned(ledger, last_used(rented / run))
                sweep.removed += give_back(by_name[name], run, regions, ledger, say, patience)
        except (LeftBehind, ValueError, OSError) as error:
            sweep.removed += error.removed if isinstance(error, LeftBehind) else []
            sweep.problems.append(redacted(str(error)))
    return sweep


def found_before(provider: Provider, regions: Sequence[str], run: str) -> list[Resource]:
    """Return what bears a name, in the regions that answer, before something is rented under it.

    Raises ValueError where a permission to list is missing: what is made there could not be found and given back.
    """
    found: list[Resource] = []
    for region in regions:
        try:
            found += provider.tagged([region], run)
        except ProviderError as error:
            if error.problem == "auth":
                why = f"{provider.name} {region}: {redacted(str(error))}"
                raise ValueError(f"{why}\nNothing is rented, because it could not be listed and given back") from error
    return found


def there_now(provider: Provider, regions: Sequence[str], run: str) -> list[Resource]:
    """Return what is left of a run in the regions that answer."""
    found: list[Resource] = []
    for region in regions:
        with suppress(ProviderError):
            found += provider.tagged([region], run)
    return _with_last_ends(found)


def _with_last_ends(found: Sequence[Resource]) -> list[Resource]:
    """Return these with the last end that any resource of their run bears.

    All of a run are removed together, and extending it writes one tag after another: one may still have the old end.
    """
    last: dict[tuple[str, str], int] = {}
    for resource in found:
        key = (resource.provider, resource.run)
        last[key] = max(last.get(key, 0), resource.expires_at or 0)
    return [
        resource
        if resource.expires_at is None
        else resource.model_copy(update={"expires_at": last[resource.provider, resource.run]})
        for resource in found
    ]


def why_doomed(resource: Resource, rented: Path, everything: bool, now: float) -> str | None:
    """Return why a resource is to be removed; None: it is not."""
    if not _RUN.fullmatch(resource.run):
        return None  # a tag of somebody else's: no name of ours, perhaps no folder below `rented`
    folder = rented / resource.run
    ours = folder.is_dir() and _is_of(resource, folder)
    # Tags may keep an old end, where the nodes were told a later one and the cloud did not answer.
    lives = ours and (known_end(folder) or 0.0) > now
    if resource.expires_at is not None and resource.expires_at <= now and not lives:
        return f"expired {duration_text(now - resource.expires_at)} ago"
    if ours and is_dead(folder):
        return "its run has ended"
    return "--all" if everything else None


def _is_of(resource: Resource, folder: Path) -> bool:
    """Whether the rental of this folder may have made it, and not another user's or machine's of the same name."""
    try:
        return resource.owner in ("", read_lease(folder).owner)
    except (OSError, ValueError):
        return True


def _why_kept(resource: Resource) -> str:
    if resource.expires_at is None:
        return "no expiry in its tags; --all removes it"
    return f"expires in {duration_text(max(0.0, resource.expires_at - time.time()))}"
