"""`rankwise nodes up|list|extend|ssh|down` and `rankwise reap`: rent machines, look at them, give them back.

rankwise nodes up aws/g5.12xlarge --nodes 2 --region us-east-1 --market spot --fall-back on_demand --hours 2
rankwise nodes ssh RUN --node 1
rankwise nodes down RUN
rankwise reap --dry-run

Exit codes: 0 done, 1 nothing was rented or something is left (each resource is named), 2 wrong argument.
"""

import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.common.printable import plural
from configs.targets.rented import MarketName
from flows.cli.options import AsJson

if TYPE_CHECKING:
    from tasks.providers.rental import Provider, RentalLease, RentalRequest, Resource

app = typer.Typer(help="Rent nodes of AWS, GCP and Azure, log in and give them back.", no_args_is_help=True)
RunName = Annotated[str, typer.Argument(metavar="RUN", help="name that `nodes up` printed")]


@app.command()
def up(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NODE", help="provider and instance: aws/g4dn.xlarge")],
    nodes: Annotated[int, typer.Option(min=1, help="number of nodes; all or none")] = 1,
    region: Annotated[list[str] | None, typer.Option(help="regions in order  [default: the provider's home]")] = None,
    zone: Annotated[list[str] | None, typer.Option(help="only these zones, in order")] = None,
    cheapest_first: Annotated[bool, typer.Option("--cheapest-first", help="regions by price, not in order")] = False,
    market: Annotated[MarketName, typer.Option(help="market to ask first")] = "on_demand",
    fall_back: Annotated[MarketName | None, typer.Option(help="market to ask after all regions")] = None,
    hours: Annotated[float, typer.Option(help="lifetime: the nodes power off after it by themselves")] = 1.0,
    study: Annotated[str, typer.Option(help="study, kept in the tags")] = "nodes",
    run: Annotated[
        str | None, typer.Option(help="name of the rental  [default: the study and a random number]")
    ] = None,
    image: Annotated[str | None, typer.Option(help="id or name  [default: the vendor's deep learning image]")] = None,
    disk_gb: Annotated[int, typer.Option(min=8, help="size of the root disk")] = 100,
    user: Annotated[str | None, typer.Option(help="login name of the image")] = None,
    ssh_from: Annotated[
        str | None, typer.Option(metavar="CIDR", help="who may connect  [default: this machine's public address]")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="existing VPC of AWS, by id or name  [default: the default one]")
    ] = None,
    subnet: Annotated[str | None, typer.Option(help="existing subnet, by id")] = None,
    profile: Annotated[
        str | None, typer.Option(help="instance profile of AWS by name, managed identity of Azure by id")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="no public addresses; connect from inside")] = False,
    placement: Annotated[
        bool | None, typer.Option("--placement/--no-placement", help="close together  [default: for several nodes]")
    ] = None,
    max_usd_per_hour: Annotated[float | None, typer.Option(help="cap for all nodes together")] = None,
    wait_minutes: Annotated[float, typer.Option(help="limit until all nodes answer over SSH")] = 10.0,
    yes: Annotated[bool, typer.Option("--yes", help="rent without asking for confirmation")] = False,
) -> None:
    """Rent nodes, wait until each answers over SSH, and print how to log in."""

    def work() -> int:
        from configs.hardware.catalog import HOME_REGIONS
        from configs.hardware.node_names import parse_node_name
        from tasks.providers.callers_address import callers_address, check_source
        from tasks.providers.rental import RentalRequest

        _check_above_0("wait-minutes", wait_minutes)
        _check_above_0("max-usd-per-hour", max_usd_per_hour)
        with _wrong_arguments():
            name = parse_node_name(node)
            check_source(name.provider, not private, ssh_from, ("--private", "--ssh-from"))
        address = ssh_from or callers_address()
        with _wrong_arguments():
            request = RentalRequest(
                provider=name.provider,
                instance=name.instance,
                nodes=nodes,
                regions=tuple(region or [HOME_REGIONS[name.provider]]),
                zones=tuple(zone or ()),
                cheapest_first=cheapest_first,
                market=market,
                fall_back=fall_back,
                image=image,
                disk_gb=disk_gb,
                placement=placement,
                public_address=not private,
                ssh_from=address,
                user=user,
                network=network,
                subnet=subnet,
                profile=profile,
                hours=hours,
            )
        return _up(request, study, run, max_usd_per_hour, wait_minutes, yes)

    _exit(context, work)


