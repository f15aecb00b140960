"""`rankwise list-nodes`: this machine, Slurm partitions, instance types with prices, and rented nodes that run now.

rankwise list-nodes
rankwise list-nodes --hardware-filter "GPU:T4+, price<=2" --output nodes.json
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from configs.common.base import Frozen
from configs.common.system.cores import usable_cores
from configs.common.system.memory import host_memory_total
from flows.cli.options import write_output

if TYPE_CHECKING:
    from slurm.schedulers.commands.listing import Partition
    from tasks.providers.rental import Resource


class ListedNode(Frozen):
    """One line of the list and of the file. None: unknown, or there is none."""

    kind: Literal["local", "slurm", "instance", "rented"]
    name: str
    place: str | None = None
    nodes: int = 1
    vcpus: int | None = None
    accelerator: str | None = None
    accelerators: int = 0
    host_memory_bytes: int | None = None
    usd_per_hour: float | None = None
    state: str | None = None


def list_nodes(
    context: typer.Context,
    output: Annotated[Path | None, typer.Option(metavar="FILE.json", help="also write the list as JSON")] = None,
    hardware_filter: Annotated[
        str | None, typer.Option(metavar="FILTER", help='instances that fit: "GPU:T4+, count>=4, price<=6"')
    ] = None,
) -> None:
    """List where a study could run, and which rented nodes run now."""
    from flows.cli.errors import WRONG_STUDY, guarded, plainly

    work = lambda: plainly(lambda: _list(output, hardware_filter))  # noqa: E731
    raise typer.Exit(guarded(work, Path("list-nodes"), bool((context.obj or {}).get("debug")), WRONG_STUDY))


def _list(output: Path | None, hardware_filter: str | None) -> int:
    from flows.cli.tables import print_table

    instances = _instances(hardware_filter)
    own = [] if hardware_filter else [_this_machine(), *_partitions()]
    listed = [*own, *instances, *_rented()]
    print_table(("kind", "name", "place", "nodes", "vCPUs", "GPUs", "USD/h", "state"), [_row(each) for each in listed],
                {"kind", "name", "place", "state"})  # fmt: skip
    if output is not None:
        data: dict[str, Any] = {"nodes": [each.model_dump() for each in listed]}
        write_output(output, json.dumps(data, indent=1) + "\n")
    return 0


def _row(node: ListedNode) -> tuple[str, ...]:
    gpus = f"{node.accelerators} {node.accelerator}" if node.accelerators else ""
    price = "" if node.kind != "instance" else "unknown" if node.usd_per_hour is None else f"{node.usd_per_hour:.3f}"
    vcpus = "" if node.vcpus is None else str(node.vcpus)
    return (node.kind, node.name, node.place or "", str(node.nodes), vcpus, gpus, price, node.state or "")


def _this_machine() -> ListedNode:
    from flows.cli.doctor.gpus import amd_gpus, nvidia_gpus

    gpus = [*nvidia_gpus().names, *amd_gpus().names]
    return ListedNode(
        kind="local",
        name="local",
        vcpus=usable_cores(),
        accelerator=gpus[0] if gpus else None,
        accelerators=len(gpus),
        host_memory_bytes=host_memory_total(),
    )


def _partitions() -> list[ListedNode]:
    """Return the partitions of the Slurm cluster at hand; none where there is no Slurm."""
    from slurm.schedulers.commands.listing import ClusterError
    from slurm.schedulers.commands.partitions import read_cluster

    if shutil.which("sinfo") is None:
        return []
    try:
        cluster = read_cluster()
    except ClusterError as error:
        typer.echo(str(error), err=True)
        return []
    if cluster.private:
        typer.echo(f"Slurm: cluster {cluster.name} shows its users no partitions (PrivateData)", err=True)
    return [_partition(each) for each in cluster.partitions.values()]


def _partition(found: "Partition") -> ListedNode:
    """Return a partition by the least of its nodes; of GPUs, by that of the nodes that have any."""
    with_gpus = [node for node in found.nodes if node.gpus_of(None)]
    types = dict.fromkeys(name for node in with_gpus for name in node.gpu_types)
    return ListedNode(
        kind="slurm",
        name=found.name,
        nodes=found.node_count,
        vcpus=min((node.cpus for node in found.nodes), default=None),
        accelerator=(" or ".join(types) or "GPU") if with_gpus else None,
        accelerators=min((node.gpus_of(None) for node in with_gpus), default=0),
        host_memory_bytes=min((mb << 20 for node in found.nodes if (mb := node.memory_mb) is not None), default=None),
        state="up" if found.up else "down",
    )


def _instances(hardware_filter: str | None) -> list[ListedNode]:
    from configs.hardware.catalog import catalog
    from configs.hardware.hardware_filter import HardwareFilter, matching, parse_filter
    from flows.folders import cache_folder

    wanted = parse_filter(hardware_filter) if hardware_filter else HardwareFilter()
    return [
        ListedNode(
            kind="instance",
            name=each.name,
            place=each.region,
            vcpus=each.vcpus,
            accelerator=None if each.machine.accelerator.kind == "cpu" else each.machine.accelerator.name,
            accelerators=0 if each.machine.accelerator.kind == "cpu" else each.machine.accelerators,
            host_memory_bytes=each.machine.host_memory_bytes,
            usd_per_hour=each.machine.usd_per_hour,
        )
        for each in matching(wanted, catalog(cache_folder()))
    ]


def _rented() -> list[ListedNode]:
    """Return the rented machines of all providers whose credentials are at hand; the others are named on stderr."""
    from flows.cli.nodes.command import providers_at_hand
    from tasks.providers.giving_back import find_everything

    found, problems, _ = find_everything(providers_at_hand())
    for problem in problems:
        typer.echo(problem, err=True)
    return [_rented_node(each) for each in found if each.kind == "instance"]


def _rented_node(machine: "Resource") -> ListedNode:
    """Return a machine by its type and state; by its id where its cloud lists neither, as Azure does."""
    instance, _, state = machine.detail.partition(" ")
    return ListedNode(
        kind="rented",
        name=f"{machine.provider}/{instance or machine.id}",
        place=machine.zone or machine.region,
        state=", ".join(filter(None, [state, f"run {machine.run}"])),
    )
