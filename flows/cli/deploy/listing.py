"""Implementation of `rankwise deployments` and `take_down`, and the logs of a deployment."""

import json
import time
from contextlib import suppress
from pathlib import Path

import typer

from configs.common.dollars import dollars
from configs.common.files.reading import read_text
from configs.common.printable import printable_lines
from configs.serving.deployment import Deployment
from flows.cli.deploy.errors import words_of
from flows.cli.tables import print_table
from flows.folders import cache_folder, rented_folder
from tasks.deployment.places import read
from tasks.deployment.placing import placer_of
from tasks.deployment.servers import is_ready
from tasks.deployment.store import Store
from tasks.deployment.taking_down import take_down
from tasks.providers.clouds import BILLED_WHEN_OFF
from tasks.providers.giving_back import LeftBehind, Teardown
from tasks.providers.rental import ProviderError

_LOG_BYTES = 64 << 10


def store_of_user() -> Store:
    """Return the deployments of this user."""
    rented = rented_folder()
    return Store(data=rented.parent, rented=rented, cache=cache_folder())


def print_deployments(as_json: bool = False) -> int:
    """List what is deployed. Returns the exit code: 3 where something is not ready."""
    store, now = store_of_user(), time.time()
    found = [(each, _health(store, each, now)) for each in store.all()]
    if as_json:
        data = {"deployments": [_listed(each, health, now) for each, health in found]}
        typer.echo(json.dumps(data | {"unfinished": store.unfinished(), "damaged": store.damaged()}, indent=1))
    else:
        _print_rows(found, now)
    for name in store.unfinished():
        typer.echo(f"{name}: deploying it was interrupted; `rankwise undeploy {name}` removes what is left", err=True)
    damaged = store.damaged()
    for name, problem in damaged.items():
        typer.echo(f"{problem}. `rankwise undeploy {name}` takes it down", err=True)
    return 0 if not damaged and all(health == "ready" for _, health in found) else 3


def _print_rows(found: list[tuple[Deployment, str]], now: float) -> None:
    rows = [
        (each.name, each.target, each.bundle, f"{each.url}/v1", health, str(len(each.servers)), _left(each, now),
         "own" if _is_own(each) else _usd(each, now))
        for each, health in found
    ]  # fmt: skip
    header = ("name", "target", "bundle", "address", "health", "servers", "time left", "USD so far")
    print_table(header, rows, {"name", "target", "bundle", "address", "health"})


def _listed(deployment: Deployment, health: str, now: float) -> dict[str, object]:
    """Return a deployment for a program: times in seconds since 1970; `usd` null where no price is known or it is own.

    The token is in no list; `key_file` says where it is.
    """
    usd = _usd_so_far(deployment, now)
    return {
        "name": deployment.name,
        "target": deployment.target,
        "bundle": deployment.bundle,
        "address": f"{deployment.url}/v1",
        "key_file": deployment.key_file,
        "health": health,
        "servers": len(deployment.servers),
        "began_at": deployment.began_at,
        "expires_at": deployment.expires_at,
        "own_machine": _is_own(deployment),
        "usd_per_hour": deployment.usd_per_hour,
        "usd": None if usd is None else round(usd, 6),
    }


def _is_own(deployment: Deployment) -> bool:
    return deployment.usd_per_hour is None and deployment.rental is None


def _health(store: Store, deployment: Deployment, now: float) -> str:
    if now >= deployment.expires_at:
        return "expired"
    try:
        key = read_text(Path(deployment.key_file), 4096).strip()
        key.encode("ascii")  # else no header can hold it
    except FileNotFoundError:
        return "token missing"
    except (OSError, ValueError):
        return "token unreadable"
    return "ready" if is_ready(deployment.url, key) else "not ready"


def _left(deployment: Deployment, now: float) -> str:
    return f"{max(0, int(deployment.expires_at - now)) // 60} min"


def _usd(deployment: Deployment, now: float) -> str:
    usd = _usd_so_far(deployment, now)
    return "unknown" if usd is None else dollars(usd)


