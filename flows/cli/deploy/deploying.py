"""Implementation of `rankwise deploy` and `rollout`: targets side by side, one table."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path

import typer

from configs.common.base import WrongArgument, expanded
from configs.common.dollars import dollars
from configs.common.execution import Dtype, Layout
from configs.common.printable import file_slug, plural, significant
from configs.common.secrets import redacted
from configs.hardware.catalog import HOME_REGIONS
from configs.hardware.node_names import parse_node_name
from configs.hardware.prices import listed_offers
from configs.serving.deployment import OptimizationLevel
from configs.serving.settings import GROUP_TIMEOUT_SECONDS
from configs.targets.rented import RentedTarget
from configs.targets.target import SlurmTarget, SshTarget
from flows.cli.deploy.errors import words_of
from flows.cli.deploy.listing import store_of_user
from flows.cli.deploy.verdicts import judged_by_transformers
from flows.cli.offers import offer_lines
from flows.cli.signals import ended_by_signals
from flows.cli.tables import print_table
from flows.expected import sentence_of
from flows.folders import cache_folder
from tasks.deployment.bundles import WantedBundle, as_written, can_be_cut, read_bundle, wanted_of_run
from tasks.deployment.deploying import Deploying, WantedDeployment
from tasks.deployment.first_answers import Timing
from tasks.deployment.fit import check_devices, check_dtype, devices_of, usual_dtype
from tasks.deployment.rollouts import RolledBack
from tasks.deployment.rollouts import replace_bundle as roll_out
from tasks.deployment.slurm_places import SlurmPartition, shared_folder
from tasks.deployment.targets import ParsedTarget, parse_target, ssh_host
from tasks.models.hub import TransientFetchError
from tasks.providers.callers_address import check_source
from tasks.providers.giving_back import LeftBehind
from tasks.providers.rental import ProviderError
from tasks.providers.study_nodes import offer_of, request_of

SOME_FAILED = 3
_RENTED, _REACHED = ("aws", "gcp", "azure"), ("ssh", "slurm")
_OF_KINDS = {
    "regions": _RENTED,
    "cheapest_first": _RENTED,
    "market": _RENTED,
    "fall_back": _RENTED,
    "ssh_from": _RENTED,
    "network": _RENTED,
    "subnet": _RENTED,
    "profile": _RENTED,
    "private": _RENTED,
    "max_usd_per_hour": _RENTED,
    "ssh_key": _REACHED,
    "known_hosts": _REACHED,
    "folder": _REACHED,
    "user": (*_REACHED, *_RENTED),
    "python": (*_REACHED, *_RENTED),
}
"""Options by the kinds of targets that they are of; those that would mislead where they do nothing."""
_MIB = 1 << 20


@dataclass(frozen=True)
class DeployRequest:
    """Arguments of the command line. name: of the deployment; served_name: of the model in requests.

    dtype: None is bfloat16, and float16 on rented GPUs that do not multiply it.
    """

    model: str | None
    targets: tuple[str, ...]
    level: OptimizationLevel = "none"
    from_run: Path | None = None
    sharded: bool = False
    nodes: int = 1
    name: str | None = None
    served_name: str | None = None
    hours: float = 8.0
    port: int = 0
    replicas: int = 1
    dtype: Dtype | None = None
    max_loss: float = 0.01
    max_length: int | None = None
    group_timeout_seconds: float = GROUP_TIMEOUT_SECONDS
    regions: tuple[str, ...] = ()
    cheapest_first: bool = False
    market: str = "on_demand"
    fall_back: str | None = None
    ssh_from: str | None = None
    network: str | None = None
    subnet: str | None = None
    profile: str | None = None
    private: bool = False
    max_usd_per_hour: float | None = None
    python: str | None = None
    user: str | None = None
    ssh_key: Path | None = None
    known_hosts: Path | None = None
    folder: str | None = None
    ready_seconds: float = 600.0
    verify: bool = True
    yes: bool = False


@dataclass(frozen=True)
class TargetOutcome:
    """What became of one target. row: of the table; problem: why it failed."""

    target: str
    row: tuple[str, ...] | None = None
    lines: tuple[str, ...] = ()
    problem: str | None = None


def run_deploy(asked: DeployRequest) -> int:
    """Deploy to every target at once, print the table, and return the exit code."""
    _check_numbers(
        hours=asked.hours, max_loss=asked.max_loss, max_usd_per_hour=asked.max_usd_per_hour,
        ready_minutes=asked.ready_seconds, group_timeout_seconds=asked.group_timeout_seconds,
    )  # fmt: skip
    try:
        targets = [parse_target(text) for text in asked.targets]
        _refuse_unused(asked, targets)
        wanted = [_wanted(asked, target) for target in targets]
    except ValueError as error:  # nothing has been made yet: it is the arguments
        raise WrongArgument(sentence_of(error)) from error
    if len({one.name for one in wanted}) < len(wanted):
        raise WrongArgument("--targets: two of them get the same name. Deploy them one by one, with --name")
    if not _agreed(wanted, asked.yes):
        typer.echo("nothing was deployed")
        return 1
    lock, stop = threading.Lock(), threading.Event()
    with ended_by_signals():
        if len(wanted) == 1:
            outcomes = [_deployed(wanted[0], asked, lock, stop, single=True)]
        else:
            with ThreadPoolExecutor(len(wanted)) as pool:
                try:
                    outcomes = list(pool.map(lambda one: _deployed(one, asked, lock, stop, single=False), wanted))
                except BaseException:
                    stop.set()  # the interrupt comes to this thread alone, and the pool waits for the others
                    raise
    _print(outcomes)
    failed = [outcome for outcome in outcomes if outcome.problem]
    return 0 if not failed else 1 if len(failed) == len(outcomes) else SOME_FAILED


def _check_numbers(**given: float | None) -> None:
    """Refuse nan, which is beyond no bound: nothing would expire, and nothing would be too dear. By option."""
    for name, value in given.items():
        if value is not None and isnan(value):
            raise WrongArgument(f"--{name.replace('_', '-')}: got nan, expected a number")


def _refuse_unused(asked: DeployRequest, targets: list[ParsedTarget]) -> None:
    """Raise ValueError for an option that none of the targets takes, or that cannot be of several."""
    kinds = {target.kind for target in targets}
    if asked.port and len(asked.targets) > 1:
        raise ValueError(f"--port: got {asked.port} for several targets. Leave it out, or deploy them one by one")
    for name, own in _OF_KINDS.items():
        if getattr(asked, name) != getattr(DeployRequest, name) and not kinds & set(own):
            option = "region" if name == "regions" else name.replace("_", "-")
            raise ValueError(f"--{option}: has no effect without a target of {', '.join(own)}")
    given = [1 + (target.host or "").count("+") for target in targets if target.kind in ("local", "ssh")]
    if len(given) == len(targets) and asked.nodes not in (1, *given):
        remedy = "Name all of them, as ssh:a+b" if asked.sharded else "Use --replicas for several servers"
        raise ValueError(
            f"--nodes: got {asked.nodes}, but the machines are those of --target: {', '.join(asked.targets)}. {remedy}"
        )
    rented = [target for target in targets if target.instance is not None]
    if rented and not asked.sharded and asked.nodes > asked.replicas:
        idle = plural(asked.nodes - asked.replicas, "node")
        raise ValueError(
            f"--nodes: got {asked.nodes} for {plural(asked.replicas, 'server')}; {idle} would be paid for and serve "
            f"nothing. Use --replicas {asked.nodes}, or --sharded for one server on all"
        )


def _short_name(model: str) -> str:
    """Return the last part of a model's name, without its revision or seed; folders above it may have an @."""
    named = model if expanded(model).is_dir() else model.removeprefix("synthetic:").partition("@")[0]
    return named.rstrip("/").rpartition("/")[2].partition("@")[0]


