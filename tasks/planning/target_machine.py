"""The planner's machine model of a target. Does not import Prefect.

    machine = named_machine(target, known)                # None: the target names none
    machine = for_cell(machine, cell, target, known)      # with the cores of its ranks, and the ranks of a node

What the nodes of a cluster are, only `machine` can say: this machine submits, its own figures say nothing of them,
unless the cluster is a lab on it.
"""

from statistics import median

from configs.hardware.catalog import HardwareCatalog
from configs.hardware.hardware import Link, Machine
from configs.plans.preflight import SMALL_BYTES, TargetPreflight
from configs.spec.cell import Cell
from configs.targets.resources import ClusterTarget, Resources
from configs.targets.target import LocalTarget
from engine.planner.local import LocalMachine, local_devices, machine_of_devices

_OF_NODES = ("machine", "on_this_machine", "link", "device")
"""Fields of a cluster from which its nodes and links are predicted, and that are in no key of a cell."""


def named_machine(target: Resources, known: HardwareCatalog) -> Machine | None:
    """The instance of the catalog that a target names; None where it names none and is this machine.

    Raises ValueError for an instance that is not known, for ranks on the CPUs of one with GPUs, and for a cluster that
    names none.
    """
    if target.machine is not None:
        try:
            machine = known.instance(target.machine)
        except ValueError as error:
            raise ValueError(f"target {target.name}: machine: {error}") from error
        if on_unknown_cpus(target, machine):
            raise ValueError(
                f"target {target.name}: no predictions for `device: cpu`, because the catalog has the GPUs of "
                f"{machine.name} only"
            )
        return machine
    if isinstance(target, ClusterTarget):
        raise ValueError(
            f"target {target.name}: no predictions, because its nodes are unknown. Set `machine` to an instance of the "
            "catalog, such as `aws/p4d.24xlarge`, or set `on_this_machine: true` for a lab"
        )
    return None


def same_nodes(target: Resources | None, before: Resources | None) -> bool:
    """Return whether the planner takes two descriptions of a cluster for the same nodes and links.

    True of a target that is no cluster: of this machine no field says what it is.
    """
    if not isinstance(target, ClusterTarget) or not isinstance(before, ClusterTarget):
        return True
    return all(getattr(target, name) == getattr(before, name) for name in _OF_NODES)


def on_unknown_cpus(target: Resources, machine: Machine) -> bool:
    """Return whether ranks compute on the CPUs of an instance that the catalog knows by its GPUs."""
    return target.device == "cpu" and machine.accelerator.kind != "cpu"


def for_cell(machine: Machine, cell: Cell, target: Resources, known: HardwareCatalog) -> Machine:
    """A node as a cell has it: a rank's own cores of a CPU, and on a cluster the network shared by a node's ranks."""
    node = _by_cores(machine, cell.cores_per_rank, known)
    if not isinstance(target, ClusterTarget):
        return node
    nodes = max(cell.nodes, target.nodes_for(cell.layout.ranks))
    ranks = cell.layout.ranks // nodes
    between = machine.between
    if between is not None:
        share = between.bytes_per_second * machine.accelerators / ranks
        between = between.model_copy(update={"bytes_per_second": share})
    return node.model_copy(update={"accelerators": ranks, "between": between})


def local_node(target: Resources | None, cell: Cell, here: LocalMachine) -> Machine:
    """This machine as a cell has it: a GPU for each rank where there are GPUs, as `engine.rank.joining` chooses, else
    cores. Raises ValueError for more ranks than GPUs.
    """
    devices = local_devices(target or LocalTarget())
    if not devices:
        return here.while_running(cell)
    return machine_of_devices(devices, cell.layout.ranks, here.estimate.host_memory_bytes)


def lab_node(target: ClusterTarget, cell: Cell, here: LocalMachine, found: TargetPreflight | None) -> Machine:
    """A node of a lab on this machine: its cores while all ranks compute, and the link to other nodes.

    The link is the target's, else the median of what a preflight found. Raises ValueError where neither says anything.
    """
    nodes = max(cell.nodes, target.nodes_for(cell.layout.ranks))
    ranks = cell.layout.ranks // nodes
    node = here.while_running(cell)
    node = node.model_copy(update={"accelerators": ranks})
    if nodes == 1:
        return node
    link = _link(target, found)
    if link is None:
        raise ValueError(
            f"target {target.name}: the link between its nodes is unknown until preflight checks measure it. Or set "
            "`link: {latency_seconds: ..., bytes_per_second: ...}`"
        )
    return node.model_copy(
        update={"between": link.model_copy(update={"bytes_per_second": link.bytes_per_second / ranks})}
    )


def _link(target: ClusterTarget, found: TargetPreflight | None) -> Link | None:
    if target.link is not None:
        return Link(name=f"link of target {target.name}", **target.link.model_dump())
    if found is None or not found.pairs:
        return None
    # A small all-reduce of n ranks is 2 (n - 1) messages one after the other; bandwidth is that of the bus already.
    ranks = 2 * found.ranks_per_node
    hops = 2 * (ranks - 1)
    rate = median(pair.bytes_per_second for pair in found.pairs)
    summed = median(pair.sum_seconds or pair.latency_seconds for pair in found.pairs)
    messages = [pair.message_seconds for pair in found.pairs if pair.message_seconds is not None]
    return Link(
        name=f"link of target {target.name}, measured before the study",
        latency_seconds=_without_bytes(summed, hops / ranks * SMALL_BYTES / rate) / hops,
        bytes_per_second=rate,
        message_seconds=_without_bytes(median(messages), SMALL_BYTES / rate) if messages else None,
    )


def _without_bytes(seconds: float, sending: float) -> float:
    """Return the latency of an exchange without the time that its bytes take; at least a tenth of the whole."""
    return max(seconds / 10, seconds - sending)


def _by_cores(machine: Machine, cores_per_rank: int, known: HardwareCatalog) -> Machine:
    """An instance's CPU is one accelerator of all its cores in the catalog; a rank has its own cores only."""
    vcpus = known.instance_row(machine.name).vcpus if machine.accelerator.kind == "cpu" else None
    if vcpus is None or vcpus <= cores_per_rank:
        return machine
    whole, share = machine.accelerator, cores_per_rank / vcpus
    device = whole.model_copy(
        update={
            "memory_bytes": int(whole.memory_bytes * share),
            "bytes_per_second": whole.bytes_per_second * share,
            "peak_flops": {number: rate * share for number, rate in whole.peak_flops.items()},
        }
    )
    return machine.model_copy(update={"accelerator": device, "accelerators": vcpus // cores_per_rank})