@contextmanager
def _wrong_arguments() -> Iterator[None]:
    """Turn a ValueError into WrongArgument: no cloud has been asked yet."""
    from configs.common.base import WrongArgument
    from flows.expected import sentence_of

    try:
        yield
    except ValueError as error:
        raise WrongArgument(sentence_of(error)) from error


def _check_above_0(option: str, value: float | None, at_most: float = math.inf) -> None:
    """Raise WrongArgument for an option that is not above 0, or is infinite or more than it may be."""
    from configs.common.base import WrongArgument

    if value is not None and not (0 < value <= at_most and math.isfinite(value)):
        limit = f" and at most {at_most:g}" if math.isfinite(at_most) else ""
        raise WrongArgument(f"--{option}: got {value}, expected a number above 0{limit}")


def _up(
    request: "RentalRequest", study: str, run: str | None, cap: float | None, wait_minutes: float, yes: bool
) -> int:
    """Show the price, ask, rent."""
    from configs.hardware.prices import listed_offers
    from flows.cli.offers import offer_lines
    from flows.cli.signals import ended_by_signals
    from flows.folders import cache_folder, rented_folder
    from tasks.providers.clouds import provider_named
    from tasks.providers.labels import label, owner
    from tasks.providers.readiness.node_gpus import gpus_of_instance, lacking_gpus
    from tasks.providers.readiness.waiting import Limits
    from tasks.providers.rental import RentalLease, node_address
    from tasks.providers.renting import plan_rental, rent

    with _wrong_arguments():
        study = label(study, "--study")
        name = label(run, "--run") if run else f"{study[:40]}-{secrets.token_hex(4)}"
    provider = provider_named(request.provider)
    offer = plan_rental(provider, request, cap, listed_offers(cache_folder()))
    for line in offer_lines(request, offer):
        typer.echo(line)
    if not yes and not typer.confirm("Rent?", default=False):
        typer.echo("nothing was rented")
        return 1
    lease = RentalLease(
        study=study,
        run=name,
        owner=owner(),
        expires_at=int(time.time() + request.hours * 3600),
        request=request,
    )
    folder = rented_folder() / lease.run
    limits = Limits(ready_seconds=60 * wait_minutes)
    typer.echo(f"run {lease.run}")
    with ended_by_signals():
        nodes = rent(provider, lease, offer, folder, typer.echo, limits)
    for place, node in enumerate(nodes):
        typer.echo(f"node {place}: {node.id} {node_address(node, request)} ({node.zone or node.region}, {node.market})")
    addresses = [node_address(node, request) for node in nodes]
    count = gpus_of_instance(request.provider, request.instance)
    for address, why in lacking_gpus(folder, request.user or provider.default_user, addresses, request, count).items():
        typer.echo(f"node {addresses.index(address)} {why}. Its driver does not work, or is yet to start", err=True)
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.expires_at))
    typer.echo(f"until {until}; log in: rankwise nodes ssh {lease.run}; give back: rankwise nodes down {lease.run}")
    return 0


@app.command("list")
def list_command(context: typer.Context, as_json: AsJson = False) -> None:
    """List everything that runs in the clouds with Rankwise's tags, in all regions."""

    def work() -> int:
        from tasks.providers.giving_back import find_everything

        found, problems, _ = find_everything(_asked_providers())
        found.sort(key=lambda item: (item.run, item.kind, item.id))
        if as_json:
            typer.echo(json.dumps({"resources": [item.model_dump() for item in found], "problems": problems}, indent=1))
        else:
            _print_resources(found)
        for problem in problems:
            typer.echo(problem, err=True)
        return 1 if problems else 0

    _exit(context, work)


