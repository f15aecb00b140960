"""`rankwise lab`: a real Slurm cluster on this machine, for testing studies without a rented cluster.

sudo rankwise lab up --nodes 2 --bandwidth 100mbit,1gbit
eval "$(rankwise lab env)"
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from configs.common.printable import plural
from flows.cli.errors import resolved

if TYPE_CHECKING:
    from slurm.lab.plan import LabPlan

app = typer.Typer(help="Run a real Slurm cluster on this machine, with configurable link speeds.", no_args_is_help=True)

LabName = Annotated[str, typer.Option(metavar="NAME", help="name of the lab; its nodes are NAME1, NAME2, ...")]
LabFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="state folder of the lab", show_default="/var/lib/rankwise-lab/NAME")
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="node, for example lab1")]


@app.command()
def up(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(help="number of nodes", min=1, max=64)] = 2,
    cores_per_node: Annotated[int, typer.Option(help="cores of this machine per node", min=1)] = 1,
    bandwidth: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="link speeds, one partition each: 100mbit,1gbit gives link-100mbit, link-1gbit"
        ),
    ] = "none",
    name: LabName = "lab",
    folder: LabFolder = None,
    private_disks: Annotated[
        bool,
        typer.Option(
            "--private-disks", help="hide this project, the working folder, the home folder and /tmp from nodes"
        ),
    ] = False,
    hide: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="hide this folder from the nodes")] = None,
) -> None:
    """Start a cluster, or its missing parts; idempotent."""

    def work() -> int:
        from slurm.lab import cluster
        from slurm.lab.plan import requested

        hidden = {*(cluster.default_hidden() if private_disks else ()), *(resolved(each) for each in hide or [])}
        request = requested(
            name=name,
            folder=_folder(name, folder),
            nodes=nodes,
            cores_per_node=cores_per_node,
            bandwidths=tuple(each.strip() for each in bandwidth.split(",") if each.strip()),
            hidden=tuple(sorted(hidden)),
        )
        made = cluster.up(request)
        plan = cluster.find_lab(name, request.folder)
        typer.echo(f"lab {name} is up: {', '.join(made)}" if made else f"lab {name} is already up; nothing changed")
        if plan.shares_cores:
            cores = plural(len(plan.machine_cores), "core")
            typer.echo(f"warning: the nodes share the machine's {cores}, so speeds are not representative")
        typer.echo(f'partitions {", ".join(plan.partitions)}; to use it: eval "$(rankwise lab env{_named(name)})"')
        return 0

    _exit(context, work)


@app.command()
def down(context: typer.Context, name: LabName = "lab", folder: LabFolder = None) -> None:
    """Stop a cluster and all its jobs, also after a crash."""

    def work() -> int:
        from slurm.lab import cluster

        cluster.down(name, _folder(name, folder))
        typer.echo(f"lab {name} is down")
        return 0

    _exit(context, work)


@app.command("status")
def status_command(context: typer.Context, name: LabName = "lab", folder: LabFolder = None) -> None:
    """Show daemons, nodes and links; exit code 0 if all of them work."""

    def work() -> int:
        from flows.cli.tables import print_table
        from slurm.lab import cluster

        plan = _plan_as_root(name, folder)
        standing = cluster.status(plan)
        print_table(("what", "state", "detail"), [(each.what, each.state, each.detail) for each in standing], words=3)
        jobs = cluster.queued_jobs(plan)
        typer.echo(f"jobs in the queue: {'unknown' if jobs is None else jobs}; state in {plan.folder}")
        return 0 if all(each.works for each in standing) else 1

    _exit(context, work)


@app.command()
def env(context: typer.Context, name: LabName = "lab", folder: LabFolder = None) -> None:
    """Print the environment variables of the lab: eval "$(rankwise lab env)"."""

    def work() -> int:
        typer.echo(f"export SLURM_CONF={shlex.quote(str(_plan(name, folder).slurm_conf))}")
        return 0

    _exit(context, work)


@app.command("exec")
def execute(
    context: typer.Context,
    node: NodeArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="command to run")],
    name: LabName = "lab",
    folder: LabFolder = None,
) -> None:
    """Run a command on a node."""

    def work() -> int:
        from slurm.lab import nodes

        plan = _plan_as_root(name, folder)
        plan.number(node)
        nodes.enter_node(plan, node, command)
        return 0

    _exit(context, work)


@app.command()
def link(
    context: typer.Context,
    node: NodeArgument,
    action: Annotated[Literal["cut", "restore"], typer.Argument(help="cut or restore")],
    name: LabName = "lab",
    folder: LabFolder = None,
) -> None:
    """Cut or restore the network link of a node."""

    def work() -> int:
        from slurm.lab import network

        plan = _plan_as_root(name, folder)
        (network.cut_link if action == "cut" else network.restore_link)(plan, node)
        return 0

    _exit(context, work)


@app.command()
def restart(
    context: typer.Context,
    daemon: Annotated[
        Literal["munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd"], typer.Argument(help="daemon to restart")
    ],
    node: Annotated[str | None, typer.Option(metavar="NODE", help="node of the slurmd")] = None,
    name: LabName = "lab",
    folder: LabFolder = None,
) -> None:
    """Restart a daemon while jobs run."""

    def work() -> int:
        from slurm.lab import daemons

        plan = _plan_as_root(name, folder)
        daemons.restart(plan, daemons.find_daemon(plan, daemon, node))
        return 0

    _exit(context, work)


def _folder(name: str, named: Path | None) -> Path:
    from configs.common.base import expanded
    from slurm.lab.plan import BASE_FOLDER

    return resolved(expanded(named)) if named else BASE_FOLDER / name


def _plan(name: str, named: Path | None) -> "LabPlan":
    from slurm.lab import cluster

    return cluster.find_lab(name, _folder(name, named) if named else None)


def _plan_as_root(name: str, named: Path | None) -> "LabPlan":
    from slurm.lab.commands import need_root

    need_root()
    return _plan(name, named)


def _named(name: str) -> str:
    return "" if name == "lab" else f" --name {name}"


def _exit(context: typer.Context, work: Callable[[], int]) -> None:
    from flows.cli.errors import guarded, plainly

    debug = bool((context.obj or {}).get("debug"))
    raise typer.Exit(guarded(lambda: plainly(work), Path("lab"), debug))
