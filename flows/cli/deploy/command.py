"""`rankwise deploy` and the commands on what is deployed.

rankwise deploy --model bert-base-uncased --target local:cpu --optimization balanced
rankwise deploy --model t5-small --targets ssh:gpu-a,aws:g4dn.xlarge --optimization aggressive --hours 4
rankwise deployments; rankwise rollout NAME --model ...; rankwise scale NAME --replicas 2; rankwise undeploy --all

Exit codes: 0 done, 1 not deployed or something is left, 2 wrong argument, 3 some of several targets failed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from configs.common.printable import plural
from flows.cli.options import AsJson, refuse_unused

GroupTimeout = Annotated[
    float, typer.Option(min=0.1, max=86_400, help="limit of waiting ranks; raise it if a step takes as long")
]
Level = Annotated[
    Literal["none", "balanced", "aggressive"],
    typer.Option(help="compression level; if it loses more than --max-loss, the next milder one is deployed"),
]
DeploymentName = Annotated[str, typer.Argument(metavar="NAME", help="name that `rankwise deployments` lists")]
DeployedModel = Annotated[
    str | None, typer.Option("--model", help="folder, owner/name@revision, or synthetic:ARCHITECTURE@SEED")
]
FromRun = Annotated[
    Path | None, typer.Option("--from", metavar="RUN", help="model, layout, precision and batch that a study chose")
]
MaxLoss = Annotated[
    float, typer.Option(min=0, help="largest rise of perplexity (0.01: 1 %), or cosine distance, by the compression")
]
_FROM_STUDY = "with --from, which names the precision"
NoVerify = Annotated[bool, typer.Option("--no-verify", help="do not compare the layout with transformers")]


def deploy(
    context: typer.Context,
    model: DeployedModel = None,
    target: Annotated[
        str | None, typer.Option(help="local:cpu, ssh:HOST, slurm:PARTITION, aws:g4dn.xlarge, gcp:..., azure:...")
    ] = None,
    targets: Annotated[str | None, typer.Option(metavar="A,B", help="several targets, side by side")] = None,
    optimization: Level = "none",
    from_run: FromRun = None,
    sharded: Annotated[bool, typer.Option("--sharded", help="cut the model over all devices and nodes")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="machines of a target; with --sharded one server is on all")] = 1,
    name: Annotated[str | None, typer.Option(help="[default: model and target]")] = None,
    hours: Annotated[float, typer.Option(min=0.01, max=720, help="lifetime: then everything ends by itself")] = 8.0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="on this machine; 0: any free one")] = 0,
    replicas: Annotated[int, typer.Option(min=1, max=64, help="servers behind the address")] = 1,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="of the weights  [default: bfloat16; float16 on rented GPUs without it]"),
    ] = None,
    max_loss: MaxLoss = 0.01,
    max_length: Annotated[int | None, typer.Option(min=2, help="tokens of prompt and answer  [default: 2048]")] = None,
    group_timeout_seconds: GroupTimeout = 20.0,
    region: Annotated[list[str] | None, typer.Option(help="regions in order  [default: the provider's home]")] = None,
    cheapest_first: Annotated[bool, typer.Option("--cheapest-first", help="regions by price, not in order")] = False,
    market: Annotated[Literal["on_demand", "spot"], typer.Option(help="market to ask first")] = "on_demand",
    fall_back: Annotated[Literal["on_demand", "spot"] | None, typer.Option(help="market to ask after it")] = None,
    ssh_from: Annotated[str | None, typer.Option(metavar="CIDR", help="who may connect to rented nodes")] = None,
    network: Annotated[
        str | None, typer.Option(help="existing VPC for rented nodes, as of `nodes up`  [default: the default one]")
    ] = None,
    subnet: Annotated[str | None, typer.Option(help="existing subnet for them")] = None,
    profile: Annotated[
        str | None, typer.Option(help="their instance profile, service account or managed identity")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="they get no public addresses: deploy inside")] = False,
    max_usd_per_hour: Annotated[float | None, typer.Option(help="cap for each target's nodes together")] = None,
    python: Annotated[str | None, typer.Option(help="interpreter on the hosts that has the libraries")] = None,
    user: Annotated[str | None, typer.Option(help="login name on hosts and nodes")] = None,
    ssh_key: Annotated[Path | None, typer.Option(help="private key for hosts of ssh and slurm")] = None,
    known_hosts: Annotated[Path | None, typer.Option(help="file of their host keys")] = None,
    folder: Annotated[
        str | None, typer.Option(help="on ssh hosts  [default: ~/.rankwise]; of slurm: shared by all nodes")
    ] = None,
    ready_minutes: Annotated[float, typer.Option(min=0.05, help="limit until a server is ready")] = 10.0,
    no_verify: NoVerify = False,
    yes: Annotated[bool, typer.Option("--yes", help="rent nodes without asking for confirmation")] = False,
) -> None:
    """Measure, bundle and serve a model on a target, behind one address with a token."""

    def work() -> int:
        from flows.cli.deploy.deploying import DeployRequest, run_deploy

        refuse_unused(context, {"dtype": _FROM_STUDY if from_run is not None else None})
        return run_deploy(
            DeployRequest(
                model=model,
                targets=_targets(target, targets),
                level=optimization,
                from_run=from_run,
                sharded=sharded,
                nodes=nodes,
                name=name,
                hours=hours,
                port=port,
                replicas=replicas,
                dtype=dtype,
                max_loss=max_loss,
                max_length=max_length,
                group_timeout_seconds=group_timeout_seconds,
                regions=tuple(region or ()),
                cheapest_first=cheapest_first,
                market=market,
                fall_back=fall_back,
                ssh_from=ssh_from,
                network=network,
                subnet=subnet,
                profile=profile,
                private=private,
                max_usd_per_hour=max_usd_per_hour,
                python=python,
                user=user,
                ssh_key=ssh_key,
                known_hosts=known_hosts,
                folder=folder,
                ready_seconds=60 * ready_minutes,
                verify=not no_verify,
                yes=yes,
            )
        )

    _exit(context, work)


def deployments(context: typer.Context, as_json: AsJson = False) -> None:
    """List what is deployed: address, health, time left, price so far."""

    def work() -> int:
        from flows.cli.deploy.listing import print_deployments

        return print_deployments(as_json)

    _exit(context, work)


def undeploy(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="deployment to take down")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all deployments")] = False,
) -> None:
    """Take a deployment down; rented nodes are given back."""

    def work() -> int:
        from flows.cli.deploy.listing import run_undeploy

        return run_undeploy(name, everything)

    _exit(context, work)


def scale(
    context: typer.Context,
    name: DeploymentName,
    replicas: Annotated[int, typer.Option(min=1, max=64, help="servers")],
) -> None:
    """Have more or fewer servers behind a deployment's address."""

    def work() -> int:
        from flows.cli.deploy.listing import store_of_user
        from flows.cli.signals import ended_by_signals
        from tasks.deployment.rollouts import set_server_count as to_scale

        with ended_by_signals():
            found = to_scale(store_of_user(), name, replicas, typer.echo)
        typer.echo(f"{name}: {plural(len(found.servers), 'server')} at {found.url}")
        return 0

    _exit(context, work)