def _print_resources(found: "list[Resource]") -> None:
    from flows.cli.tables import print_table

    rows = [
        (item.run, item.provider, item.kind, item.id, item.zone or item.region, item.detail, _left(item.expires_at))
        for item in found
    ]
    print_table(("run", "provider", "kind", "id", "place", "detail", "time left"), rows, words=6)


@app.command()
def extend(
    context: typer.Context, run: RunName, hours: Annotated[float, typer.Option(help="lifetime from now")] = 1.0
) -> None:
    """Move the end of a rental: in the tags and in the dead man's switch of every node."""

    def work() -> int:
        from tasks.providers.leases import read_entries
        from tasks.providers.rental import MAX_HOURS
        from tasks.providers.renting import extend_run

        _check_above_0("hours", hours, MAX_HOURS)
        provider, lease, folder = _rental(run)
        # Nodes that a study left up for its next run stay so; `reap` takes others that no run uses for abandoned.
        kept = [entry["event"] for entry in read_entries(folder / "ledger.jsonl")][-1:] == ["kept"]
        until = extend_run(provider, lease, folder, int(time.time() + hours * 3600), "kept" if kept else "extended")
        typer.echo(f"{run}: until {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(until))}")
        return 0

    _exit(context, work)


@app.command()
def ssh(
    context: typer.Context,
    run: RunName,
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="command to run")] = None,
    node: Annotated[int, typer.Option(min=0, help="number of the node")] = 0,
) -> None:
    """Log in to a node, with the run's key and the verified host key."""

    def work() -> int:
        import subprocess

        from tasks.providers.connections import ssh_argv
        from tasks.providers.rental import node_address
        from tasks.providers.renting import nodes_of

        provider, lease, folder = _rental(run)
        up = nodes_of(folder)
        if node >= len(up):
            raise ValueError(f"{run}: node {node} is not up; {len(up)} {'is' if len(up) == 1 else 'are'}")
        user = lease.request.user or provider.default_user
        address = node_address(up[node], lease.request)
        return subprocess.run(ssh_argv(folder, user, address, command or [])).returncode

    _exit(context, work)


@app.command()
def down(context: typer.Context, run: RunName) -> None:
    """Give back everything of a run; exit code 1 names what could not be removed."""

    def work() -> int:
        from tasks.providers.leases import last_used, note_abandoned, open_ledger
        from tasks.providers.renting import give_back_run

        provider, lease, folder = _rental(run)
        with open_ledger(folder) as ledger:
            note_abandoned(ledger, last_used(folder))
        removed = give_back_run(provider, lease, folder, typer.echo, _patience())
        typer.echo(f"{run}: gave back {plural(removed, 'resource')}; nothing is left")
        return 0

    _exit(context, work)