def _wanted(asked: DeployRequest, target: ParsedTarget) -> WantedDeployment:
    """Return what is deployed on a target. Raises ValueError."""
    rented = ssh = partition = None
    if target.instance is not None:
        rented = _rented(asked, target)
    elif target.host is not None:
        ssh = _ssh(asked, target)
    elif target.partition is not None:
        partition = _partition(asked, target)
    nodes = len(ssh.hosts) if ssh else asked.nodes if rented else 1  # of this target
    devices = devices_of(target) * nodes if asked.sharded else 1
    bundle = WantedBundle(
        model=asked.model or "", level=asked.level, layout=Layout(tp=devices), dtype=asked.dtype or usual_dtype(target),
        max_loss=asked.max_loss, max_length=asked.max_length, group_timeout_seconds=asked.group_timeout_seconds,
        name=asked.served_name,
    )  # fmt: skip
    if asked.from_run is not None:
        bundle = wanted_of_run(asked.from_run, bundle)
        if asked.sharded and not can_be_cut(bundle.layout, nodes):
            raise ValueError(
                f"--sharded: {plural(nodes, 'node')} hold one replica of equally many ranks each, but the study chose "
                f"{bundle.layout}. Leave out --sharded, or name --model in place of --from"
            )
        check_devices(target, bundle.layout, nodes if asked.sharded else 1)
    elif not asked.model:
        raise ValueError("--model: missing. Name a model, or a study by --from RUN")
    check_dtype(target, bundle.dtype, "--dtype: got" if asked.from_run is None else "--from: the study chose")
    title = file_slug(bundle.name or _short_name(bundle.model))
    name = asked.name or f"{title}-{file_slug(target.text.replace(':', '-'))}".lower()[:60]
    if asked.name and len(asked.targets) > 1:
        name = f"{asked.name}-{file_slug(target.text.replace(':', '-'))}".lower()[:60]
    return WantedDeployment(
        name=name, target=target, bundle=bundle, hours=asked.hours, port=asked.port if len(asked.targets) == 1 else 0,
        replicas=asked.replicas, rented=rented, ssh=ssh, partition=partition, ready_seconds=asked.ready_seconds,
        max_usd_per_hour=asked.max_usd_per_hour, sharded=asked.sharded,
    )  # fmt: skip


