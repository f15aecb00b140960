"""Take a deployment down: end what runs, give back what is rented, forget the rest.

    cost = take_down(store, "tiny-local", say)                # USD; ValueError, LeftBehind, PlaceError
    remove_everything(store, name, ledger, say, Teardown())   # also of one that was interrupted

What there may be is known by the ledger, in which every step has its line before it is made.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from configs.common.files.reading import parse_model
from configs.common.secrets import redacted
from configs.serving.deployment import Deployment
from configs.targets.target import SshTarget
from tasks.deployment.places import LocalPlace, Place, PlaceAway, PlaceError, SshPlace, stop
from tasks.deployment.slurm_places import SlurmPartition, SlurmPlace, forget_measuring
from tasks.deployment.store import Store
from tasks.providers.attempts import attempts_of
from tasks.providers.clouds import BILLED_WHEN_OFF, provider_named
from tasks.providers.giving_back import LeftBehind, Say, Teardown
from tasks.providers.leases import RentalLedger, open_ledger, read_entries, read_lease
from tasks.providers.rental import ProviderError
from tasks.providers.renting import give_back_run


def take_down(store: Store, name: str, say: Say, patience: Teardown | None = None) -> float | None:
    """Take a deployment down; returns what it cost, None: unknown. Raises ValueError, LeftBehind, PlaceError."""
    folder = store.folder(name)
    if not (folder / "ledger.jsonl").exists():
        store.read(name)  # says which there are
    with open_ledger(folder) as ledger:
        ledger.note("undeploying")
        cost = remove_everything(store, name, ledger, say, patience or Teardown())
        ledger.write("undeployed")
        store.forget(name)  # before another command can take the name
    return cost


def remove_everything(store: Store, name: str, ledger: RentalLedger, say: Say, patience: Teardown) -> float | None:
    """End the front, tunnels and servers, and give rented nodes back. Returns the rental's cost in USD.

    What runs here is found by the folders; on hosts that are not rented by what the ledger says was placed. A host or a
    cloud that does not answer does not keep the rest: it is named at the end. Raises LeftBehind, PlaceError.
    """
    here = LocalPlace(store.folder(name), store.cache)
    folders = [*Path(here.root).glob("tunnels/*"), *Path(here.root).glob("servers/*"), Path(here.root) / "front"]
    problems = _stopped(here, [str(folder) for folder in folders if folder.is_dir()])
    rentals = _rentals(store, name, ledger)
    costs: list[float | None] = []
    left: list[LeftBehind] = []
    for folder in (store.rented / rental for rental in rentals):
        if not (folder / "lease.json").exists():
            continue
        try:
            costs.append(_give_back(folder, say, patience))
        except LeftBehind as error:
            left.append(error)
        except (OSError, ValueError, ProviderError) as error:
            left.append(LeftBehind(folder.name, [], [redacted(str(error))]))
    for entry in ledger.entries:
        if entry["event"] == "slurm":
            problems += _clear_partition(store, name, entry, say)
    if not rentals:
        problems += _clear_hosts(store, name, ledger)
    if left:
        raise _together(left, problems)
    if problems:
        raise PlaceError(None, "; ".join(problems))
    return None if None in costs else sum(cost for cost in costs if cost is not None)


def _stopped(place: Place, folders: Iterable[str]) -> list[str]:
    """End the services of these folders, each whatever comes of the others; returns what went wrong.

    Raises PlaceAway where the place does not answer: it would not for the others.
    """
    problems: list[str] = []
    for folder in folders:
        try:
            stop(place, folder)
        except PlaceAway:
            raise
        except OSError as error:
            problems.append(str(error.strerror or error))
    return problems


def _give_back(folder: Path, say: Say, patience: Teardown) -> float | None:
    """Give a rental's nodes back; returns what they cost in USD, None: they have no price. Raises LeftBehind."""
    lease = read_lease(folder)
    provider, entries = lease.request.provider, read_entries(folder / "ledger.jsonl")
    if not entries or entries[-1]["event"] != "given_back":
        give_back_run(provider_named(provider), lease, folder, say, patience)
    attempts = attempts_of(read_entries(folder / "ledger.jsonl"), time.time(), provider in BILLED_WHEN_OFF)
    costs = [attempt.usd(lease.request.nodes) for attempt in attempts]
    return None if None in costs else sum(cost for cost in costs if cost is not None)


def _together(left: list[LeftBehind], problems: list[str]) -> LeftBehind:
    """Return one error that names what all of these leave, and whatever else went wrong."""
    if len(left) == 1 and not problems:
        return left[0]
    return LeftBehind(
        ", ".join(each.run for each in left),
        [words for each in left for words in each.left],
        [*(problem for each in left for problem in each.problems), *problems],
        [resource for each in left for resource in each.removed],
    )


def _rentals(store: Store, name: str, ledger: RentalLedger) -> list[str]:
    """Return what was rented: by the ledger, and by the deployment's file, should a line be damaged."""
    found = [entry["rental"] for entry in ledger.entries if entry["event"] == "renting"]
    with suppress(ValueError):  # there is no deployment, or its file is damaged
        noted = store.read(name).rental
        found += [noted] if noted is not None and noted not in found else []
    return found


def _clear_partition(store: Store, name: str, entry: dict[str, Any], say: Say) -> list[str]:
    """End the jobs of a deployment in a partition and remove its folders there; returns what went wrong.

    entry: of the ledger, with the partition and the deployment's folder there.
    """
    partition = parse_model(entry["partition"].encode(), SlurmPartition, name)
    try:
        for measuring in store.measuring_folders(name):
            forget_measuring(partition, measuring)
        place = SlurmPlace(partition, entry["folder"], 0.0, say)
        problems = _stopped(place, [str(folder) for folder in Path(place.root).glob("servers/*")])
        if not problems:  # the folders are how what still runs is found
            place.ask("remove", paths=[place.root])
    except (OSError, ValueError) as error:
        return [getattr(error, "strerror", None) or str(error)]
    return problems


def _clear_hosts(store: Store, name: str, ledger: RentalLedger) -> list[str]:
    """End servers on hosts that are not rented, and remove their folders; returns what went wrong.

    Also those of a deployment or a rollout that was killed before it was noted: their numbers are in the ledger.
    """
    deployment = None
    with suppress(ValueError):  # there is none, or its file is damaged
        deployment = store.read(name)
    named = [(entry["hosts"], entry.get("folder")) for entry in ledger.entries if entry["event"] == "hosts"]
    noted = (None, None) if deployment is None else (deployment.hosts, deployment.hosts_folder)
    written, folder = named[-1] if deployment is None and named else noted
    numbers = _placed_numbers(ledger, deployment)
    if written is None or not numbers:
        return []
    target, problems = parse_model(written.encode(), SshTarget, name), []
    for node in range(len(target.hosts)):
        try:
            place = SshPlace(target, node, folder or f"deployments/{name}")
            found = _stopped(place, [f"{place.root}/servers/{number}" for number in numbers])
            problems += found
            if not found:
                place.ask("remove", paths=[place.root])
        except OSError as error:
            problems.append(str(error.strerror or error))
    return problems


def _placed_numbers(ledger: RentalLedger, deployment: Deployment | None) -> list[int]:
    """Return the numbers of all servers that may ever have been started."""
    found = {server.generation for server in deployment.servers} if deployment else set()
    for entry in ledger.entries:
        if entry["event"] == "placing":
            found.add(1 + int(entry["number"]))
        elif entry["event"] == "numbers":
            found |= set(range(int(entry["first"]), int(entry["last"]) + 1))
    return sorted(found)