def reap(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only list what would be removed")] = False,
    everything: Annotated[bool, typer.Option("--all", help="everything with Rankwise's tags, of any owner")] = False,
    provider: Annotated[list[str] | None, typer.Option(help="only this provider")] = None,
) -> None:
    """Find what expired or ended runs left, in all regions and providers, and remove it."""

    def work() -> int:
        from flows.cli.deploy.listing import reap_deployments
        from flows.folders import rented_folder
        from tasks.providers.giving_back import remove_expired as sweep_all
        from tasks.providers.leases import not_given_back

        unasked: list[str] = []
        if provider:
            left, providers = [], _asked_providers(provider)
        else:
            left = reap_deployments(dry_run)
            for problem in left:
                typer.echo(problem, err=True)
            providers = _asked_providers()
            for cloud, runs in not_given_back(rented_folder()).items():
                if cloud not in {each.name for each in providers}:
                    unasked.append(f"{cloud}: could not be asked what is left of {', '.join(runs)}")
        sweep = sweep_all(providers, rented_folder(), everything, dry_run, typer.echo, _patience())
        verb = "would remove" if dry_run else "to remove"
        for resource, reason in sweep.doomed:
            typer.echo(f"{verb}: {resource.words}, run {resource.run}: {reason}")
        for resource, reason in sweep.kept:
            typer.echo(f"kept: {resource.words}, run {resource.run}: {reason}")
        for problem in (*unasked, *sweep.problems):
            typer.echo(problem, err=True)
        count = f"would remove {len(sweep.doomed)}" if dry_run else f"removed {len(sweep.removed)}"
        asked = ", ".join(f"{name} ({plural(regions, 'region')})" for name, regions in sweep.regions.items())
        typer.echo(f"{count}, kept {len(sweep.kept)}; searched {asked or 'nothing'}")
        return 1 if sweep.problems or left or unasked else 0

    _exit(context, work)


def providers_at_hand() -> "list[Provider]":
    """Return the providers with credentials; the others are named on stderr."""
    from tasks.providers.clouds import CLOUDS, provider_named
    from tasks.providers.rental import ProviderError

    found = []
    for name in CLOUDS:
        try:
            provider = provider_named(name)
            provider.identity()
            found.append(provider)
        except (ProviderError, ValueError) as error:
            why = str(error).removeprefix(f"{name}: ")
            typer.echo(f"{name}: not searched: {why}", err=True)
    return found


def _asked_providers(named: Collection[str] = ()) -> "list[Provider]":
    """Return the same, or those of them that are named.

    Raises WrongArgument for an unknown name, ValueError where one that is named, or each, cannot be asked: then nothing
    can be said about what is left.
    """
    from configs.common.base import WrongArgument
    from tasks.providers.clouds import CLOUDS

    for name in named:
        if name not in CLOUDS:
            raise WrongArgument(f"--provider: got {name}, expected one of: {', '.join(CLOUDS)}")
    found = [each for each in providers_at_hand() if not named or each.name in named]
    silent = [name for name in named if name not in {each.name for each in found}]
    if silent or not found:
        asked = f"{silent[0]} could not be asked" if silent else "no provider could be asked"
        raise ValueError(f"{asked}: credentials are missing or refused")
    return found


def _rental(run: str) -> "tuple[Provider, RentalLease, Path]":
    from configs.common.base import WrongArgument
    from flows.folders import rented_folder
    from tasks.providers.clouds import provider_named
    from tasks.providers.labels import label
    from tasks.providers.leases import read_lease

    folder = rented_folder() / label(run)
    if not (folder / "lease.json").exists():
        raise WrongArgument(f"{run}: no rental of this name on this machine. `rankwise nodes list` lists all")
    lease = read_lease(folder)
    return provider_named(lease.request.provider), lease, folder


def _left(expires_at: int | None) -> str:
    return "unknown" if expires_at is None else f"{max(0, expires_at - int(time.time())) // 60} min"


def _patience() -> Any:
    from tasks.providers.giving_back import Teardown

    return Teardown()


def _exit(context: typer.Context, work: Callable[[], int]) -> None:
    from flows.cli.errors import guarded, plainly

    debug = bool((context.obj or {}).get("debug"))
    raise typer.Exit(guarded(lambda: plainly(lambda: _named(work)), Path("nodes"), debug))


def _named(work: Callable[[], int]) -> int:
    """Turn what a cloud refused into a message. Raises ValueError."""
    from tasks.providers.giving_back import LeftBehind
    from tasks.providers.rental import ProviderError

    try:
        return work()
    except (LeftBehind, ProviderError) as error:
        raise ValueError(str(error)) from error
    except KeyboardInterrupt:
        print("interrupted. `rankwise nodes list` shows what is rented, if anything is", file=sys.stderr)
        return 1