def _usd_so_far(deployment: Deployment, now: float) -> float | None:
    if deployment.usd_per_hour is None:
        return None
    # Elsewhere nodes that have switched themselves off cost nothing any more.
    until = now if deployment.kind in BILLED_WHEN_OFF else min(now, deployment.expires_at)
    return deployment.usd_per_hour * max(0.0, until - deployment.began_at) / 3600


def run_undeploy(name: str | None, everything: bool) -> int:
    """Take down one deployment, or all. Returns the exit code."""
    from configs.common.base import WrongArgument

    store = store_of_user()
    if (name is None) == (not everything):
        raise WrongArgument("NAME: expected a name, or --all")
    there = [*(each.name for each in store.all()), *store.unfinished(), *store.damaged()]
    names = [name] if name is not None else there
    code = 0
    for one in dict.fromkeys(names):
        try:
            cost = take_down(store, one, typer.echo, Teardown())
        except (LeftBehind, OSError, ProviderError, ValueError) as error:
            if isinstance(error, ValueError) and not everything:
                raise
            # With --all the others are taken down nevertheless: they may cost money.
            typer.echo(f"{one}: {words_of(error)}", err=True)
            code = 1
            continue
        priced = "; what it cost is unknown, for it has no price" if cost is None else f"; it cost {dollars(cost)} USD"
        told = "" if cost == 0 else priced  # own machines
        typer.echo(f"{one}: taken down, nothing is left{told}")
    if not names:
        typer.echo("nothing is deployed")
    return code


def reap_deployments(dry_run: bool) -> list[str]:
    """Take down deployments that have expired or whose deploying process died; returns what could not be."""
    store, now = store_of_user(), time.time()
    problems = [f"{problem}. `rankwise undeploy {name}` takes it down" for name, problem in store.damaged().items()]
    doomed = {each.name: "expired" for each in store.all() if each.expires_at <= now}
    doomed |= dict.fromkeys(store.unfinished(), "its command has ended")
    for name, reason in doomed.items():
        typer.echo(f"{'would remove' if dry_run else 'to remove'}: deployment {name}: {reason}")
        if dry_run:
            continue
        try:
            take_down(store, name, typer.echo, Teardown())
        except (LeftBehind, OSError, ProviderError, ValueError) as error:
            problems.append(f"deployment {name}: {words_of(error)}")
    return problems


def print_deployment_logs(name: str) -> int:
    """Print the ends of the logs of a deployment's servers, tunnels and front.

    Returns the exit code: 1 where a machine does not answer; the others are printed nevertheless.
    """
    store = store_of_user()
    deployment = store.read(name)
    placer = placer_of(store, deployment, typer.echo)
    logs = ["server.log", *(f"replica-{number}.log" for number in range(_replicas(store, deployment))), "rank.log"]
    code = 0
    for server in deployment.servers:
        # Ranks on further nodes have logs of their own there.
        for node, folder in [(server.node, server.folder), *enumerate(server.peers, 1)]:
            try:
                place = placer.place_of(node)
                for file in logs:
                    data = read(place, f"{folder}/{file}", _LOG_BYTES)
                    _show(f"server {server.generation} on {place.name}, {file}", data)
            except OSError as error:
                typer.echo(f"server {server.generation}: {words_of(error)}", err=True)
                code = 1
        if server.tunnel is not None:
            data = read(placer.here, f"{server.tunnel}/server.log", _LOG_BYTES)
            _show(f"tunnel to server {server.generation}", data)
    _show("front", read(placer.here, f"{deployment.front}/server.log", _LOG_BYTES))
    return code


def _replicas(store: Store, deployment: Deployment) -> int:
    """Return how many replicas each server has; one where its bundle cannot be read."""
    with suppress(OSError, ValueError):
        return store.bundle(deployment).layout.dp
    return 1


def _show(title: str, data: bytes | None) -> None:
    text = (data or b"").decode(errors="replace").strip()
    if text:
        typer.echo(f"--- {title}\n{printable_lines(text)}")