def rollout(
    context: typer.Context,
    name: DeploymentName,
    model: DeployedModel = None,
    optimization: Level = "none",
    from_run: FromRun = None,
    max_loss: MaxLoss = 0.01,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="of the weights  [default: as deployed]")
    ] = None,
    watch_seconds: Annotated[float, typer.Option(min=0, help="of traffic before the old servers end")] = 5.0,
    no_verify: NoVerify = False,
) -> None:
    """Replace what a deployment serves without a failed request; rolls back by itself."""

    def work() -> int:
        from flows.cli.deploy.deploying import run_rollout

        refuse_unused(context, {"dtype": _FROM_STUDY if from_run is not None else None})
        return run_rollout(name, model, optimization, from_run, dtype, max_loss, watch_seconds, not no_verify)

    _exit(context, work)


def route(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="deployments of one model")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one")] = 8080,
    max_in_flight: Annotated[int, typer.Option(min=1, help="requests in progress before the next one gets some")] = 8,
    no_token: Annotated[bool, typer.Option("--no-token", help="requests need no token")] = False,
) -> None:
    """Serve one address in front of several deployments: own machines first, the cloud takes the peaks."""

    def work() -> int:
        from flows.cli.deploy.routing import run_route

        return run_route(names, port, max_in_flight, no_token)

    _exit(context, work)


def _targets(target: str | None, targets: str | None) -> tuple[str, ...]:
    from configs.common.base import WrongArgument

    if (target is None) == (targets is None):
        raise WrongArgument("--target, --targets: expected exactly one of the two")
    found = tuple(dict.fromkeys(one.strip() for one in (target or targets or "").split(",") if one.strip()))
    if not found:
        option = "--target" if targets is None else "--targets"
        raise WrongArgument(f"{option}: got nothing, expected a target, such as local:cpu")
    if target is not None and len(found) > 1:
        raise WrongArgument(f"--target: got {target}, expected one. Name several by --targets A,B")
    return found


def _exit(context: typer.Context, work: Callable[[], int]) -> None:
    from flows.cli.deploy.errors import with_user_errors
    from flows.cli.errors import guarded

    debug = bool((context.obj or {}).get("debug"))
    raise typer.Exit(guarded(lambda: with_user_errors(work), Path("deploy"), debug))