def _rented(asked: DeployRequest, target: ParsedTarget) -> RentedTarget:
    """Return the nodes that a target rents. Raises ValueError."""
    names = ("--private", "--ssh-from")
    check_source(parse_node_name(target.text).provider, not asked.private, asked.ssh_from, names)
    return RentedTarget.model_validate(
        {
            "kind": target.kind,
            "name": file_slug(target.text.replace(":", "-"))[:40],
            "instance": target.instance,
            "nodes": asked.nodes,
            "regions": list(asked.regions) or [HOME_REGIONS[target.kind]],
            "cheapest_first": asked.cheapest_first,
            "market": asked.market,
            "fall_back": asked.fall_back,
            "ssh_from": asked.ssh_from,
            "network": asked.network,
            "subnet": asked.subnet,
            "profile": asked.profile,
            "public_address": not asked.private,
            "python": asked.python,
            "user": asked.user,
            "preflight": False,
        }
    )


def _partition(asked: DeployRequest, target: ParsedTarget) -> SlurmPartition:
    """Return a partition, one job a server. Raises ValueError."""
    if asked.sharded or asked.nodes > 1:
        raise ValueError(
            f"--target: {target.text}: a server is a job on one node, got "
            f"{'--sharded' if asked.sharded else f'--nodes {asked.nodes}'}. Use --replicas for several servers"
        )
    name = f"slurm-{target.partition}"
    slurm = SlurmTarget(
        name=name, partition=target.partition, shared=str(shared_folder(asked.folder, name)), python=asked.python,
        preflight=False,
    )  # fmt: skip
    return SlurmPartition(
        target=slurm, user=asked.user, key=str(asked.ssh_key) if asked.ssh_key else None,
        known_hosts=str(asked.known_hosts) if asked.known_hosts else None,
    )  # fmt: skip


def _ssh(asked: DeployRequest, target: ParsedTarget) -> SshTarget:
    hosts = [ssh_host(one) for one in (target.host or "").split("+")]
    given = {
        "user": asked.user,
        "key": str(asked.ssh_key) if asked.ssh_key else None,
        "known_hosts": str(asked.known_hosts) if asked.known_hosts else None,
        "folder": asked.folder,
        "python": asked.python,
    }
    known = {name: value for name, value in given.items() if value is not None}
    name = file_slug(target.text.replace(":", "-"))[:40]
    return SshTarget.model_validate({"kind": "ssh", "name": name, "hosts": hosts, "preflight": False, **known})


def _agreed(wanted: list[WantedDeployment], yes: bool) -> bool:
    """Show what the rented targets cost, and ask."""
    rented = [one for one in wanted if one.rented is not None]
    for one in rented:
        assert one.rented is not None
        request = request_of(one.rented).model_copy(update={"hours": one.hours})
        capped = one.rented.model_copy(update={"max_usd_per_hour": one.max_usd_per_hour})
        for line in offer_lines(request, offer_of(capped, listed_offers(cache_folder()))):
            typer.echo(f"  rent     {one.target.text}  {line}")
    return not rented or yes or typer.confirm("Rent?", default=False)


def _deployed(
    wanted: WantedDeployment, asked: DeployRequest, lock: threading.Lock, stop: threading.Event, single: bool
) -> TargetOutcome:
    store = store_of_user()

    def go_on() -> None:
        if stop.is_set():
            raise ValueError("interrupted")

    def say(line: str) -> None:
        with lock:
            typer.echo(line if single else f"{wanted.target.text}: {line}")

    judge = judged_by_transformers(store.data) if asked.verify and not wanted.sharded else None
    began = time.monotonic()
    try:
        deployment, timing = Deploying(store, wanted, say, judge, check=go_on).deploy()
    except (ValueError, OSError, LeftBehind, ProviderError, TransientFetchError) as error:
        if single:
            raise
        return TargetOutcome(wanted.target.text, problem=redacted(words_of(error)))
    bundle = read_bundle(store.bundles, deployment.bundle)
    measured = bundle.check
    usd = deployment.usd_per_hour
    price = "own" if deployment.rental is None and usd is None else "unknown" if usd is None else f"{usd:.3f}"
    row = (
        deployment.name,
        f"{bundle.level} ({'+'.join(bundle.compression) or 'unchanged'})",
        _size(measured.weights_bytes if measured else None),
        "" if measured is None or measured.speed is None else f"{measured.speed:.2f}",
        measured.loss_text if measured else "",
        bundle.verdict,
        *_timed(timing),
        "right",
        price,
        _per_million(usd, timing),
        f"{time.monotonic() - began:.0f}",
    )
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(deployment.expires_at))
    lines = (
        f"{deployment.name}: {deployment.url}/v1, token in {deployment.key_file}, until {until}",
        f"  take it down: rankwise undeploy {deployment.name}",
    )
    return TargetOutcome(wanted.target.text, row, lines)


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / _MIB:.1f}"


def _timed(timing: Timing) -> tuple[str, str]:
    """Milliseconds of a request, and units a second: three significant digits each."""
    return significant(1000 * timing.seconds), f"{significant(timing.per_second)} {timing.unit}"


def _per_million(usd_per_hour: float | None, timing: Timing) -> str:
    return "" if usd_per_hour is None else dollars(usd_per_hour / 3600 / timing.per_second * 1e6)


def _print(outcomes: list[TargetOutcome]) -> None:
    header = (
        "deployment", "level", "MiB", "speed-up", "answers lose", "verdict", "ms a request", "one user", "first answer",
        "USD/h", "USD per million", "took s",
    )  # fmt: skip
    rows = [outcome.row for outcome in outcomes if outcome.row is not None]
    if rows:
        print_table(header, rows, {"deployment", "level", "answers lose", "verdict", "first answer"})
    for outcome in outcomes:
        for line in outcome.lines:
            typer.echo(line)
        if outcome.problem:
            typer.echo(f"{outcome.target}: not deployed: {outcome.problem}", err=True)


def run_rollout(
    name: str,
    model: str | None,
    level: OptimizationLevel,
    from_run: Path | None,
    dtype: Dtype | None,
    max_loss: float,
    watch_seconds: float,
    verify: bool,
) -> int:
    """Roll out and return the exit code. What is not named stays as it is deployed, compression excepted."""
    _check_numbers(max_loss=max_loss, watch_seconds=watch_seconds)
    store = store_of_user()
    now = store.bundle(store.read(name))
    wanted = WantedBundle(
        model=model or "", level=level, layout=now.layout, dtype=dtype or now.dtype, max_loss=max_loss,
        max_sequences=now.max_sequences, max_length=now.max_length, group_timeout_seconds=now.group_timeout_seconds,
        name=now.model,
    )  # fmt: skip
    if from_run is not None:
        wanted = replace(wanted_of_run(from_run, wanted), name=now.model)
    elif model is None:
        wanted = replace(wanted, model=as_written(now.identity, now.manifest))
    judge = judged_by_transformers(store.data) if verify else None
    try:
        with ended_by_signals():
            deployment = roll_out(store, name, wanted, typer.echo, judge, watch_seconds)
    except RolledBack as error:
        typer.echo(str(error), err=True)
        return 1
    typer.echo(f"{name}: {deployment.bundle} is served at {deployment.url}; before: {deployment.previous[-1]}")
    return 0
